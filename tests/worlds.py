"""Whole worlds of virtual ranks for the tests: a case is plain data, prints as code, and replays."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ubep.capabilities import Capabilities
from ubep.config import Config
from ubep.expert_parallel import ExpertParallel
from ubep.handle import Received
from ubep.protocol.planner import PlanOptions, make_plan
from ubep.topology import Topology
from ubep.workload import Workload
from ubep_backends.reference.virtual import VirtualFabric
from ubep_backends.reference.world import MemoryModel, World


@dataclass(frozen=True)
class Case:
    """One world and what its ranks do: `rounds` times dispatch, experts, combine, with no barrier.

    tokens: of each rank in each round, cyclic.  routing: bytes that become expert ids, cyclic; byte b is
    expert b % (E + 1) - 1, so zero bytes mean "no expert".  jump: (round, epoch): before that round the
    epoch is set on every rank, as if all the operations between had happened.
    """

    world_size: int = 2
    num_experts: int = 4
    hidden: int = 4
    topk: int = 2
    max_tokens: int = 4
    tokens: tuple[int, ...] = (4,)
    routing: bytes = b"\1\2\3\4"
    rounds: int = 2
    groups: tuple[int, ...] | None = None
    options: PlanOptions = field(default_factory=PlanOptions)
    workload: dict[str, Any] = field(default_factory=dict)
    model: MemoryModel = field(default_factory=MemoryModel)
    capabilities: Capabilities | None = None
    seed: int = 0
    stalled: dict[int, int] = field(default_factory=dict)
    killed: dict[int, int] = field(default_factory=dict)
    jump: tuple[int, int] | None = None

    def topology(self) -> Topology:
        if self.groups is None:
            return Topology.flat(self.world_size)
        groups = [self.groups[rank % len(self.groups)] for rank in range(self.world_size)]
        return Topology.from_groups({"node": groups})

    def num_tokens(self, rank: int, round_: int) -> int:
        return self.tokens[(rank + round_ * self.world_size) % len(self.tokens)] % (self.max_tokens + 1)

    def call(self, rank: int, round_: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, topk_idx, topk_weights. Every element of x tells rank, token, round and column apart, and is a
        small integer; weights are quarters: all sums below are exact in float32, whatever their order."""
        tokens = self.num_tokens(rank, round_)
        token = torch.arange(tokens)[:, None]
        x = (rank * 64 + token * 8 + round_ * 2 + 1) % 509 + torch.arange(self.hidden) % 13 * 3
        start = rank * 31 + round_ * 7
        ids = [self.routing[(start + i) % len(self.routing)] for i in range(tokens * self.topk)]
        idx = (torch.tensor(ids, dtype=torch.int64) % (self.num_experts + 1) - 1).view(tokens, self.topk)
        weights = (torch.arange(tokens * self.topk).view(tokens, self.topk) % 7 + 1) / 4
        return x.float(), idx, weights


def build(case: Case) -> tuple[World, list[ExpertParallel]]:
    """The world and one layer for each rank."""
    world = World(case.world_size, case.seed, case.model, case.stalled, case.killed)
    capabilities = case.capabilities or Capabilities(
        placements=("staged", "direct"),
        get=True,
        max_workers=8,
        ordered=case.model.ordered,
        release=case.model.release,
        atomic_block=case.model.atomic_block,
    )
    workload = Workload(case.num_experts, case.hidden, case.topk, case.max_tokens, "float32", **case.workload)
    plan = make_plan(workload, case.topology(), capabilities, case.options)
    layers = [ExpertParallel(VirtualFabric(world, r), plan, r, Config()) for r in range(case.world_size)]
    return world, layers


def expert_rows(received: Received, experts: list[int], applied: bool) -> Tensor:
    """What the experts make of the rows: expert e multiplies by e + 1, column pattern and all.

    applied: the caller applies the weights (semantics "sum", or the token-rank layout).
    """
    plan = received.handle.plan
    if not plan.per_rank:
        scale = torch.zeros(len(received.x))
        for local, expert in enumerate(experts):
            scale[received.expert_offsets[local] : received.expert_offsets[local + 1]] = expert + 1
        weight = received.weights if applied else torch.ones(len(received.x))
        return received.x * (scale * weight)[:, None]
    ids = torch.tensor([*experts, 0])[received.topk_idx]
    factor = torch.where(received.topk_idx >= 0, (ids + 1) * received.weights, 0.0)
    return received.x * factor.sum(1, keepdim=True)


def expected(case: Case, rank: int, round_: int) -> Tensor:
    """The dense answer, from the definition: sum_k w_k (e_k + 1) x over the experts that are not -1."""
    x, idx, weights = case.call(rank, round_)
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for k in range(case.topk):
            expert = int(idx[token, k])
            if expert >= 0:
                out[token] += weights[token, k] * (expert + 1) * x[token]
    return out


def program(case: Case, layer: ExpertParallel) -> Generator[Any, None, list[Tensor]]:
    """One rank: its rounds, back to back."""
    outputs = []
    for round_ in range(case.rounds):
        if case.jump is not None and case.jump[0] == round_:
            layer._lanes[0].epoch = case.jump[1]
        received = yield from layer.dispatch_steps(*case.call(layer.rank, round_))
        applied = case.workload.get("combine") == "sum"
        y = expert_rows(received, layer.local_experts, applied)
        done = yield from layer.combine_steps(y, received.handle, 0)
        outputs.append(done.out)
    return outputs


def run_case(case: Case) -> list[Any]:
    """Each rank's outputs, or the error that it raised. Raises DeadlockError."""
    world, layers = build(case)
    return world.run([program(case, layer) for layer in layers])


def check(case: Case) -> None:
    """Run a case and compare every rank's outputs with the dense answer, to the bit.

    A failure says which case it was, as code.
    """
    try:
        for rank, outputs in enumerate(run_case(case)):
            if isinstance(outputs, Exception):
                raise outputs
            for round_, out in enumerate(outputs):
                want = expected(case, rank, round_)
                assert torch.equal(out, want), f"rank {rank}, round {round_}:\n{out}\nis not\n{want}"
    except Exception as error:
        error.add_note(f"\nTo replay:\n\n{as_code(case)}\n")
        raise


def as_code(case: Case) -> str:
    """The case as a program that a person can paste."""
    default = Case()
    changed = {name: value for name, value in vars(case).items() if value != getattr(default, name)}
    arguments = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    return "\n".join(
        [
            "from tests.worlds import Case, check",
            "from ubep.capabilities import Capabilities",
            "from ubep.protocol.planner import PlanOptions",
            "from ubep_backends.reference.world import MemoryModel",
            f"check(Case({arguments}))",
        ]
    )
