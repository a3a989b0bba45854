"""The benchmark: ubep against what else moves rows between experts, in one job, as paired ratios."""
