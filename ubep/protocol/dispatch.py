"""Dispatch: tokens to their experts. What is packed, and where each row lands."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ubep.errors import CapacityError, UbepError
from ubep.protocol.operation import Operation, Piece, Reader, read_rows
from ubep.protocol.plan import RankPlan
from ubep.protocol.quantise import QUANTISED_DTYPE, dequantise, quantise
from ubep.protocol.routing import RowLayout, SentRecords


@dataclass
class ReceivedRecords:
    """What one rank received in one dispatch, as combine and the user need it.

    Records of source s are start[s] .. start[s + 1]; n in all, with M = plan.entries experts in each.
    row int64 [n, M] (token-rank: [n, 1]): where the record was placed, -1: nowhere (no such expert, or
    dropped); token int64 [n]: index at its source; expert int64 [n, M]: local index, -1: none;
    weight float32 [n, M].  counts int64 [R, groups]: rows by source, for this rank or for all.
    """

    layout: RowLayout
    counts: Tensor
    start: list[int]
    row: Tensor
    token: Tensor
    expert: Tensor
    weight: Tensor
    dropped: int = 0

    @cached_property
    def source(self) -> Tensor:
        """Source rank of each record, int64 [n]."""
        lengths = torch.tensor(self.start).diff()
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


class Dispatch(Operation):
    """One dispatch of x [T, H]; after it `rows`, `scales` and `received` hold the result.

    sent: the routing (None when this rank refuses).  keep_quantised: leave rows and scales as they
    travelled instead of returning to the workload's dtype.
    """

    name = "dispatch"

    def __init__(
        self,
        view: RankPlan,
        epoch: int,
        lane: int,
        x: Tensor,
        sent: SentRecords | None,
        *,
        tag: int = 0,
        keep_quantised: bool = False,
        error: UbepError | None = None,
    ) -> None:
        super().__init__(view, epoch, lane, error)
        self.record = self.plan.dispatch_record
        self.tag = tag
        self.x = x
        self.sent = sent
        self._outgoing = sent.bounds if sent else []
        self._meta = sent.meta() if sent else None
        self._keep_quantised = keep_quantised
        self.rows: Tensor
        self.scales: Tensor | None = None
        self.received: ReceivedRecords

    # ---- sending

    def _quantised(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        kind = self.plan.workload.quantise
        return (rows, None) if kind == "none" else quantise(rows, kind)

    def pack(self, peer: int, lo: int, hi: int) -> Tensor:
        assert self.sent is not None
        assert self._meta is not None
        records = slice(self.sent.start[peer] + lo, self.sent.start[peer] + hi)
        return self.record.join(*self._quantised(self.x[self.sent.token[records]]), self._meta[records])

    def targets(self, peer: int, lo: int, hi: int) -> list[Piece]:
        if self.placement == "staged":
            return super().targets(peer, lo, hi)
        assert self.sent is not None
        records = slice(self.sent.start[peer] + lo, self.sent.start[peer] + hi)
        start = RowLayout.of(self.plan, self._group_counts(peer)).start[self.rank]
        row = row_of(self.plan.per_rank, start, self.sent.expert[records], self.sent.position[records])
        return self._pieces(row[:, 0], lo)

    def sources(self, source: int, lo: int, hi: int) -> list[Piece]:
        if self.placement == "staged":
            return super().sources(source, lo, hi)
        # Group after group in the source's sending order, each a run of rows.
        start, count = self.received.layout.start[source], self._group_counts(self.rank)[source]
        groups = torch.zeros(1, dtype=torch.int64)
        if not self.plan.per_rank:
            items = RankPlan(self.plan, source).items
            groups = self.plan.experts.local_index[items[self.plan.experts.owner[items] == self.rank]]
        rows = torch.cat([torch.arange(int(count[g])) + start[g] for g in groups.tolist()])
        return self._pieces(rows[lo:hi], lo)

    def _pieces(self, rows: Tensor, lo: int) -> list[Piece]:
        """Records lo, lo + 1, ... at the given rows of the rows region; neighbours in one piece."""
        breaks = [0, *((rows.diff() != 1).nonzero().squeeze(1) + 1).tolist(), len(rows)]
        base = self.plan.layout.rows(self.parity)
        return [
            (base + int(rows[a]) * self.wire_bytes, lo + a, lo + b) for a, b in itertools.pairwise(breaks)
        ]

    def publish(self) -> list[tuple[int, Tensor]]:
        if self.sent is None or self._meta is None:
            return []
        layout = self.plan.layout
        rows, scales = self._quantised(self.x)
        records = self.record.join(rows, scales, self._meta.new_zeros(len(rows), self._meta.shape[1]))
        lists = self._meta.contiguous().view(torch.uint8)
        return [(layout.rows(self.parity), records), (layout.lists(self.parity), lists)]

    def _base(self, peer: int) -> int:
        return self.sent.start[peer] if self.sent else 0

    # ---- counts

    def _groups(self, rank: int) -> Tensor:
        """Columns of the full counts that belong to a rank."""
        return torch.tensor(
            [rank] if self.plan.per_rank else self.plan.local_experts[rank], dtype=torch.int64
        )

    def _counts(self, peer: int) -> Tensor | None:
        assert self.sent is not None
        return self.sent.counts if self.plan.counts_everywhere else self.sent.counts[self._groups(peer)]

    def _counts_heard(self) -> int:
        if not self.plan.counts_everywhere:
            return len(self._groups(self.rank))
        return self.plan.world_size if self.plan.per_rank else self.plan.workload.num_experts

    @cached_property
    def _heard_counts(self) -> Tensor:
        """Counts of all sources, int64 [R, groups]."""
        heard = [self.headers[source].counts for source in range(self.plan.world_size)]
        return torch.stack([counts for counts in heard if counts is not None])

    def _group_counts(self, rank: int) -> Tensor:
        """Rows by source and group of a rank, int64 [R, G]."""
        return (
            self._heard_counts[:, self._groups(rank)] if self.plan.counts_everywhere else self._heard_counts
        )

    # ---- receiving

    def _settle(self) -> None:
        plan, w = self.plan, self.plan.workload
        if w.expert_capacity is not None and w.overflow == "refuse":
            total = self._heard_counts.sum(0)
            worst = int(total.argmax())
            if total[worst] > w.expert_capacity:
                what = "rank" if plan.per_rank else "expert"
                self.error = CapacityError(
                    f"{what} {worst} would receive {int(total[worst])} rows, "
                    f"expert_capacity is {w.expert_capacity}: raise it, or choose overflow='drop'"
                )
                return
        layout = RowLayout.of(plan, self._group_counts(self.rank))
        records = torch.tensor([self.incoming(source)[-1] for source in range(plan.world_size)])
        start = [0, *records.cumsum(0).tolist()]
        n, entries = start[-1], plan.entries
        self.received = ReceivedRecords(
            layout=layout,
            counts=self._heard_counts,
            start=start,
            row=torch.full((n, 1 if plan.per_rank else entries), -1),
            token=torch.empty(n, dtype=torch.int64),
            expert=torch.empty(n, entries, dtype=torch.int64),
            weight=torch.empty(n, entries),
        )
        dtype = w.torch_dtype
        if self._keep_quantised and w.quantise != "none":
            dtype = QUANTISED_DTYPE[w.quantise]
            self.scales = self.x.new_zeros(layout.num_rows, self.record.scales, dtype=torch.float32)
        self.rows = self.x.new_empty(layout.num_rows, w.hidden, dtype=dtype)

    def place(self, source: int, lo: int, hi: int, records: Tensor) -> None:
        if not self.refused:
            self._place(source, lo, hi, records, self.record.meta(records))

    def _place(self, source: int, lo: int, hi: int, records: Tensor, meta: Tensor) -> None:
        got, entries = self.received, self.plan.entries
        where = slice(got.start[source] + lo, got.start[source] + hi)
        expert = meta[:, 1 : 1 + entries].to(torch.int64)
        row = row_of(
            self.plan.per_rank, got.layout.start[source], expert, meta[:, 1 + entries : 1 + 2 * entries]
        )
        capacity = self.plan.workload.expert_capacity
        if capacity is not None:
            first = got.layout.offset[:1] if self.plan.per_rank else got.layout.offset[expert.clamp(min=0)]
            over = (row >= 0) & (row - first >= capacity)
            got.dropped += int(over.sum())
            row = row.masked_fill(over, -1)
        got.row[where] = row
        got.token[where] = meta[:, 0]
        got.expert[where] = expert
        got.weight[where] = meta[:, 1 + 2 * entries :].contiguous().view(torch.float32)
        self._store(records, row)
        self.placed[source] = hi

    def _store(self, records: Tensor, row: Tensor) -> None:
        kind = self.plan.workload.quantise
        records = records.to(self.rows.device)
        data = self.record.rows(records, self.rows.dtype if kind == "none" else QUANTISED_DTYPE[kind])
        scales = self.record.scale(records) if kind != "none" else None
        if scales is not None and not self._keep_quantised:
            data = dequantise(data, scales, kind, self.rows.dtype)
        record, entry = (row >= 0).nonzero(as_tuple=True)
        target, record = (index.to(self.rows.device) for index in (row[record, entry], record))
        self.rows.view(_plain(self.rows.dtype)).index_copy_(0, target, data.view(_plain(data.dtype))[record])
        if scales is not None and self.scales is not None:
            self.scales.index_copy_(0, target, scales[record])

    def fetch(self, source: int, count: int, read: Reader) -> None:
        if self.refused:
            return
        layout, nbytes = self.plan.layout, self.plan.list_bytes
        base = layout.lists(self.parity) + self.headers[source].base * nbytes
        meta = read(source, base, count * nbytes).view(torch.int32).view(count, nbytes // 4)
        rows = layout.rows(self.parity)
        records = read_rows(read, source, rows, self.record.nbytes, meta[:, 0])
        self._place(source, 0, count, records, meta)

    def finish(self) -> None:
        if self.refused:
            return
        layout = self.received.layout
        for offset, count, end in zip(
            layout.offset[:-1].tolist(), layout.count.tolist(), layout.offset[1:].tolist(), strict=True
        ):
            if offset + count < end:
                self.rows[offset + count : end] = 0


def row_of(per_rank: bool, start: Tensor, expert: Tensor, position: Tensor) -> Tensor:
    """Final rows of records from one source: start int64 [G], expert and position [n, M] -> int64 [n, M].

    In the token-rank layout a record has one row, [n, 1].
    """
    if per_rank:
        return start + position[:, :1].to(torch.int64)
    return torch.where(expert >= 0, start[expert.clamp(min=0)] + position, -1)


def _plain(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same size on which indexing is implemented everywhere."""
    return torch.uint8 if dtype == torch.float8_e4m3fn else dtype
