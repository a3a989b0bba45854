"""Memory that all ranks of the job share, a barrier on it, and the core-to-core ping-pong.

It is anonymous (memfd): nothing of it outlives the ranks.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Collection
from contextlib import suppress

import torch
from torch import Tensor

from ubep.bootstrap import Bootstrap
from ubep.errors import DeadlineError

LINE = 8  # words in a cache line
DEADLINE_S = 120.0
LOOKS = 2000  # at a word before giving the core away
HOPS = 2000  # of a ping-pong
TRIES = 3


class Arena:
    """words: int64, one cache line for each rank, two for the ping-pong, one for decisions of rank 0."""

    def __init__(self, bootstrap: Bootstrap, nbytes: int) -> None:
        """Collective. nbytes: of the area that `area` hands out, for each rank."""
        self.rank, self.world_size = bootstrap.rank, bootstrap.world_size
        self._bootstrap = bootstrap
        self._control = (self.world_size + 3) * LINE * 8
        self._nbytes = -(-nbytes // 64) * 64
        total = self._control + self._nbytes * self.world_size
        made = os.memfd_create("ubep-bench") if self.rank == 0 else -1
        if made >= 0:
            os.ftruncate(made, total)
        owner, number = bootstrap.all_gather((os.getpid(), made))[0]
        handle = made if made >= 0 else os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR)
        self._map = mmap.mmap(handle, total)
        bootstrap.all_gather(None)  # rank 0 keeps its handle until all have opened it
        os.close(handle)
        self._bytes = memoryview(self._map)[: self._control]
        self.words = self._bytes.cast("q")
        self._epoch = 0
        self._looks = LOOKS if self.world_size <= len(os.sched_getaffinity(0)) else 1

    def area(self, rank: int) -> Tensor:
        """uint8: memory of this rank that every other can write."""
        return torch.frombuffer(
            self._map, dtype=torch.uint8, count=self._nbytes, offset=self._control + rank * self._nbytes
        )

    def barrier(self) -> None:
        """Until all ranks are here. Raises DeadlineError: a rank that failed never comes."""
        self._epoch += 1
        self.words[self.rank * LINE] = self._epoch
        for rank in range(self.world_size):
            self._await(rank * LINE, self._epoch, self._looks)

    def _await(self, at: int, least: int, looks: int) -> None:
        words = self.words
        for _ in range(looks):
            if words[at] >= least:
                return
        end = time.monotonic() + DEADLINE_S
        while words[at] < least:
            os.sched_yield()
            if time.monotonic() > end:
                raise DeadlineError(f"a rank of the benchmark did not come within {DEADLINE_S:g} s")

    def decide(self, value: int) -> int:
        """Rank 0's value, on every rank. Collective."""
        at = (self.world_size + 2) * LINE
        if self.rank == 0:
            self.words[at] = value
        self.barrier()
        decided = self.words[at]
        self.barrier()
        return decided

    def pingpong_ns(self, cores: Collection[int]) -> float | None:
        """One way between two cores, best of some tries; on rank 0, elsewhere None. Collective.

        Includes the interpreter's time, which does not change: good for telling regimes apart.
        """
        if self.world_size < 2 or len(cores) < 2:
            return None
        best = None
        for _ in range(TRIES):
            self.words[self.world_size * LINE] = self.words[(self.world_size + 1) * LINE] = 0
            self.barrier()
            if self.rank < 2:
                with pinned(sorted(cores)[self.rank]):
                    took = self._volley()
                best = took if best is None else min(best, took)
            self._bootstrap.all_gather(None)  # in which the other ranks sleep, off these cores
        return best if self.rank == 0 else None

    def _volley(self) -> float:
        own, other = ((self.world_size + (self.rank ^ side)) * LINE for side in (0, 1))
        begin = time.monotonic_ns()
        for hop in range(1, HOPS + 1):
            if self.rank == 0:
                self.words[own] = hop
            self._await(other, hop, LOOKS)
            if self.rank == 1:
                self.words[own] = hop
        return (time.monotonic_ns() - begin) / HOPS / 2

    def close(self) -> None:
        """Let go of the memory. Views that are still held keep it alive."""
        self.words.release()
        self._bytes.release()
        with suppress(BufferError):
            self._map.close()


class pinned:  # noqa: N801 (a context manager, used as a word)
    """This thread on these cores for a while."""

    def __init__(self, *cores: int) -> None:
        self._cores = cores

    def __enter__(self) -> None:
        self._before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)

    def __exit__(self, *exc: object) -> None:
        os.sched_setaffinity(0, self._before)
