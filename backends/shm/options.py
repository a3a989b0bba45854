"""The backend's own table of the configuration, `[options.shm]`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ubep.backend import ConfigError

DEFAULT_SPINS = 2000
DEFAULT_YIELDS = 20
DEFAULT_PREFAULT_MIB = 512


@dataclass(frozen=True)
class Options:
    """pin: bind rank i to the i-th usable core while there are enough of them.

    spins: looks at a flag before yielding (default: 2000 if every rank has a core of its own, else 0).
    yields: looks that give the core away before sleeping.
    prefault_mib: windows up to this size are made present when they are made, larger ones on first use.
    in_place: received rows may lie in shared memory, where combine reads them without a copy if they
        come back as the expert output. They must then not be written after combine has returned,
        before the next operation on that lane has.
    streaming_mib: stores bypass the caches when all ranks together move this much (default: twice L3).
    connect_timeout_s: for finding the other ranks.
    link: an emulated link between ranks: a table, or the path of a TOML file; see `link`.
    """

    pin: bool = False
    spins: int | None = None
    yields: int = DEFAULT_YIELDS
    prefault_mib: int = DEFAULT_PREFAULT_MIB
    in_place: bool = True
    streaming_mib: float | None = None
    connect_timeout_s: float = 60.0
    link: Mapping[str, Any] | str | None = None

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Options:
        """From the table. Raises ConfigError naming the key and what is allowed."""
        allowed = [field.name for field in fields(cls)]
        for key, value in table.items():
            if key not in allowed:
                near = difflib.get_close_matches(key, allowed, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"options.shm: unknown key {key!r}{hint} Allowed: {', '.join(allowed)}")
            if key in ("pin", "in_place"):
                if not isinstance(value, bool):
                    raise ConfigError(f"options.shm.{key} = {value!r}: must be true or false")
            elif key == "link":
                if not isinstance(value, (Mapping, str)):
                    raise ConfigError(f"options.shm.link = {value!r}: must be a table or the path of a file")
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise ConfigError(f"options.shm.{key} = {value!r}: must be a number, 0 or more")
        return cls(**table)
