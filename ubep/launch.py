"""Run a function on several ranks of this machine. For more machines use torchrun."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
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
from ubep.errors import LaunchError

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
    Raises LaunchError with the traceback of the first rank that failed, or after timeout_s.
    """
    config = config or resolve().config
    for entry in registry.discover() if config.backend != "auto" else ():
        if entry.name == config.backend and entry.backend is not None:
            options = config.options.get(entry.name, {})
            results = entry.backend.launch(lambda boot: _call(fn, args, config, boot), world_size, options)
            if results is not None:
                return list(results)
    # A process that has touched an accelerator must not be forked.
    method = "spawn" if torch.cuda.is_initialized() else "fork"
    context = multiprocessing.get_context(method)
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


def _call(fn: Callable[..., Any], args: Sequence[Any], config: Config, bootstrap: Bootstrap | None) -> Any:
    with Communicator(config=config, bootstrap=bootstrap) as comm:
        return fn(comm, *args)


def _rank_main(
    sender: Connection,
    fn: Callable[..., Any],
    args: Sequence[Any],
    config: Config,
    rank: int,
    world_size: int,
    store: Path,
) -> None:
    try:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size
        )
        answer = (True, _call(fn, args, config, None))
        dist.destroy_process_group()
    except BaseException:  # whatever it was, the parent reports it
        answer = (False, traceback.format_exc())
    # Plain pickle: multiprocessing's own would pass tensors through shared memory that outlives ranks.
    sender.send_bytes(pickle.dumps(answer))
    sender.close()


def _collect(ranks: dict[Connection, tuple[int, BaseProcess]], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    pending = dict(ranks)
    deadline = time.monotonic() + timeout_s
    while pending:
        left = deadline - time.monotonic()
        if left <= 0:
            waiting = sorted(rank for rank, _ in pending.values())
            failures.append(f"ranks {waiting} were still running")
            break
        for receiver in wait(list(pending), left):
            assert isinstance(receiver, Connection)
            rank, process = pending.pop(receiver)
            try:
                ok, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                process.join(GRACE_SECONDS)
                ok, value = False, f"the process ended with exit code {process.exitcode} and no result"
            if ok:
                results[rank] = value
            else:
                failures.append(f"rank {rank}:\n{value}")
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failures:
        raise LaunchError("\n".join(failures))
    return [results[rank] for rank in sorted(results)]
