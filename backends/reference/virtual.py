"""The fabric of virtual ranks, and ranks as threads of which the scheduler lets one run at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ubep.backend import (
    Backend,
    BackendUnavailableError,
    Bootstrap,
    Capabilities,
    DeadlockError,
    Fabric,
    Probe,
    Window,
)
from ubep_backends.reference.world import MemoryModel, Program, World

T = TypeVar("T")
ATOMIC_BLOCK = 512


class VirtualFabric(Fabric):
    """One virtual rank's fabric. `baton` is set where ranks are threads; step generators need none."""

    def __init__(self, world: World, rank: int, baton: Baton | None = None) -> None:
        self.world = world
        self.rank = rank
        self.world_size = world.world_size
        self._baton = baton
        self._steadiness = world.rng.random()

    def allocate(self, nbytes: int) -> Window:
        number = self.world.allocate(self.rank, nbytes)
        return Window(self.world.windows[self.rank][number], key=number)

    def put(self, window: Window, peer: int, offset: int, data: Tensor) -> None:
        self.world.write(self.rank, peer, window.key, offset, data, is_signal=False)
        self._switch()

    def signal(self, window: Window, peer: int, offset: int, word: int) -> None:
        data = torch.tensor([word]).view(torch.uint8)
        self.world.write(self.rank, peer, window.key, offset, data, is_signal=True)
        self._switch()

    def get(self, window: Window, peer: int, offset: int, nbytes: int) -> Tensor:
        data: Tensor = self.world.windows[peer][window.key][offset : offset + nbytes]
        return data.clone()

    def progress(self, timeout_s: float) -> None:
        self._switch(blocked=True)

    def _switch(self, blocked: bool = False) -> None:
        if self._baton is not None:
            self._baton.pass_on(blocked)

    def failure(self, peer: int) -> str | None:
        return None

    def pick(self, workers: int) -> int:
        # The worker that ran last goes on, for a while, so that others fall far behind.
        rng = self.world.rng
        return workers - 1 if rng.random() < self._steadiness else rng.randrange(workers)

    def close(self) -> None:
        """Nothing is held beyond the world itself."""


class Baton:
    """Hands control between the scheduler and one rank's thread; exactly one side runs."""

    def __init__(self, main: Callable[[], Any]) -> None:
        self._main = main
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._blocked = False
        self._give_up: str | None = None
        self._result: Any = None
        self._error: Exception | None = None
        self._finished = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._result = self._main()
        except Exception as error:  # handed to the scheduler
            self._error = error
        self._finished = True
        self._back.release()

    def pass_on(self, blocked: bool) -> None:
        """In the rank's thread: let the scheduler run. Raises DeadlockError when nothing can go on."""
        self._blocked = blocked
        self._back.release()
        self._go.acquire()
        if blocked and self._give_up is not None:
            raise DeadlockError(self._give_up)

    def give_up(self, reason: str) -> bool:
        """Make the thread's current wait fail; false if it isn't waiting."""
        if self._finished or self._give_up is not None:
            return False
        self._give_up = reason
        return True

    def program(self) -> Program:
        """The thread as a program of the scheduler."""
        self._thread.start()
        while True:
            self._go.release()
            self._back.acquire()
            if self._finished:
                self._thread.join()
                if self._error is not None:
                    raise self._error
                return self._result
            yield "a rank waits" if self._blocked else None


class VirtualBootstrap(Bootstrap):
    """Bootstrap of one virtual rank that runs in a thread."""

    def __init__(self, world: World, rank: int, gathered: list[dict[int, Any]]) -> None:
        self.world = world
        self.rank = rank
        self.world_size = world.world_size
        self.baton: Baton
        self._gathered = gathered
        self._round = 0

    def all_gather(self, value: T) -> list[T]:
        if len(self._gathered) == self._round:
            self._gathered.append({})
        values = self._gathered[self._round]
        self._round += 1
        values[self.rank] = value
        self.world.wake()
        while len(values) < self.world_size:
            self.baton.pass_on(blocked=True)
        return [values[rank] for rank in range(self.world_size)]


class VirtualBackend(Backend):
    """R ranks as threads of one process, interleaved by a seeded scheduler. For tests and for learning.

    Options: seed, stalled and killed ranks (see `World`).
    """

    name = "virtual"
    rank_preference = -10

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "virtual ranks in one process, through ubep.launch only")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            placements=("staged", "direct"), get=True, atomic_block=ATOMIC_BLOCK, max_workers=64
        )

    def open(self, bootstrap: Bootstrap, options: Mapping[str, Any]) -> Fabric:
        if not isinstance(bootstrap, VirtualBootstrap):
            raise BackendUnavailableError("backend 'virtual' needs ubep.launch, which makes its ranks")
        return VirtualFabric(bootstrap.world, bootstrap.rank, bootstrap.baton)

    def launch(
        self, fn: Callable[[Bootstrap], Any], world_size: int, options: Mapping[str, Any]
    ) -> Sequence[Any]:
        world = World(world_size, model=MemoryModel(ATOMIC_BLOCK), **options)
        gathered: list[dict[int, Any]] = []
        batons = []
        for rank in range(world_size):
            bootstrap = VirtualBootstrap(world, rank, gathered)
            bootstrap.baton = Baton(lambda bootstrap=bootstrap: fn(bootstrap))  # type: ignore[misc]
            batons.append(bootstrap.baton)

        def give_up() -> bool:
            woken = [baton.give_up(f"no virtual rank can go on (seed {world.seed})") for baton in batons]
            world.wake()
            return any(woken)

        return world.run([baton.program() for baton in batons], on_deadlock=give_up)
