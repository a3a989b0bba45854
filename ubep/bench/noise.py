"""How quiet the machine was, and when a sample has to be thrown away."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

MAX_FOREIGN_PERCENT = 6.0
MAX_STEAL_PERCENT = 2.0
MAX_PINGPONG_CHANGE = 1.6  # cores that moved apart or together: another machine, as far as latency goes
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
IDLE = ("idle", "iowait")


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since boot of some cores together. busy: of everybody's work; stolen: taken by the host."""

    busy: float
    stolen: float


def parse_stat(text: str, cores: Collection[int]) -> CpuTimes:
    """Out of the text of /proc/stat, over these cores."""
    busy = stolen = 0
    for line in text.splitlines():
        name, *counts = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            ticks = dict(zip(FIELDS, map(int, counts), strict=False))
            stolen += ticks.pop("steal", 0)
            busy += sum(count for field, count in ticks.items() if field not in IDLE)
    return CpuTimes(busy / TICKS_PER_SECOND, stolen / TICKS_PER_SECOND)


def cpu_times(cores: Collection[int]) -> CpuTimes:
    """Of these cores, now; zeros where there is no /proc/stat."""
    try:
        return parse_stat(Path("/proc/stat").read_text(), cores)
    except OSError:
        return CpuTimes(0.0, 0.0)


@dataclass(frozen=True)
class Noise:
    """What else went on during a sample.

    foreign_percent, steal_percent: of the capacity of the usable cores; work of others, and time that the
    host took.  pingpong_ns: one way from core to core, before and after, the interpreter's own time
    included (None: one rank or one core).  loadavg: over 1, 5 and 15 minutes, at the end.
    """

    foreign_percent: float
    steal_percent: float
    pingpong_ns: tuple[float | None, float | None]
    loadavg: tuple[float, float, float]

    def objections(self) -> list[str]:
        """Why a sample with this noise doesn't count; empty if it does."""
        found = []
        if self.foreign_percent > MAX_FOREIGN_PERCENT:
            found.append(f"foreign load {self.foreign_percent:.1f} %, at most {MAX_FOREIGN_PERCENT:g} %")
        if self.steal_percent > MAX_STEAL_PERCENT:
            found.append(f"steal {self.steal_percent:.1f} %, at most {MAX_STEAL_PERCENT:g} %")
        before, after = self.pingpong_ns
        if before and after and max(before, after) > MAX_PINGPONG_CHANGE * min(before, after):
            found.append(
                f"core to core {before:.0f} ns before, {after:.0f} ns after, at most x{MAX_PINGPONG_CHANGE:g}"
            )
        return found


def shares(
    before: CpuTimes, after: CpuTimes, own_s: float, elapsed_s: float, cores: int
) -> tuple[float, float]:
    """(foreign, steal) in percent of the capacity; own_s: CPU seconds of all ranks in between."""
    capacity = max(elapsed_s * cores, 1e-9)
    foreign = max(0.0, after.busy - before.busy - own_s)
    return 100 * foreign / capacity, 100 * (after.stolen - before.stolen) / capacity
