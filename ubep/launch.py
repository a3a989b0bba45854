"""Run a function on several ranks of this machine. For more machines use torchrun."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ubep import registry
from ubep.backend import Bootstrap
from ubep.communicator import Communicator
from ubep.config import Config, resolve
from ubep.errors import LaunchError, UbepError

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 5.0  # for the other ranks to fail by themselves, and say why, after the first has


def launch(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    *,
    config: Config | None = None,
    timeout_s: float = 600.0,
) -> list[Any]:
    """Run `fn(comm, *args)` on world_size ranks and return their results, by rank.

    comm is an open Communicator, closed afterwards. Ranks are processes with a torch.distributed (gloo)
    default group over loopback; results come back pickled. A backend that runs ranks in another way
    (the reference backend's virtual ranks) does so where the configuration names it.
    Raises LaunchError, which tells for every rank that failed why, or after timeout_s.
    """
    config = config or resolve().config
    for entry in registry.discover() if config.backend != "auto" else ():
        if entry.name == config.backend and entry.backend is not None:
            options = config.options.get(entry.name, {})
            outcomes = entry.backend.launch(lambda boot: _call(fn, args, config, boot), world_size, options)
            if outcomes is not None:
                return _results(dict(enumerate(outcomes)))
    # A process that has touched an accelerator must not be forked.
    touched = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    context: Any = multiprocessing.get_context("spawn" if touched else "fork")
    with tempfile.TemporaryDirectory(prefix="ubep-") as folder:
        ranks: dict[Connection, tuple[int, BaseProcess]] = {}
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(sender, fn, args, config, rank, world_size, Path(folder) / "store"),
                name=f"ubep-rank-{rank}",
                daemon=True,
            )
            process.start()
            sender.close()
            ranks[receiver] = (rank, process)
        try:
            return _collect(ranks, timeout_s)
        finally:
            for _, process in ranks.values():
                process.kill()
                process.join()


@dataclass(frozen=True)
class Outcome:
    """What one rank came to: a value, or why it failed."""

    value: Any = None
    failure: str | None = None


def _call(
    fn: Callable[..., Any], args: Sequence[Any], config: Config, bootstrap: Bootstrap | None
) -> Outcome:
    try:
        with Communicator(config=config, bootstrap=bootstrap) as comm:
            return Outcome(fn(comm, *args))
    except UbepError as error:
        return Outcome(failure=f"{type(error).__name__}: {error}")
    except BaseException:  # whatever it was, the caller of launch learns of it
        return Outcome(failure=traceback.format_exc())


def _results(outcomes: dict[int, Outcome]) -> list[Any]:
    """Values by rank. Raises LaunchError, which tells ranks that failed alike only once."""
    ranks_by_failure: dict[str, list[int]] = {}
    for rank, outcome in sorted(outcomes.items()):
        if outcome.failure is not None:
            ranks_by_failure.setdefault(outcome.failure, []).append(rank)
    if ranks_by_failure:
        lines = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_by_failure.items()]
        raise LaunchError("\n".join(lines))
    return [outcome.value for _, outcome in sorted(outcomes.items())]


def _rank_main(
    sender: Connection,
    fn: Callable[..., Any],
    args: Sequence[Any],
    config: Config,
    rank: int,
    world_size: int,
    store: Path,
) -> None:
    if sys.platform == "linux":  # a rank must not outlive whoever launched it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=world_size)
    outcome = _call(fn, args, config, None)
    # Plain pickle: multiprocessing's own would pass tensors through shared memory that outlives ranks.
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    # A rank that ends takes its connections along, with what slower ranks have not read from them yet.
    with suppress(RuntimeError):
        dist.barrier()


def _collect(ranks: dict[Connection, tuple[int, BaseProcess]], timeout_s: float) -> list[Any]:
    outcomes: dict[int, Outcome] = {}
    pending = dict(ranks)
    deadline = time.monotonic() + timeout_s
    while pending and (left := deadline - time.monotonic()) > 0:
        for receiver in wait(list(pending), left):
            assert isinstance(receiver, Connection)
            rank, process = pending.pop(receiver)
            try:
                outcomes[rank] = pickle.loads(receiver.recv_bytes())
            except EOFError:
                process.join(GRACE_SECONDS)
                outcomes[rank] = Outcome(failure=f"ended with exit code {process.exitcode} and no result")
            if outcomes[rank].failure is not None:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for rank, _ in pending.values():
        outcomes[rank] = Outcome(failure="was still running")
    return _results(outcomes)
