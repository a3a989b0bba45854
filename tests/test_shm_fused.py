"""Fused operations against the driver, over the same fabric: equal to the bit, and in the same order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import ubep
from tests.shm_ranks import draw, needs_shm, run
from ubep import Topology, Workload
from ubep.protocol.planner import make_plan
from ubep_backends.shm import Backend

pytestmark = needs_shm

E, H, K, T = 10, 24, 3, 8
SENT = ("token", "expert", "position", "weight", "slot", "slot_valid", "slot_weight", "counts", "start")
RECEIVED = ("counts", "start", "row", "token", "expert", "weight", "dropped", "source")

PLANS: list[dict[str, Any]] = [
    {},
    {"placement": "staged", "deduplicate": False},
    {"placement": "staged", "deduplicate": True, "chunk_records": 2},
    {"placement": "staged", "checked": False, "chunk_records": 1},
    {"placement": "staged", "workers": 3, "chunk_records": 2},
    {"placement": "direct", "workers": 4},
    {"placement": "staged", "order": "size-aware", "deduplicate": False, "workers": 2},
]
LAYERS: list[dict[str, Any]] = [
    {},
    {"combine": "sum", "dtype": "float32"},
    {"receive_layout": "token-rank", "combine": "sum"},
    {"receive_layout": "token-rank", "dtype": "float16"},
    {"expert_alignment": 4, "quantise": "fp8"},
    {"quantise": "int8", "dtype": "float32"},
    {"expert_capacity": 3, "overflow": "drop"},
    {"expert_capacity": 100, "expert_alignment": 2},
]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        alike = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return alike and bytes_of(a) == bytes_of(b)
    return bool(a == b)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


ROWS = ("x", "scales", "weights", "expert_counts", "expert_offsets", "dropped")
ROWS += ("topk_idx", "source_rank", "source_token")


def compare(a: Any, b: Any, out_a: Any, out_b: Any) -> list[str]:
    pairs = [("", ROWS, a, b)]
    pairs += [("sent.", SENT, a.handle.sent, b.handle.sent)]
    pairs += [("received.", RECEIVED, a.handle.received, b.handle.received)]
    wrong = [p + n for p, names, x, y in pairs for n in names if not same(getattr(x, n), getattr(y, n))]
    return wrong + [f"out {i}" for i, (x, y) in enumerate(zip(out_a, out_b, strict=True)) if not same(x, y)]


def both(comm: ubep.Communicator, layers: list[dict[str, Any]]) -> list[str]:
    wrong = []
    for layer in layers:
        layer = dict(layer)
        if comm.config.placement == "direct" and layer.get("overflow") == "drop":
            layer["overflow"] = "refuse"
            layer["expert_capacity"] = 100
        sizes = dict(num_experts=E, hidden=H, topk=K, max_tokens=T, **layer)
        ours, theirs = comm.expert_parallel(**sizes), comm.expert_parallel(**sizes)
        assert ours._fused is not None
        theirs._fused = None
        dtype = ours.plan.workload.torch_dtype
        for round_, keep in itertools.product(range(3), (False, True)):
            tokens = (comm.rank * 3 + round_ * 5) % (T + 1)
            x, idx, weights = draw(comm.rank * 10 + round_, tokens, E, K, H, dtype)
            call: dict[str, Any] = {"keep_quantised": keep}
            if round_ == 1:
                call["num_valid"] = tokens // 2
            if round_ == 2:
                idx = idx.to(torch.int32)
            a = ours.dispatch(x, idx, weights if round_ else None, **call)
            b = theirs.dispatch(x, idx, weights if round_ else None, **call)
            y = draw(comm.rank, a.handle.num_rows, E, K, H, dtype)[0]
            numbers = torch.rand(y.shape[0], *([K] if ours.plan.per_rank else []))
            outs = [
                [e.combine(y, r.handle), *e.combine(y, r.handle, row_weights=numbers)]
                for e, r in ((ours, a), (theirs, b))
            ]
            outs[0].append(ours.dispatch(x, handle=a.handle).x)
            outs[1].append(theirs.dispatch(x, handle=b.handle).x)
            if not keep or ours.plan.workload.quantise == "none":
                # Rows that go back as they lie, in shared memory where they do.
                outs[0].append(ours.combine(a.x, a.handle))
                outs[1].append(theirs.combine(b.x, b.handle))
            wrong += [f"{layer} round {round_} keep {keep}: {w}" for w in compare(a, b, *outs)]
    return wrong


def writes(comm: ubep.Communicator) -> tuple[list[Any], list[Any]]:
    """What each executor puts and signals in two rounds: (peer, whether a flag, offset, bytes or payload)."""
    sizes = {"num_experts": E, "hidden": H, "topk": K, "max_tokens": T}
    ours, theirs = comm.expert_parallel(**sizes), comm.expert_parallel(**sizes)
    theirs._fused = None
    seen: list[Any] = []
    fabric = comm._fabrics["shm"]
    put, signal = fabric.put, fabric.signal

    def spy_put(window: Any, peer: int, offset: int, data: torch.Tensor) -> None:
        seen.append((peer, False, offset, data.numel()))
        put(window, peer, offset, data)

    def spy_signal(window: Any, peer: int, offset: int, word: int) -> None:
        seen.append((peer, True, offset, word & 0xFFFFFFFF))
        signal(window, peer, offset, word)

    fabric.put, fabric.signal = spy_put, spy_signal  # type: ignore[method-assign]
    fused: Any = ours._fused
    fused.trace(True)
    for round_ in range(2):
        call = draw(comm.rank + round_, T, E, K, H, torch.bfloat16)
        for layer in (ours, theirs):
            received = layer.dispatch(*call)
            layer.combine(received.x.clone(), received.handle)
    return [event[1:] for event in fused.traced()], seen


ORDERS: list[dict[str, Any]] = [
    {"placement": "direct"},
    {"placement": "staged", "deduplicate": False, "chunk_records": 2},
    {"placement": "staged", "deduplicate": True, "chunk_records": 3, "order": "rank"},
    {"placement": "staged", "deduplicate": False, "order": "size-aware", "checked": False},
]


@pytest.mark.parametrize("settings", ORDERS, ids=str)
def test_fused_puts_and_signals_in_the_order_of_the_driver(settings: dict[str, Any]) -> None:
    for fused, driven in run(3, writes, **settings):
        assert len(driven) > 20
        assert fused == driven


@pytest.mark.parametrize(
    ("world_size", "hidden", "tokens", "placement"),
    [(2, 2048, 8, "staged"), (2, 7168, 8, "staged"), (2, 2048, 128, "direct"), (4, 2048, 8, "direct")],
)
def test_automatic_placement_goes_by_sizes_and_says_why(
    world_size: int, hidden: int, tokens: int, placement: str
) -> None:
    workload = Workload(num_experts=64, hidden=hidden, topk=8, max_tokens=tokens)
    plan = make_plan(workload, Topology.flat(world_size), Backend().capabilities)
    assert plan.placement == placement
    assert plan.decisions["placement"].startswith(f"{placement}: ")
    if placement == "staged":
        assert "slots with deduplication are faster" in plan.decisions["placement"]


@pytest.mark.parametrize("settings", PLANS, ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_fused_equals_the_driver(world_size: int, settings: dict[str, Any]) -> None:
    assert run(world_size, both, LAYERS, **settings) == [[]] * world_size
