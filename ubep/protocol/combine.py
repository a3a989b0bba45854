"""Combine: expert outputs back to their tokens, summed in the stated order."""

from __future__ import annotations

import torch
from torch import Tensor

from ubep.errors import PlanMismatchError, UbepError
from ubep.protocol.dispatch import ReceivedRecords, row_of
from ubep.protocol.header import combine_tag
from ubep.protocol.operation import Operation, Reader, read_rows
from ubep.protocol.plan import RankPlan
from ubep.protocol.reduction import reduce_rows
from ubep.protocol.routing import RowLayout, SentRecords, return_bounds


class Combine(Operation):
    """One combine of y [N, H]; after it `out` [T, H] and `weights` float32 [T, K] hold the result.

    A record that source s sent comes back to s as record of the same number. With `deduplicate` the
    rows of one token on one rank are summed there first, in ascending k, then here in ascending rank;
    otherwise all rows are summed here in ascending k.
    weighted: multiply by the weights of the dispatch; False where a caller needs the plain sum.
    row_weights float32 [N] (token-rank: [N, K]): a number for each row that comes back unreduced in
    `weights`, at the (token, k) that the row belongs to; None: zeros.
    """

    name = "combine"

    def __init__(
        self,
        view: RankPlan,
        epoch: int,
        lane: int,
        y: Tensor,
        sent: SentRecords,
        received: ReceivedRecords,
        *,
        handle_epoch: int = 0,
        weighted: bool = True,
        row_weights: Tensor | None = None,
        error: UbepError | None = None,
    ) -> None:
        super().__init__(view, epoch, lane, error)
        self.record = self.plan.combine_record
        self.tag = combine_tag(handle_epoch)
        self.y = y
        self.sent = sent
        self.received = received
        self.row_weights = row_weights
        self._weighted = weighted and self.plan.workload.combine == "weighted"
        if error is None:
            self._outgoing = return_bounds(view, torch.tensor(received.start).diff().tolist())
        self.out: Tensor
        self.weights: Tensor

    # ---- sending

    def pack(self, peer: int, lo: int, hi: int) -> Tensor:
        got = self.received
        where = slice(got.start[peer] + lo, got.start[peer] + hi)
        row, entries = got.row[where], self.plan.entries
        kept = row >= 0
        index = row.clamp(min=0).to(self.y.device)
        rows = self.y[index] if len(self.y) else self.y.new_zeros(*row.shape, self.y.shape[1])
        if self.plan.deduplicate and not self.plan.per_rank:
            weight = got.weight[where].to(rows.device) if self._weighted else None
            data = reduce_rows(rows, weight, kept.to(rows.device), self.y.dtype)
        else:
            data = rows[:, 0].masked_fill(~kept.to(rows.device), 0)
        aux = torch.zeros(hi - lo, entries)
        if self.row_weights is not None and len(self.y):
            picked = self.row_weights.cpu()[row.clamp(min=0)]
            aux = picked.squeeze(1) if self.plan.per_rank else picked
            aux = torch.where(kept, aux, 0.0)
        return self.record.join(data, None, aux)

    def publish(self) -> list[tuple[int, Tensor]]:
        if self.own_refusal is not None:
            return []
        aux = torch.zeros(len(self.y), self.plan.entries)
        if self.row_weights is not None:
            aux = self.row_weights.cpu().view(len(self.y), self.plan.entries)
        return [(self.plan.layout.rows(self.parity), self.record.join(self.y, None, aux))]

    # ---- receiving

    def _settle(self) -> None:
        for source, head in sorted(self.headers.items()):
            expected = self.sent.start[source + 1] - self.sent.start[source]
            if head.records != expected:
                self.error = PlanMismatchError(
                    f"rank {source} returns {head.records} records, rank {self.rank} sent it {expected}"
                )
                return
            if head.base != 0:
                self.error = PlanMismatchError(
                    f"rank {source} combines by fused kernels, rank {self.rank} by the driver: set a tracer, "
                    "and use tensors that the backend cannot read, on all ranks or on none"
                )
                return
        w = self.plan.workload
        self._inputs = self.y.new_zeros(self.sent.num_tokens * w.topk, w.hidden, dtype=w.torch_dtype)
        self.weights = torch.zeros(self.sent.num_tokens, w.topk)

    def place(self, source: int, lo: int, hi: int, records: Tensor) -> None:
        if self.refused:
            return
        sent = self.sent
        where = slice(sent.start[source] + lo, sent.start[source] + hi)
        rows = self.record.rows(records, self._inputs.dtype).to(self._inputs.device)
        self._inputs.index_copy_(0, sent.slot[where].to(rows.device), rows)
        if self.row_weights is not None:
            aux = self.record.meta(records, torch.float32)
            if self.plan.deduplicate:
                record, k = (sent.expert[where] >= 0).nonzero(as_tuple=True)
                self.weights[sent.token[where][record], k] = aux[record, k]
            else:
                self.weights.view(-1)[sent.slot[where]] = aux[:, 0]
        self.placed[source] = hi

    def fetch(self, source: int, count: int, read: Reader) -> None:
        if self.refused:
            return
        plan, sent = self.plan, self.sent
        where = slice(sent.start[source], sent.start[source + 1])
        groups = [source] if plan.per_rank else list(plan.local_experts[source])
        start = RowLayout.of(plan, self.received.counts[:, groups]).start[self.rank]
        rows = row_of(plan.per_rank, start, sent.expert[where], sent.position[where])[:, 0]
        base = plan.layout.rows(self.parity)
        records = read_rows(read, source, base, self.record.nbytes, rows)
        self.place(source, 0, count, records)

    def finish(self) -> None:
        if self.refused:
            return
        w, sent = self.plan.workload, self.sent
        inputs = self._inputs.view(sent.num_tokens, w.topk, w.hidden)
        weight = sent.slot_weight if self._weighted else None
        if weight is not None:
            weight = weight.to(inputs.device)
        self.out = reduce_rows(inputs, weight, sent.slot_valid.to(inputs.device), w.torch_dtype)
