"""Hypothesis strategies for whole cases: sizes, routing, topology, chunks, placement, interleaving."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.worlds import Case
from ubep.protocol.order import SEND_ORDERS
from ubep.protocol.planner import PlanOptions
from ubep_backends.reference.world import MemoryModel

MODES = ("word", "fused", "sentinel", "checksum")


@st.composite
def cases(draw: st.DrawFn, **fixed: Any) -> Case:
    """Any legal case on a sound transport; `fixed` pins fields."""
    world_size = draw(st.integers(1, 4))
    max_tokens = draw(st.integers(1, 6))
    signalling = draw(st.sampled_from(MODES))
    direct = signalling == "word" and draw(st.booleans())
    per_rank = draw(st.booleans())
    model = MemoryModel(
        atomic_block=draw(st.sampled_from((8, 32, 128))),
        ordered=draw(st.booleans()),
        release=signalling != "checksum" or draw(st.booleans()),
    )
    workload: dict[str, Any] = {"expert_alignment": draw(st.sampled_from((1, 1, 3)))}
    if per_rank:
        # Weighted token-rank has its own test: its answer is not the dense one.
        workload |= {"receive_layout": "token-rank", "combine": "sum"}
    elif draw(st.booleans()):
        workload["combine"] = "sum"
    options = PlanOptions(
        placement="direct" if direct else "staged",
        deduplicate=False if direct else draw(st.booleans()),
        signalling=signalling,
        order=draw(st.sampled_from(SEND_ORDERS)),
        chunk_records=draw(st.integers(1, 4)),
        workers=draw(st.sampled_from((1, 1, 2, 4))),
        checked=draw(st.booleans()),
    )
    case = {
        "world_size": world_size,
        "num_experts": draw(st.integers(1, 9)),
        "hidden": draw(st.sampled_from((1, 3, 8))),
        "topk": draw(st.integers(1, 3)),
        "max_tokens": max_tokens,
        "tokens": tuple(draw(st.lists(st.integers(0, max_tokens), min_size=1, max_size=4))),
        "rounds": draw(st.integers(1, 2)),
        "routing": draw(st.binary(min_size=1, max_size=12)),
        "groups": draw(st.sampled_from((None, (0, 0, 1), (0, 1)))),
        "options": options,
        "workload": workload,
        "model": model,
        "seed": draw(st.integers(0, 2**16)),
        "stalled": draw(st.sampled_from(({}, {0: 60}))),
    }
    return Case(**{**case, **fixed})
