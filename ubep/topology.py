"""Who is how far: ranks with coordinates in named tiers, near to far."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ubep.errors import ConfigError

if TYPE_CHECKING:
    from ubep.bootstrap import Bootstrap

SELF = "self"


@dataclass(frozen=True)
class Topology:
    """Ranks in nested groups.

    tiers: names from near to far, e.g. ("die", "node", "pod"); the last one holds every rank.
    coords: for each rank its group in every tier but the last, near to far; () when there is one tier.
        Groups may differ in size. Ids need to be unique only within the enclosing group.
    """

    tiers: tuple[str, ...]
    coords: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.tiers or not self.coords:
            raise ConfigError(f"a topology needs at least one tier and one rank, got {self}")
        if SELF in self.tiers or len(set(self.tiers)) != len(self.tiers):
            raise ConfigError(f"tier names must differ and none may be {SELF!r}: {self.tiers}")
        depth = len(self.tiers) - 1
        for rank, coord in enumerate(self.coords):
            if len(coord) != depth:
                raise ConfigError(
                    f"rank {rank} has {len(coord)} coordinates {coord}, but tiers {self.tiers} need {depth}"
                )

    @classmethod
    def flat(cls, world_size: int, tier: str = "node") -> Topology:
        """All ranks equally far from each other."""
        return cls((tier,), ((),) * world_size)

    @classmethod
    def regular(cls, shape: Mapping[str, int]) -> Topology:
        """Equal groups; `shape` maps tiers to their fan-out, near to far: {"die": 2, "node": 8}."""
        sizes = list(shape.values())
        coords = []
        for rank in range(math.prod(sizes)):
            coord, group = [], rank
            for size in sizes[:-1]:
                group //= size
                coord.append(group)
            coords.append(tuple(coord))
        return cls(tuple(shape), tuple(coords))

    @classmethod
    def from_groups(cls, groups: Mapping[str, Sequence[int]], outermost: str = "pod") -> Topology:
        """Uneven groups: each inner tier's name maps to the group id of every rank, near to far."""
        sizes = {name: len(ids) for name, ids in groups.items()}
        if len(set(sizes.values())) > 1:
            raise ConfigError(f"every tier must list one group id for each rank, got lengths {sizes}")
        return cls((*groups, outermost), tuple(zip(*groups.values(), strict=True)))

    @classmethod
    def from_config(cls, table: Mapping[str, Any], world_size: int | None = None) -> Topology:
        """From a `[topology]` table with `shape`, or `groups` and `outermost`; for so many ranks if given."""
        if "shape" in table:
            topology = cls.regular(table["shape"])
        else:
            topology = cls.from_groups(table["groups"], table.get("outermost", "pod"))
        if world_size not in (None, topology.world_size):
            raise ConfigError(f"topology describes {topology.world_size} ranks, world size is {world_size}")
        return topology

    @classmethod
    def detect(cls, bootstrap: Bootstrap) -> Topology:
        """From torchrun's GROUP_RANK where it is set, else from host names; collective over `bootstrap`."""
        host = os.environ.get("GROUP_RANK") or socket.gethostname()
        hosts = bootstrap.all_gather(host)
        names = {name: index for index, name in enumerate(dict.fromkeys(hosts))}
        if len(names) == 1:
            return cls.flat(bootstrap.world_size)
        return cls.from_groups({"node": [names[name] for name in hosts]})

    @property
    def world_size(self) -> int:
        return len(self.coords)

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names by tier number: ("self", *tiers)."""
        return (SELF, *self.tiers)

    def tier(self, src: int, dst: int) -> int:
        """Distance class of two ranks: 0 for the same rank, 1 for the nearest tier, and so on."""
        if src == dst:
            return 0
        a, b = self.coords[src], self.coords[dst]
        depth = len(a)
        while depth and a[depth - 1] == b[depth - 1]:
            depth -= 1
        return depth + 1

    @cached_property
    def digits(self) -> tuple[tuple[int, ...], ...]:
        """Each rank as mixed-radix digits, near to far: its place in its group, that group's place, ...

        The highest digit in which two ranks differ is their tier - 1.
        """
        members: list[dict[tuple[int, ...], dict[tuple[int, ...] | int, int]]] = [{} for _ in self.tiers]
        out = []
        for rank, coord in enumerate(self.coords):
            digits = []
            for level in range(len(self.tiers)):
                child: tuple[int, ...] | int = rank if level == 0 else coord[level - 1 :]
                siblings = members[level].setdefault(coord[level:], {})
                digits.append(siblings.setdefault(child, len(siblings)))
            out.append(tuple(digits))
        return tuple(out)

    @cached_property
    def radices(self) -> tuple[int, ...]:
        """The largest fan-out on each level; smaller groups leave gaps."""
        return tuple(max(column) + 1 for column in zip(*self.digits, strict=True))
