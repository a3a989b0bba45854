"""What is measured: one class for each contestant, all with the same interface."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ubep.backend import Bootstrap
from ubep.bench.arena import Arena
from ubep.bench.case import Case, Expert, Inputs, telling_expert, telling_factor, touch, touch_factor
from ubep.bench.kernels import Kernels
from ubep.communicator import Communicator
from ubep.config import Config
from ubep.expert_parallel import ExpertParallel


@dataclass
class Setting:
    """What a contestant finds on its rank. mpi: the MPI module of mpi4py, None in a job without it."""

    case: Case
    inputs: Inputs
    arena: Arena
    bootstrap: Bootstrap
    kernels: Kernels
    config: Config
    mpi: Any = None


class Contestant(abc.ABC):
    """One way to bring rows to experts and back.

    name: as asked for with --peer.  label: as shown, known after setup.  pinned: whether its ranks may be
    bound to cores (not where threads of its own need one).
    """

    name: str
    pinned = True

    def __init__(self) -> None:
        self.label = self.name

    @abc.abstractmethod
    def setup(self, setting: Setting) -> None:
        """Allocate all that rounds need. Collective."""

    @abc.abstractmethod
    def round(self, index: int, expert: Expert) -> Tensor:
        """Dispatch by routing set `index`, the expert's work, combine. Collective. Returns [T, H]."""

    def close(self) -> None:  # noqa: B027 (most have nothing to let go of)
        """Let go of everything. Not collective."""

    def wrong(self, inputs: Inputs, index: int, out: Tensor) -> str | None:
        """None, or what is wrong with the output of a timed round."""
        return inputs.wrong(index, out, touch_factor(inputs.case))

    def validate(self, inputs: Inputs) -> str | None:
        """Rounds whose experts differ, and timed ones, with every routing set. Collective."""
        telling = telling_expert(inputs.case, inputs.rank)
        found = []
        for index in range(len(inputs.sets)):
            found.append(inputs.wrong(index, self.round(index, telling), telling_factor(inputs.case)))
            found.append(self.wrong(inputs, index, self.round(index, touch)))
        return next((problem for problem in found if problem), None)


@dataclass
class Variant:
    """A contestant `ubep` under another configuration: settings of Config, semantics of the layer."""

    label: str
    settings: dict[str, Any] = field(default_factory=dict)
    semantics: dict[str, Any] = field(default_factory=dict)


class Ubep(Contestant):
    """This library, by whichever backend is configured; tokens lie in the layer's `input_buffer`."""

    name = "ubep"
    in_place = True

    def __init__(self, variant: Variant | None = None) -> None:
        super().__init__()
        self._variant = variant or Variant("ubep")
        self.label = self._variant.label
        self._comm: Communicator | None = None
        self.decisions: dict[str, str] = {}

    def setup(self, setting: Setting) -> None:
        settings = {**setting.config.model_dump(), **self._variant.settings}
        self._inputs = setting.inputs
        self._comm = Communicator(config=Config.model_validate(settings), bootstrap=setting.bootstrap)
        case = setting.case
        self._layer: ExpertParallel = self._comm.expert_parallel(
            num_experts=case.experts,
            hidden=case.hidden,
            topk=case.topk,
            max_tokens=case.tokens,
            dtype=case.dtype,
            **self._variant.semantics,
        )
        self._x = setting.inputs.x
        if self.in_place:
            self._x = self._layer.input_buffer(case.tokens).copy_(setting.inputs.x)
        self.decisions = dict(self._layer.plan.decisions)
        if self._comm.choice is not None:
            self.decisions["backend"] = self._comm.choice.backend.name

    def round(self, index: int, expert: Expert) -> Tensor:
        routing = self._inputs.sets[index]
        received = self._layer.dispatch(self._x, routing.idx, routing.weights)
        expert(received.x, lambda: received.expert_counts)
        out: Tensor = self._layer.combine(received.x, received.handle)
        return out

    def close(self) -> None:
        if self._comm is not None:
            self._comm.close()


class OwnInput(Ubep):
    """The same for callers whose tokens lie in memory of their own."""

    name = "own"
    in_place = False

    def __init__(self) -> None:
        super().__init__(Variant("ubep (own x)"))


class Memcpy(Contestant):
    """The floor: the same bytes copied to the ranks that they go to and back. No counts, no reduction."""

    name = "memcpy"

    def setup(self, setting: Setting) -> None:
        case, rank = setting.case, setting.inputs.rank
        self._arena = setting.arena
        shape = (-1, case.hidden)
        used = capacity_rows(case) * case.row_bytes
        areas = [
            setting.arena.area(peer)[:used].view(case.torch_dtype).view(shape) for peer in range(case.ranks)
        ]
        self.rows = setting.inputs.x.repeat_interleave(case.topk, 0)
        self._back = torch.empty_like(self.rows)
        self._copies: list[list[tuple[Tensor, Tensor, Tensor]]] = []  # by set: (from, there, back)
        self._own: list[Tensor] = []
        for routing in setting.inputs.sets:
            owners = routing.idx.view(-1) // case.local_experts
            sent = setting.bootstrap.all_gather(torch.bincount(owners, minlength=case.ranks).tolist())
            copies, start = [], 0
            for peer in range(case.ranks):
                first, count = sum(sent[src][peer] for src in range(rank)), sent[rank][peer]
                own = slice(start, start + count)
                copies.append((self.rows[own], areas[peer][first : first + count], self._back[own]))
                start += count
            self._copies.append(copies)
            self._own.append(areas[rank][: sum(row[rank] for row in sent)])

    def round(self, index: int, expert: Expert) -> Tensor:
        for source, there, _ in self._copies[index]:
            there.copy_(source)
        self._arena.barrier()
        rows = self._own[index]
        expert(rows, lambda: torch.tensor([len(rows)]))
        self._arena.barrier()
        for _, there, back in self._copies[index]:
            back.copy_(there)
        return self._back

    def wrong(self, inputs: Inputs, index: int, out: Tensor) -> str | None:
        return None if torch.equal(out, -self.rows) else "bytes did not come back as they were sent"

    def validate(self, inputs: Inputs) -> str | None:
        found = []
        for index in range(len(inputs.sets)):
            self._arena.barrier()  # as before timed rounds: nobody reads rows of the last one any more
            found.append(self.wrong(inputs, index, self.round(index, touch)))
        return next((problem for problem in found if problem), None)

    def close(self) -> None:
        self._copies, self._own = [], []


def capacity_rows(case: Case) -> int:
    """The most rows that one rank can receive."""
    return case.ranks * case.tokens * min(case.topk, case.local_experts)
