"""Makes the native executor of a plan: the plan's image in plain numbers, and the windows beside it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ubep.backend import ConfigError, Plan, RankPlan, Window
from ubep_backends.shm import _native  # type: ignore[attr-defined]  # compiled
from ubep_backends.shm.link import read_link
from ubep_backends.shm.options import Options

DTYPES = ("bfloat16", "float16", "float32")
QUANTISATIONS = ("none", "fp8", "int8")
DEFAULT_L3 = 32 << 20
MIB = 1 << 20


def native_plan(plan: Plan, rank: int) -> dict[str, Any]:
    """The plan as `rank` sees it, as the extension reads it."""
    w, view, layout = plan.workload, RankPlan(plan, rank), plan.layout
    local = plan.local_experts
    ranks = range(plan.world_size)
    return {
        "world": plan.world_size,
        "rank": rank,
        "experts": w.num_experts,
        "hidden": w.hidden,
        "topk": w.topk,
        "max_tokens": w.max_tokens,
        "dtype": DTYPES.index(w.dtype),
        "quantise": QUANTISATIONS.index(w.quantise),
        "per_rank": plan.per_rank,
        "deduplicate": plan.deduplicate,
        "direct": plan.direct,
        "weighted": w.combine == "weighted",
        "checked": plan.checked,
        "counts_everywhere": plan.counts_everywhere,
        "drop": w.overflow == "drop",
        "size_aware": plan.order == "size-aware",
        "alignment": w.expert_alignment,
        "capacity": -1 if w.expert_capacity is None else w.expert_capacity,
        "entries": plan.entries,
        "workers": plan.workers,
        "counting": plan.roles[0],
        "sending": plan.roles[1],
        "max_records": plan.max_records,
        "max_rows": plan.max_rows,
        "dispatch": _record(plan.dispatch_record),
        "combine": _record(plan.combine_record),
        "list_bytes": plan.list_bytes,
        "parity_bytes": layout.parity_bytes,
        "flag_block": layout.flag(0, 1, 0),
        "headers": layout.header(0, 0),
        "header_bytes": layout.header_bytes,
        "slots": layout.slot(0, 0),
        "slot_stride": layout.slot(0, 1) - layout.slot(0, 0),
        "rows": layout.rows(0),
        "lists": layout.lists(0),
        "send_order": view.send_order,
        "receive_order": view.receive_order,
        "peers": view.peers.tolist(),
        "chunk_to": [plan.chunk(rank, peer) for peer in ranks],
        "chunk_from": [plan.chunk(peer, rank) for peer in ranks],
        "smallest_chunk": min(plan.chunk_records),
        "tier": [plan.topology.tier(rank, peer) for peer in ranks],
        "owner": plan.experts.owner.tolist(),
        "local_index": plan.experts.local_index.tolist(),
        "place": view.expert_key.argsort().tolist(),
        "items": view.items.tolist(),
        "local_experts": [expert for experts in local for expert in experts],
        "local_start": [0, *itertools.accumulate(len(experts) for experts in local)],
    }


def _record(record: Any) -> dict[str, int]:
    names = ("row_bytes", "scales", "scale_offset", "meta_words", "meta_offset", "nbytes")
    return {name: getattr(record, name) for name in names}


def fuse(fabric: Any, plan: Plan, windows: Sequence[Window]) -> Any:
    """The executor, with a side window for each lane. Collective."""
    options: Options = fabric.options
    image = native_plan(plan, fabric.rank)
    link, error = None, None
    try:
        link = read_link(options.link, plan)
    except ConfigError as wrong:
        error = str(wrong)
    fabric.together(error, ConfigError)
    in_place = options.in_place and plan.direct
    nbytes = _native.side_bytes(image, in_place, link is not None)
    pairs = [(window.key, fabric.allocate(nbytes).key) for window in windows]
    return _native.Fused(fabric.native, image, pairs, in_place, link, streaming_bytes(options))


def streaming_bytes(options: Options) -> int:
    """From how many bytes of all ranks together on stores should bypass the caches."""
    if options.streaming_mib is not None:
        return int(options.streaming_mib * MIB)
    return 2 * l3_bytes()


def l3_bytes() -> int:
    """Size of one last-level cache."""
    try:
        size = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (ValueError, OSError):
        size = 0
    if size > 0:
        return size
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"), reverse=True):
        text = (index / "size").read_text().strip()
        if text.endswith("K"):
            return int(text[:-1]) << 10
    return DEFAULT_L3
