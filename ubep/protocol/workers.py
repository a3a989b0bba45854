"""Workers of a rank: how many serve which role, and how records are cut into equal slices."""

from __future__ import annotations

import torch
from torch import Tensor

# Cost of announcing one expert's count against sending one (token, expert) pair. Only the ratio of the
# two group sizes follows from it; see split_roles.
COUNT_COST = 1
SEND_COST = 8


def split_roles(workers: int, experts: int, pairs: int) -> tuple[int, int]:
    """(counting, sending) workers of one rank; (1, 1) for a single worker, which does both.

    The paper's cost model (UBEP, kernel decomposition): counting grows with the number of experts,
    sending with tokens x top-k. Workers are split in that proportion, at least one for each role.
    """
    if workers == 1:
        return 1, 1
    count = COUNT_COST * experts
    send = SEND_COST * pairs
    counting = round(workers * count / max(1, count + send))
    counting = min(max(counting, 1), workers - 1)
    return counting, workers - counting


def slice_edges(total: int, workers: int) -> Tensor:
    """Edges [workers + 1] of equal slices of `total` records; sizes differ by at most 1."""
    return torch.arange(workers + 1) * total // workers


def slice_cuts(item_counts: Tensor, workers: int) -> Tensor:
    """For every slice edge, how many records of each item lie before it; int64 [workers + 1, items].

    item_counts: records of each item in sending order. An edge falls into the item found by search
    in the prefix sums; clamping gives that item its part and all others nothing or everything.
    """
    before = item_counts.cumsum(0) - item_counts
    edges = slice_edges(int(item_counts.sum()), workers)
    return (edges[:, None] - before).clamp(min=0).minimum(item_counts)
