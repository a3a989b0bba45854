"""Checks that the tests run as they are, and that planted faults must trip over."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from tests.worlds import Case, build, check
from ubep.capabilities import Capabilities
from ubep.config import Config
from ubep.errors import InvalidInputError, PeerRefusedError, StaleHandleError, UnsupportedError
from ubep.expert_parallel import ExpertParallel
from ubep.protocol.planner import PlanOptions, make_plan
from ubep.protocol.signalling import SENTINEL_BYTES
from ubep.topology import Topology
from ubep.workload import Workload
from ubep_backends.reference.world import MemoryModel

# A world in which much happens: several chunks, all pairs busy, an idle turn, three rounds.
BUSY = Case(
    world_size=3,
    num_experts=6,
    hidden=6,
    topk=2,
    max_tokens=6,
    tokens=(6, 5, 6, 4),
    routing=bytes([1, 4, 2, 5, 3, 6, 0, 1, 5]),
    rounds=3,
    options=PlanOptions(placement="staged", deduplicate=False, chunk_records=2, checked=False),
)
TRANSPORT: MemoryModel | None = None  # what the transport really does, where that is not what it declares
SEEDS = 40


def survey(case: Case, seeds: int = SEEDS) -> None:
    """The core property on one case under many schedules."""
    declared = case.model
    capabilities = Capabilities(
        placements=("staged", "direct"),
        get=True,
        max_workers=8,
        ordered=declared.ordered,
        release=declared.release,
        atomic_block=declared.atomic_block,
    )
    for seed in range(seeds):
        check(replace(case, model=TRANSPORT or declared, capabilities=capabilities, seed=seed))


def run_programs(case: Case, program: Any) -> list[Any]:
    """program(layer) on every rank of a case's world; results or errors, by rank."""
    world, layers = build(case)
    return world.run([program(layer) for layer in layers])


def offsets_are_64_bit() -> None:
    """Windows beyond 2^31 and 2^32 bytes: every source's slots lie behind those before, none overlaps."""
    for hidden in (2**14, 2**17):
        workload = Workload(num_experts=256, hidden=hidden, topk=8, max_tokens=4096)
        options = PlanOptions(placement="staged", deduplicate=False)
        layout = make_plan(workload, Topology.flat(16), Capabilities(), options).layout
        starts = [layout.slot(parity, source) for parity in (0, 1) for source in range(16)]
        assert starts[-1] > 2**32
        assert all(b - a >= layout.slot_bytes for a, b in pairwise(starts))
        assert starts[-1] + layout.slot_bytes <= layout.nbytes


def _combined(rows: list[float], dtype: str, deduplicate: bool = False) -> float:
    """What combine makes of one token whose k-th expert returns rows[k]; weights 1; experts on 2 ranks."""

    def program(layer: ExpertParallel) -> Generator[Any, None, float]:
        idx = torch.arange(len(rows))[None]
        x = torch.zeros(1, 1, dtype=layer.plan.workload.torch_dtype)
        received = yield from layer.dispatch_steps(x, idx, torch.ones(1, len(rows)))
        y = torch.tensor([[rows[e]] for e in layer.local_experts for _ in range(2)]).to(x.dtype)
        done = yield from layer.combine_steps(y, received.handle, 0)
        return float(done.out)

    options = PlanOptions(placement="staged", deduplicate=deduplicate)
    case = Case(2, len(rows), 1, len(rows), 1, options=options)
    world, layers = build(case)
    plan = replace(layers[0].plan, workload=Workload(len(rows), 1, len(rows), 1, dtype))
    layers = [ExpertParallel(layer._fabric, plan, layer.rank, Config()) for layer in layers]
    results = world.run([program(layer) for layer in layers])
    assert results[0] == results[1]
    return float(results[0])


def sum_is_float32() -> None:
    """2^8 + 1 - 2^8 is 1 in float32, and 0 where the sum is kept in bfloat16 (8 bits of mantissa)."""
    assert _combined([256.0, 1.0, -256.0, 0.0], "bfloat16") == 1.0


def sum_is_in_ascending_k() -> None:
    """2^25 + 1 is 2^25 in float32, and so is 2^25 + 0.5: what survives tells the order."""
    assert _combined([2.0**25, 1.0, -(2.0**25), 0.5], "float32") == 0.5
    assert _combined([0.5, -(2.0**25), 1.0, 2.0**25], "float32") == 0.0


def deduplicated_sum_has_two_levels() -> None:
    """First the experts of each rank, rounded to bfloat16, then the ranks: (256 + 1) - (256 - 0) is 0."""
    assert _combined([256.0, 1.0, -256.0, 0.0], "bfloat16", deduplicate=True) == 0.0
    assert _combined([256.0, -256.0, 1.0, 0.0], "bfloat16", deduplicate=True) == 1.0


def gaps_are_zero() -> None:
    """With an alignment of 4, one row for an expert leaves three zero rows."""

    def program(layer: ExpertParallel) -> Generator[Any, None, torch.Tensor]:
        received = yield from layer.dispatch_steps(torch.ones(1, 4), torch.tensor([[0, 2]]), torch.ones(1, 2))
        yield from layer.combine_steps(received.x, received.handle, 0)
        return received.x

    case = Case(workload={"expert_alignment": 4})
    for x in run_programs(case, program):
        assert x[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0]


def any_payload_passes() -> None:
    """Rows made of the reserved pattern itself arrive, to the bit."""

    def program(layer: ExpertParallel) -> Generator[Any, None, bool]:
        x = torch.tensor(list(SENTINEL_BYTES * 4), dtype=torch.uint8).view(torch.float32)[None].clone()
        received = yield from layer.dispatch_steps(x, torch.tensor([[3, -1]]), torch.ones(1, 2))
        yield from layer.combine_steps(received.x, received.handle, 0)
        rows = received.x.view(torch.int32)
        return bool((rows == x.view(torch.int32)).all())

    case = Case(hidden=8, options=PlanOptions(signalling="sentinel", deduplicate=False))
    assert run_programs(case, program) == [True, True]


def stale_handles_are_refused() -> None:
    """Of another layer, of another lane, or released: on every rank, and the layer goes on."""

    def program(layers: tuple[ExpertParallel, ExpertParallel]) -> Generator[Any, None, list[str]]:
        layer, other = layers
        call = torch.ones(1, 4), torch.tensor([[0, 3]]), torch.ones(1, 2)
        mine = yield from layer.dispatch_steps(*call)
        foreign = yield from other.dispatch_steps(*call)
        released = yield from layer.dispatch_steps(*call)
        released.handle.release()
        errors = []
        for handle, lane in ((foreign.handle, 0), (mine.handle, 1), (released.handle, 0)):
            try:
                yield from layer.combine_steps(mine.x, handle, lane)
                errors.append("accepted")
            except StaleHandleError as error:
                errors.append(str(error))
        done = yield from layer.combine_steps(mine.x, mine.handle, 0)
        assert done.out[0, 0] == 2.0
        return errors

    case = Case(options=PlanOptions(lanes=2))
    world, layers = build(case)
    others = [ExpertParallel(layer._fabric, layer.plan, layer.rank, Config()) for layer in layers]
    for errors in world.run([program(pair) for pair in zip(layers, others, strict=True)]):
        if isinstance(errors, Exception):
            raise errors
        assert "it was used on layer" in errors[0]
        assert "it was used on lane 1" in errors[1]
        assert "was released" in errors[2]


def unsound_modes_are_refused() -> None:
    """Without `release` no word, without blocks neither fused nor sentinel; errors name the capability."""
    workload = Workload(4, 8, 2, 4)
    for mode, capability, declared in (
        ("word", "release", Capabilities(release=False)),
        ("fused", "atomic_block", Capabilities(atomic_block=1)),
        ("sentinel", "atomic_block", Capabilities(atomic_block=1)),
    ):
        refused = ""
        try:
            make_plan(workload, Topology.flat(2), declared, PlanOptions(signalling=mode))
        except UnsupportedError as error:
            refused = error.capability
        assert refused == capability


def refusals_reach_every_rank() -> None:
    """One rank brings too many tokens: it says so, the others name it, and the next call works."""

    def program(layer: ExpertParallel) -> Generator[Any, None, tuple[str, float]]:
        tokens = 5 if layer.rank == 1 else 2
        said = ""
        try:
            yield from layer.dispatch_steps(
                torch.ones(tokens, 4), torch.zeros(tokens, 2, dtype=torch.int64), torch.ones(tokens, 2)
            )
        except (InvalidInputError, PeerRefusedError) as error:
            said = str(error)
        received = yield from layer.dispatch_steps(torch.ones(1, 4), torch.tensor([[0, 3]]), torch.ones(1, 2))
        done = yield from layer.combine_steps(received.x, received.handle, 0)
        return said, float(done.out[0, 0])

    for checked in (True, False):
        case = Case(world_size=3, options=PlanOptions(checked=checked))
        results = run_programs(case, program)
        for rank, result in enumerate(results):
            if isinstance(result, Exception):
                raise result
            said, out = result
            assert "x has 5 tokens, max_tokens is 4" in said
            assert ("rank 1" in said) == (rank != 1)
            assert out == 2.0
