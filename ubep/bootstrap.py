"""How ranks find each other before any window exists: small, collective, bounded in time."""

from __future__ import annotations

import abc
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Bootstrap(abc.ABC):
    """Rank, world size, and an all-gather of small picklable objects."""

    rank: int
    world_size: int

    @abc.abstractmethod
    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, by rank. Collective; bounded by the process group's own timeout."""


class SoloBootstrap(Bootstrap):
    """A world of one rank, without any process group."""

    rank = 0
    world_size = 1

    def all_gather(self, value: T) -> list[T]:
        return [value]


class ProcessGroupBootstrap(Bootstrap):
    """Over an existing torch.distributed process group, whatever its engine."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values
