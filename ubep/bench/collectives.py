"""The peers that exchange rows by an all-to-all: MPI and gloo done well, and what people write."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ubep.bench.case import Expert
from ubep.bench.contestants import Contestant, Setting, capacity_rows


class Strong(Contestant):
    """Counts, then rows, by an all-to-all; packing, regrouping and reducing by the best kernels there are.

    Nothing is allocated in a round that could be allocated before.
    """

    def setup(self, setting: Setting) -> None:
        case = setting.case
        self._inputs, self._kernels, self._case = setting.inputs, setting.kernels, case
        sent, most = case.tokens * case.topk, capacity_rows(case)
        x = setting.inputs.x
        self._packed, self._returned = (x.new_empty(sent, case.hidden) for _ in range(2))
        self._arrived, self._grouped = (x.new_empty(most, case.hidden) for _ in range(2))
        self._out: Tensor = torch.empty_like(x)
        self._incoming = torch.empty(case.ranks, case.local_experts, dtype=torch.int64)
        if setting.kernels.label:
            self.label = f"{self.name} ({setting.kernels.label})"

    @abc.abstractmethod
    def exchange_counts(self, out: Tensor, counts: Tensor) -> None:
        """int64 [R, L] each."""

    @abc.abstractmethod
    def exchange_rows(self, out: Tensor, rows: Tensor, out_split: list[int], split: list[int]) -> None:
        """Rows by rank; the tensors may be longer than what the splits say."""

    def round(self, index: int, expert: Expert) -> Tensor:
        routing, kernels, incoming = self._inputs.sets[index], self._kernels, self._incoming
        plan = kernels.sort_rows(routing.idx, self._case.experts)
        outgoing = plan.counts.view(incoming.shape)
        self.exchange_counts(incoming, outgoing)
        kernels.gather_rows(self._packed, self._inputs.x, plan.token)
        split, out_split = outgoing.sum(1).tolist(), incoming.sum(1).tolist()
        self.exchange_rows(self._arrived, self._packed, out_split, split)
        there, back = kernels.regroup(incoming)
        count = len(there)
        grouped = self._grouped[:count]
        kernels.gather_rows(grouped, self._arrived, there)
        expert(grouped, lambda: incoming.sum(0))
        kernels.gather_rows(self._arrived[:count], grouped, back)
        self.exchange_rows(self._returned, self._arrived, split, out_split)
        kernels.reduce_rows(self._out, self._returned, plan.place, routing.weights)
        return self._out


class Mpi(Strong):
    """The strong peer: Alltoall of counts, Alltoallv of whole rows (a datatype of their own)."""

    name = "mpi"

    def setup(self, setting: Setting) -> None:
        super().setup(setting)
        self._mpi = setting.mpi
        self._world = setting.mpi.COMM_WORLD
        self._row = setting.mpi.BYTE.Create_contiguous(setting.case.row_bytes).Commit()
        self._memory: dict[int, Any] = {}

    def _buffer(self, rows: Tensor) -> Any:
        at = rows.data_ptr()
        if at not in self._memory:
            self._memory[at] = self._mpi.memory.fromaddress(at, rows.numel() * rows.element_size())
        return self._memory[at]

    def exchange_counts(self, out: Tensor, counts: Tensor) -> None:
        nbytes = counts.numel() * counts.element_size()
        source = self._mpi.memory.fromaddress(counts.data_ptr(), nbytes)
        self._world.Alltoall([source, self._mpi.INT64_T], [self._buffer(out), self._mpi.INT64_T])

    def exchange_rows(self, out: Tensor, rows: Tensor, out_split: list[int], split: list[int]) -> None:
        self._world.Alltoallv(
            [self._buffer(rows), split, _starts(split), self._row],
            [self._buffer(out), out_split, _starts(out_split), self._row],
        )

    def close(self) -> None:
        self._memory.clear()
        self._row.Free()


class Gloo(Strong):
    """The same over torch.distributed's gloo. It needs a core for a thread of its own: not bound."""

    name = "gloo"
    pinned = False

    def exchange_counts(self, out: Tensor, counts: Tensor) -> None:
        dist.all_to_all_single(out, counts)

    def exchange_rows(self, out: Tensor, rows: Tensor, out_split: list[int], split: list[int]) -> None:
        dist.all_to_all_single(out[: sum(out_split)], rows[: sum(split)], out_split, split)


class Plain(Contestant):
    """What people write: torch operations and all_to_all_single over gloo."""

    name = "torch"
    pinned = False

    def setup(self, setting: Setting) -> None:
        self._inputs, self._case = setting.inputs, setting.case

    def round(self, index: int, expert: Expert) -> Tensor:
        case, x, routing = self._case, self._inputs.x, self._inputs.sets[index]
        flat = routing.idx.view(-1)
        order = flat.argsort(stable=True)
        outgoing = torch.bincount(flat, minlength=case.experts).view(case.ranks, -1)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        split, out_split = outgoing.sum(1).tolist(), incoming.sum(1).tolist()
        packed = x.index_select(0, order // case.topk)
        arrived = x.new_empty(sum(out_split), case.hidden)
        dist.all_to_all_single(arrived, packed, out_split, split)
        local = torch.arange(case.local_experts).repeat(case.ranks).repeat_interleave(incoming.view(-1))
        there = local.argsort(stable=True)
        grouped = arrived.index_select(0, there)
        expert(grouped, lambda: incoming.sum(0))
        returning = torch.empty_like(grouped)
        returning[there] = grouped
        returned = torch.empty_like(packed)
        dist.all_to_all_single(returned, returning, split, out_split)
        rows = torch.empty_like(returned)
        rows[order] = returned
        weights = routing.weights.to(x.dtype)[:, :, None]
        return (rows.view(case.tokens, case.topk, case.hidden) * weights).sum(1)


def _starts(split: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for count in split:
        starts.append(at)
        at += count
    return starts
