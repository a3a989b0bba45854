"""What dispatch returns to its caller: rows, counts, and the handle that leads them back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ubep.protocol.dispatch import ReceivedRecords
from ubep.protocol.plan import Plan
from ubep.protocol.routing import SentRecords


@dataclass(eq=False)
class Handle:
    """The routing of one dispatch; combine and repeated dispatches take it.

    Bound to its layer (`generation`, unique in the process), lane and epoch. It holds no window
    memory, so any number may be live. `release` drops the routing early.
    """

    generation: int
    lane: int
    epoch: int
    plan: Plan
    rank: int
    sent: SentRecords
    received: ReceivedRecords
    weights: Tensor | None = None
    released: bool = False

    def release(self) -> None:
        """Refuse any further use."""
        self.released = True

    @property
    def num_rows(self) -> int:
        """Rows that combine expects."""
        return self.received.layout.num_rows


@dataclass
class Received:
    """The result of one dispatch on one rank; N rows.

    x [N, H]: token-expert: local expert after local expert, each by source rank, then source token,
        gaps of `expert_alignment` zeroed; token-rank: by source rank, then source token.
    scales float32 [N, S] or None: with `keep_quantised`, x is fp8 or int8 and these are its scales.
    weights float32: [N] (0 in gaps), token-rank [N, K] (0 where the expert is elsewhere).
    expert_counts int64 [L]: rows of each local expert, without gaps.
    """

    x: Tensor
    scales: Tensor | None
    weights: Tensor
    handle: Handle

    @property
    def _got(self) -> ReceivedRecords:
        return self.handle.received

    @cached_property
    def expert_counts(self) -> Tensor:
        got = self._got
        if not self.handle.plan.per_rank:
            return got.layout.count
        local = len(self.handle.plan.local_experts[self.handle.rank])
        kept = got.expert[(got.row >= 0).expand_as(got.expert)]
        return torch.bincount(kept[kept >= 0], minlength=local)

    @property
    def expert_offsets(self) -> Tensor:
        """First row of each group (local expert; token-rank: one group), and the end; int64 [G + 1]."""
        return self._got.layout.offset

    @property
    def dropped(self) -> int:
        """Rows that exceeded `expert_capacity` and were dropped."""
        return self._got.dropped

    @cached_property
    def topk_idx(self) -> Tensor:
        """Token-rank: local expert ids of each row, -1 where the expert is elsewhere; int64 [N, K]."""
        return _by_row(self._got, self._got.expert, -1)

    @cached_property
    def source_rank(self) -> Tensor:
        """Rank that each row comes from, -1 in gaps; int64 [N]."""
        return _by_row(self._got, self._got.source[:, None], -1).squeeze(1)

    @cached_property
    def source_token(self) -> Tensor:
        """Index of each row's token at its source, -1 in gaps; int64 [N]."""
        return _by_row(self._got, self._got.token[:, None], -1).squeeze(1)


def _by_row(got: ReceivedRecords, values: Tensor, empty: float) -> Tensor:
    """Values of the records [n, m], laid out as the rows are; [N, m]."""
    out = values.new_full((got.layout.num_rows, values.shape[1]), empty)
    record, entry = (got.row >= 0).nonzero(as_tuple=True)
    out[got.row[record, entry]] = values[record]
    return out


def row_weights(plan: Plan, got: ReceivedRecords) -> Tensor:
    """The top-k weights of the rows, float32 [N], or [N, K] in the token-rank layout."""
    if plan.per_rank:
        return _by_row(got, got.weight, 0.0)
    out = torch.zeros(got.layout.num_rows)
    record, entry = (got.row >= 0).nonzero(as_tuple=True)
    out[got.row[record, entry]] = got.weight[record, entry]
    return out
