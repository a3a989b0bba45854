"""One point of the benchmark: sizes, each rank's tokens and routing, and the right answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ubep.workload import DTYPES

ROUTING_SETS = 3  # in rotation, so that no contestant learns one by heart
# Of the largest product of a token's row: sums of topk terms in the dtype, weights rounded to the dtype.
TOLERANCE = 0.03

# Works on received rows [n, H] in place; counts() gives the rows of each local expert, in row order.
Expert = Callable[[Tensor, Callable[[], Tensor]], None]


@dataclass(frozen=True)
class Case:
    """tokens: of each rank.  seed: of tokens, routing and the order of blocks."""

    ranks: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    dtype: str = "bfloat16"
    seed: int = 0

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.torch_dtype.itemsize

    @property
    def moved_bytes(self) -> int:
        """Rows of one rank, one for each (token, expert), there and back; own experts included."""
        return 2 * self.tokens * self.topk * self.row_bytes

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class RoutingSet:
    """idx int64 [T, K], distinct experts in a row; weights float32 [T, K], rows that sum to 1."""

    idx: Tensor
    weights: Tensor


class Inputs:
    """What one rank brings: x [T, H] and the routing sets."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.rank = rank
        generator = torch.Generator().manual_seed(case.seed * 1009 + rank)
        self.x = torch.randn(case.tokens, case.hidden, generator=generator).to(case.torch_dtype)
        self.sets = [_draw(case, generator) for _ in range(ROUTING_SETS)]

    def wrong(self, index: int, out: Tensor, factor: Tensor) -> str | None:
        """None if out [T, H] is sum_k w_k factor[expert_k] x, else by how much it isn't."""
        routing = self.sets[index]
        terms = routing.weights * factor[routing.idx]
        want = terms.sum(1, keepdim=True) * self.x.float()
        limit = TOLERANCE * terms.abs().sum(1, keepdim=True) * self.x.float().abs().amax(1, keepdim=True)
        error = (out.float() - want).abs()
        if bool((error <= limit).all()):  # false for NaN
            return None
        return f"differs from the dense answer by {float(error.max()):.3g}"


def _draw(case: Case, generator: torch.Generator) -> RoutingSet:
    idx = torch.rand(case.tokens, case.experts, generator=generator).topk(case.topk).indices
    weights = torch.rand(case.tokens, case.topk, generator=generator) + 0.1
    return RoutingSet(idx.contiguous(), weights / weights.sum(1, keepdim=True))


def touch(rows: Tensor, counts: Callable[[], Tensor]) -> None:
    """The expert of timed rounds: reads and writes every row, exact. All rows come back negated."""
    rows.neg_()


def touch_factor(case: Case) -> Tensor:
    """What `touch` does to the rows of each expert, float32 [E]."""
    return torch.full((case.experts,), -1.0)


def telling_factor(case: Case) -> Tensor:
    """An exact factor that differs between neighbouring experts: rows of the wrong expert show."""
    expert = torch.arange(case.experts)
    return torch.pow(2.0, (expert % 5) - 2) * (1 - 2 * (expert // 5 % 2))


def telling_expert(case: Case, rank: int) -> Expert:
    """The expert of validating rounds: multiplies by the expert's `telling_factor`."""
    first = rank * case.local_experts
    own = telling_factor(case)[first : first + case.local_experts]

    def work(rows: Tensor, counts: Callable[[], Tensor]) -> None:
        rows.mul_(own.repeat_interleave(counts()).to(rows.dtype)[:, None])

    return work
