"""The backend as the registry sees it: probe, capabilities, and opening a fabric."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ubep.backend as core
from ubep.backend import Bootstrap, Capabilities, Fabric, Link, Probe, Workload

NATIVE = "ubep_backends.shm._native"
MAX_WORKERS = 64
MAX_TOPK = 64  # kMaxTopk in native/rows.h
STAGED_UP_TO = 1 << 20  # bytes; measured with 2 ranks
FLAG_STRIDE = 64  # bytes: a cache line
ATOMIC_BLOCK = 8  # bytes: an aligned word
# A copy through the cache with its flag, measured between two cores; decides chunk sizes.
MEMORY = Link(latency_us=0.5, bandwidth_gbps=20.0)


class Backend(core.Backend):
    """Ranks on one host, with windows in anonymous shared memory."""

    name = "shm"
    rank_preference = 100

    @classmethod
    def probe(cls) -> Probe:
        if not sys.platform.startswith("linux"):
            return Probe(False, f"needs Linux, this is {sys.platform}")
        if importlib.util.find_spec(NATIVE) is None:
            return Probe(
                False,
                "native extension missing: no C++ compiler when ubep was installed",
                fix="install a C++20 compiler, then: pip install --force-reinstall --no-deps ubep",
            )
        try:
            from ubep_backends.shm import _native  # type: ignore[attr-defined]  # compiled
        except ImportError as error:
            return Probe(
                False, f"native extension does not load: {error}", fix="reinstall ubep for this Python"
            )
        return Probe(True, "host shared memory", {"kernels": _native.isa()})

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            placements=("direct", "staged"),
            get=True,
            ordered=True,
            release=True,
            fused_kernels=True,
            atomic_block=ATOMIC_BLOCK,
            flag_stride=FLAG_STRIDE,
            max_workers=MAX_WORKERS,
            max_topk=MAX_TOPK,
            staged_up_to=STAGED_UP_TO,
            links={"self": MEMORY, "die": MEMORY, "node": MEMORY},
        )

    def supports(self, workload: Workload, world_size: int) -> str | None:
        here = os.environ.get("LOCAL_WORLD_SIZE", "")
        if here.isdigit() and int(here) < world_size:
            return f"ranks are on several hosts (LOCAL_WORLD_SIZE is {here}, world size is {world_size})"
        return super().supports(workload, world_size)

    def open(self, bootstrap: Bootstrap, options: Mapping[str, Any]) -> Fabric:
        from ubep_backends.shm.fabric import open_fabric

        return open_fabric(bootstrap, options)


def host_id() -> str:
    """Equal for two processes exactly when one kernel runs them."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
