"""The emulated link's options: bandwidth and latency of every tier.

In the configuration, as a table or in a TOML file of its own:

    [options.shm.link]
    bulk_synchronous = false          # for comparison: all arrives, all ranks meet, then rows are placed
    [options.shm.link.node]           # a tier's name
    bandwidth_gbps = 4.0              # gigabytes (1e9 bytes) per second, in each direction of each rank
    latency_us = 2.0

What a rank sends to itself never passes a link.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ubep.backend import ConfigError, Plan

SWITCH = "bulk_synchronous"


def read_link(given: Mapping[str, Any] | str | None, plan: Plan) -> dict[str, Any] | None:
    """As the extension takes it: ns per byte and latency in ns by tier number. Raises ConfigError."""
    if given is None:
        return None
    table = _from_file(Path(given)) if isinstance(given, str) else given
    if plan.direct:
        raise ConfigError("options.shm.link: the emulated link needs placement = 'staged'")
    names = plan.topology.tier_names[1:]
    unknown = set(table) - {SWITCH, *names}
    if unknown:
        raise ConfigError(
            f"options.shm.link: unknown tier {min(unknown)!r}; the tiers are {', '.join(names)}"
        )
    tiers = [(0.0, 0)]
    for name in names:
        if name not in table:
            raise ConfigError(f"options.shm.link.{name} is missing; the tiers are {', '.join(names)}")
        tiers.append(_tier(name, table[name]))
    return {"tiers": tiers, SWITCH: bool(table.get(SWITCH, False))}


def _tier(name: str, table: Mapping[str, Any]) -> tuple[float, int]:
    bandwidth, latency = table.get("bandwidth_gbps"), table.get("latency_us", 0.0)
    if not isinstance(bandwidth, (int, float)) or bandwidth <= 0:
        raise ConfigError(f"options.shm.link.{name}.bandwidth_gbps = {bandwidth!r}: must be above 0")
    if not isinstance(latency, (int, float)) or latency < 0:
        raise ConfigError(f"options.shm.link.{name}.latency_us = {latency!r}: must be 0 or more")
    return 1.0 / bandwidth, round(latency * 1e3)


def _from_file(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"options.shm.link: cannot read {path}: {error}") from None
