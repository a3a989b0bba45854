"""The fabric over the native one: opening it together, windows as tensors, errors as the core's."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ubep.backend import (
    BackendUnavailableError,
    Bootstrap,
    CapacityError,
    ConfigError,
    Fabric,
    Plan,
    UbepError,
    Window,
)
from ubep_backends.shm import _native  # type: ignore[attr-defined]  # compiled
from ubep_backends.shm.backend import host_id
from ubep_backends.shm.fuse import fuse
from ubep_backends.shm.options import DEFAULT_SPINS, Options

MIB = 1 << 20


class ShmFabric(Fabric):
    """Windows in memory that all ranks of this host share."""

    def __init__(self, bootstrap: Bootstrap, options: Options, native: Any) -> None:
        self.rank = bootstrap.rank
        self.world_size = bootstrap.world_size
        self.options = options
        self.native = native
        self._bootstrap = bootstrap
        self._pid = os.getpid()
        atexit.register(self.close)

    def allocate(self, nbytes: int) -> Window:
        sizes = self._bootstrap.all_gather(nbytes)
        if len(set(sizes)) > 1:
            raise ConfigError(
                f"ranks need windows of different sizes, {sizes}: options.shm must be the same on every rank"
            )
        error = None
        available = available_bytes()
        if nbytes > available:
            error = f"a window needs {nbytes} bytes of shared memory, {available} are available"
        else:
            try:
                self.native.reserve(nbytes)
            except (OSError, RuntimeError) as wrong:
                error = f"a window needs {nbytes} bytes of shared memory: {wrong}"
        self.together(error, CapacityError)
        prefault = nbytes <= self.options.prefault_mib * MIB
        try:
            number = self.native.map_window(prefault)
        except (OSError, RuntimeError) as wrong:
            error = f"cannot map a window of {nbytes} bytes: {wrong}"
        self.together(error, CapacityError)
        if prefault:
            self.native.populate_peers(number)
        local = torch.frombuffer(self.native.memory(number), dtype=torch.uint8, count=nbytes)
        return Window(local, key=number)

    def together(self, error: str | None, kind: type[UbepError]) -> None:
        """If any rank has an error, raise it on every rank."""
        for rank, reason in enumerate(self._bootstrap.all_gather(error)):
            if reason is not None:
                raise kind(f"rank {rank}: {reason}")

    def put(self, window: Window, peer: int, offset: int, data: Tensor) -> None:
        data = data.cpu()
        self.native.put(window.key, peer, offset, data.data_ptr(), data.numel())

    def signal(self, window: Window, peer: int, offset: int, word: int) -> None:
        self.native.signal(window.key, peer, offset, word)

    def get(self, window: Window, peer: int, offset: int, nbytes: int) -> Tensor:
        data = torch.empty(nbytes, dtype=torch.uint8)
        self.native.get(window.key, peer, offset, data.data_ptr(), nbytes)
        return data

    def progress(self, timeout_s: float) -> None:
        self.native.progress(timeout_s)

    def wait(self, window: Window, offset: int, epoch: int, minimum: int, timeout_s: float) -> int | None:
        payload = self.native.wait(window.key, offset, epoch, minimum, timeout_s)
        return None if payload < 0 else int(payload)

    def failure(self, peer: int) -> str | None:
        if self.native.dead(peer) and not self.native.closed(peer):
            return f"its process {self.native.pid(peer)} has died"
        return None

    def fuse(self, plan: Plan, windows: Sequence[Window]) -> Any:
        return fuse(self, plan, windows)

    def close(self) -> None:
        atexit.unregister(self.close)
        self.native.close()


def available_bytes() -> int:
    """Memory that the kernel could hand out now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def open_fabric(bootstrap: Bootstrap, table: Mapping[str, Any]) -> Fabric:
    """This rank's fabric. Collective; every rank raises when one cannot take part."""
    rank, world = bootstrap.rank, bootstrap.world_size
    native, options, error = None, Options(), None
    try:
        options = Options.read(table)
        native = _native.Fabric(rank, world)
    except ConfigError as wrong:
        bootstrap.all_gather((host_id(), [], "", "", str(wrong)))
        raise
    except (OSError, RuntimeError) as wrong:
        error = str(wrong)
    cores = sorted(os.sched_getaffinity(0))
    mine = (host_id(), cores, native.address if native else "", native.secret if native else "", error)
    everyone = bootstrap.all_gather(mine)
    hosts, affinities, addresses, secrets, errors = (list(column) for column in zip(*everyone, strict=True))
    away = [other for other, host in enumerate(hosts) if host != hosts[0]]
    if away:
        raise BackendUnavailableError(
            f"backend 'shm' needs all ranks on one host; ranks {away} are elsewhere"
        )
    _raise_any(errors)
    assert native is not None
    try:
        native.join(addresses, secrets, options.connect_timeout_s)
    except (OSError, RuntimeError) as wrong:
        error = str(wrong)
    _raise_any(bootstrap.all_gather(error))
    usable = sorted({core for affinity in affinities for core in affinity})
    if options.pin and world <= len(usable):
        os.sched_setaffinity(0, {usable[rank]})
    own_cores = world <= len(usable)
    spins = options.spins if options.spins is not None else DEFAULT_SPINS if own_cores else 0
    native.set_wait_rule(int(spins), int(options.yields))
    return ShmFabric(bootstrap, options, native)


def _raise_any(errors: Sequence[str | None]) -> None:
    for rank, reason in enumerate(errors):
        if reason is not None:
            raise BackendUnavailableError(f"backend 'shm' cannot open on rank {rank}: {reason}")
