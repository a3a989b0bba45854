"""Virtual ranks in one process: their memory, the writes in flight, and a seeded scheduler.

The scheduler interleaves ranks and delivers writes as badly as the memory model allows. Everything it
decides comes from one seed, so a failure replays. The model:

- A put is cut into aligned blocks of `atomic_block` bytes, which arrive at any time and in any order.
- A signal arrives whole. With `release`, after every earlier put of its sender to that peer; never
  earlier than its sending, but later puts may overtake it. With `ordered`, signals of one sender to one
  peer keep their order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ubep.backend import DeadlockError

BURST = 4  # most actions of a rank, or arrivals, between two decisions of the scheduler

Program = Generator[Any, None, Any]


@dataclass(frozen=True)
class MemoryModel:
    """What the transport promises; see the module's text."""

    atomic_block: int = 8
    ordered: bool = True
    release: bool = True


@dataclass
class Write:
    """A write in flight: bytes for a range of the destination's window."""

    number: int
    target: Tensor  # a view of the destination's window
    data: Tensor
    offset: int
    is_signal: bool


@dataclass
class World:
    """R ranks' memories and the scheduler.

    stalled: ranks that don't run before so many steps have passed.  killed: ranks that stop for good at
    a step.  steps: taken so far.
    """

    world_size: int
    seed: int = 0
    model: MemoryModel = field(default_factory=MemoryModel)
    stalled: Mapping[int, int] = field(default_factory=dict)
    killed: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.steps = 0
        self.windows: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        self._flying: dict[tuple[int, int], list[Write]] = {}
        self._written = 0
        self._changed = set(range(self.world_size))
        # Some ranks and some links are far slower than others, and some hold writes back.
        self._speed = [self._skewed() for _ in range(self.world_size)]
        self._link_speed: dict[tuple[int, int], float] = {}
        self._eagerness = self.rng.uniform(0.1, 0.9)

    def _skewed(self) -> float:
        return float(10 ** self.rng.uniform(-2, 0))

    # ---- memory

    def allocate(self, rank: int, nbytes: int) -> int:
        """A zeroed window of a rank; returns its number, which is the same on every rank."""
        self.windows[rank].append(torch.zeros(nbytes, dtype=torch.uint8))
        return len(self.windows[rank]) - 1

    def write(self, src: int, dst: int, window: int, offset: int, data: Tensor, is_signal: bool) -> None:
        """Start a write. A rank's writes to itself are in its memory at once."""
        while len(self.windows[dst]) <= window:
            raise IndexError(f"rank {dst} has not allocated window {window}")
        target = self.windows[dst][window][offset : offset + data.numel()]
        if target.numel() != data.numel():
            raise IndexError(f"write of {data.numel()} bytes at {offset} is outside the window of rank {dst}")
        if src == dst:
            target.copy_(data)
            self._changed.add(dst)
            return
        self._written += 1
        write = Write(self._written, target, data.clone(), offset, is_signal)
        self._flying.setdefault((src, dst), []).append(write)

    def _may_arrive(self, write: Write, flying: Sequence[Write]) -> bool:
        if not write.is_signal:
            return True
        for other in flying:
            if other.number < write.number and (
                self.model.ordered if other.is_signal else self.model.release
            ):
                return False
        return True

    def _deliver(self) -> None:
        links = list(self._flying)
        speeds = [self._link_speed.setdefault(link, self._skewed()) for link in links]
        link = self.rng.choices(links, speeds)[0]
        flying = self._flying[link]
        write = self.rng.choice([write for write in flying if self._may_arrive(write, flying)])
        cut = self._cut(write)
        if cut is None:
            write.target.copy_(write.data)
            flying.remove(write)
            if not flying:
                del self._flying[link]
        else:
            first = self.rng.random() < 0.5
            now, later = (slice(cut), slice(cut, None)) if first else (slice(cut, None), slice(cut))
            write.target[now].copy_(write.data[now])
            write.offset += cut if first else 0
            write.target, write.data = write.target[later], write.data[later]
        self._changed.add(link[1])

    def _cut(self, write: Write) -> int | None:
        """A random block boundary inside the write, or None to deliver it whole."""
        block = self.model.atomic_block
        first = block - write.offset % block
        if write.is_signal or write.data.numel() <= first or self.rng.random() < 0.5:
            return None
        return self.rng.randrange(first, write.data.numel(), block)

    # ---- scheduling

    def run(self, programs: Sequence[Program], on_deadlock: Callable[[], bool] | None = None) -> list[Any]:
        """Step one generator for each rank to its end; returns their results, or the errors they raised.

        A program yields None when it can go on, or what it waits for when only a write to it helps.
        on_deadlock: called when nothing can go on; true if it changed that. Raises DeadlockError.
        """
        results: list[Any] = [None] * len(programs)
        alive = dict(enumerate(programs))
        blocked: dict[int, Any] = {}
        while alive:
            self.steps += 1
            if self._changed:
                for rank in self._changed:
                    blocked.pop(rank, None)
                self._changed.clear()
            runnable = [rank for rank in alive if rank not in blocked]
            if self.stalled or self.killed:
                runnable = [rank for rank in runnable if not self._held(rank)]
            if self._flying and (not runnable or self.rng.random() < self._eagerness):
                for _ in range(self.rng.randint(1, BURST)):
                    if self._flying:
                        self._deliver()
            elif runnable:
                rank = self.rng.choices(runnable, [self._speed[r] for r in runnable])[0]
                try:
                    for _ in range(self.rng.randint(1, BURST)):
                        state = next(alive[rank])
                        if state is not None:
                            blocked[rank] = state
                            break
                except StopIteration as stop:
                    results[rank] = stop.value
                    del alive[rank]
                except Exception as error:  # the caller wants every rank's outcome
                    results[rank] = error
                    del alive[rank]
            elif any(self._held(rank) and not self._dead(rank) for rank in alive):
                continue
            elif on_deadlock is None or not on_deadlock():
                raise DeadlockError(self._stuck(alive, blocked, results))
        return results

    def _held(self, rank: int) -> bool:
        return self.steps < self.stalled.get(rank, 0) or self._dead(rank)

    def _dead(self, rank: int) -> bool:
        return rank in self.killed and self.steps >= self.killed[rank]

    def wake(self) -> None:
        """Let every blocked rank look again."""
        self._changed.update(range(self.world_size))

    def _stuck(self, alive: Mapping[int, Program], blocked: Mapping[int, Any], results: Sequence[Any]) -> str:
        ranks = [
            f"rank {rank} ended with {type(result).__name__}: {result}"
            for rank, result in enumerate(results)
            if isinstance(result, Exception)
        ]
        ranks += [f"{blocked.get(rank, f'rank {rank} is held')}" for rank in sorted(alive)]
        return f"deadlock after {self.steps} steps (seed {self.seed}): {'; '.join(ranks)}"
