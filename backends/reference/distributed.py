"""The fabric over an existing torch.distributed process group, whatever its engine.

Such a group offers matched sends and receives only, so one-sided writes are queued, and every rank that
can only wait takes part in a round: each pair exchanges what is queued for it. A rank at the end of an
operation goes on taking part until a round in which all are at its end, so all leave it together.
A round sends one message of fixed size to each peer, and a second one where that does not suffice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ubep.backend import (
    Backend,
    BackendUnavailableError,
    Bootstrap,
    Capabilities,
    CapacityError,
    Fabric,
    Probe,
    ProcessGroupBootstrap,
    SoloBootstrap,
    UbepError,
    Window,
)

FIRST_BYTES = 4096  # of the message that every round sends to every peer
HEAD_WORDS = 3  # round number, bytes queued, whether the sender is at the end of its operation
ENTRY_WORDS = 3  # window, offset, bytes
WORD = 8
LATE_SECONDS = 0.001  # for peers whose message must have come while another's was waited for
DEVICE_ENGINES = {"nccl": "cuda", "hccl": "npu", "xccl": "xpu"}


class DistributedFabric(Fabric):
    """Windows in host memory; each round applies the peers' writes in the order they were made."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group else 0
        self.world_size = dist.get_world_size(group) if group else 1
        engine = dist.get_backend(group) if group else "gloo"
        self._grouped = engine in DEVICE_ENGINES
        self._device = torch.device(DEVICE_ENGINES.get(engine, "cpu"))
        self._windows: list[Window] = []
        self._queued: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        self._failures: dict[int, str] = {}
        self._round = 0
        self._at_end = False
        self._all_at_end = self.world_size == 1

    def allocate(self, nbytes: int) -> Window:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if nbytes > available:
            raise CapacityError(f"a window needs {nbytes} bytes, {available} bytes of memory are available")
        window = Window(torch.zeros(nbytes, dtype=torch.uint8), key=len(self._windows))
        self._windows.append(window)
        return window

    def put(self, window: Window, peer: int, offset: int, data: Tensor) -> None:
        data = data.cpu()
        if peer == self.rank:
            window.local[offset : offset + data.numel()] = data
            return
        entry = torch.tensor([window.key, offset, data.numel()]).view(torch.uint8)
        padding = torch.zeros(-data.numel() % WORD, dtype=torch.uint8)
        self._queued[peer].append(torch.cat((entry, data, padding)))

    def signal(self, window: Window, peer: int, offset: int, word: int) -> None:
        self.put(window, peer, offset, torch.tensor([word]).view(torch.uint8))

    def progress(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        self._round += 1
        outgoing = [
            torch.cat(queue) if queue else torch.empty(0, dtype=torch.uint8) for queue in self._queued
        ]
        self._queued = [[] for _ in range(self.world_size)]
        first = {peer: self._first(outgoing[peer]) for peer in self._peers()}
        heads = self._exchange(first, dict.fromkeys(self._peers(), FIRST_BYTES), end)
        fits = FIRST_BYTES - HEAD_WORDS * WORD
        sizes, data, ends = {}, {}, int(self._at_end)
        for peer, message in heads.items():
            number, size, at_end = message[: HEAD_WORDS * WORD].view(torch.int64).tolist()
            if number != self._round:
                raise UbepError(f"rank {peer} is in round {number}, rank {self.rank} in round {self._round}")
            sizes[peer], data[peer] = size, message[HEAD_WORDS * WORD :]
            ends += at_end
        rest = {p: outgoing[p][fits:] for p in self._peers() if outgoing[p].numel() > fits}
        more = self._exchange(rest, {p: size - fits for p, size in sizes.items() if size > fits}, end)
        for peer, size in sizes.items():
            if size > fits and peer not in more:
                continue
            self._apply(torch.cat((data[peer], more[peer])) if size > fits else data[peer][:size])
        self._all_at_end = ends == self.world_size

    def delivered(self) -> bool:
        self._at_end = not self._all_at_end
        done, self._all_at_end = self._all_at_end, self.world_size == 1
        return done

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.world_size) if peer != self.rank]

    def _first(self, queued: Tensor) -> Tensor:
        message = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
        head = torch.tensor([self._round, queued.numel(), self._at_end]).view(torch.uint8)
        start = queued[: FIRST_BYTES - len(head)]
        message[: len(head)] = head
        message[len(head) : len(head) + len(start)] = start
        return message

    def _exchange(self, send: dict[int, Tensor], sizes: dict[int, int], end: float) -> dict[int, Tensor]:
        """Send to some peers and receive from some; returns what came in time, and notes who failed."""
        received = {p: torch.empty(size, dtype=torch.uint8, device=self._device) for p, size in sizes.items()}
        ops = [
            (p, dist.P2POp(dist.isend, t.to(self._device), group=self.group, group_peer=p))
            for p, t in send.items()
        ]
        ops += [(p, dist.P2POp(dist.irecv, t, group=self.group, group_peer=p)) for p, t in received.items()]
        missing = set()
        for peer, work in self._start(ops):
            try:
                work.wait(timedelta(seconds=max(end - time.monotonic(), LATE_SECONDS)))
            except RuntimeError as error:
                missing.add(peer)
                if time.monotonic() < end:
                    self._failures.setdefault(peer, _first_line(error))
        return {p: t.cpu() for p, t in received.items() if p not in missing and p not in self._failures}

    def _start(self, ops: list[tuple[int, dist.P2POp]]) -> list[tuple[int, Any]]:
        if self._grouped:  # such engines need all of a round in one group
            works = dist.batch_isend_irecv([op for _, op in ops]) if ops else []
            return [(peer, works[min(i, len(works) - 1)]) for i, (peer, _) in enumerate(ops)]
        started = []
        for peer, op in ops:
            try:
                started.append((peer, op.op(op.tensor, group=op.group, **_peer_argument(op))))
            except RuntimeError as error:
                self._failures.setdefault(peer, _first_line(error))
        return started

    def _apply(self, data: Tensor) -> None:
        at = 0
        while at < data.numel():
            key, offset, nbytes = data[at : at + ENTRY_WORDS * WORD].view(torch.int64).tolist()
            at += ENTRY_WORDS * WORD
            self._windows[key].local[offset : offset + nbytes] = data[at : at + nbytes]
            at += nbytes + -nbytes % WORD

    def failure(self, peer: int) -> str | None:
        return self._failures.get(peer)

    def close(self) -> None:
        self._windows.clear()
        self._queued = [[] for _ in range(self.world_size)]


def _peer_argument(op: dist.P2POp) -> dict[str, int]:
    return {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]


class DistributedBackend(Backend):
    """Runs wherever torch.distributed does, so over many hosts; made for correctness, not for speed."""

    name = "reference"
    rank_preference = 0

    @classmethod
    def probe(cls) -> Probe:
        if not dist.is_available():
            return Probe(False, "this torch was built without torch.distributed")
        return Probe(True, "torch.distributed over any engine", {"torch": torch.__version__})

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(placements=("staged", "direct"), atomic_block=512, max_workers=64)

    def open(self, bootstrap: Bootstrap, options: Mapping[str, Any]) -> Fabric:
        if isinstance(bootstrap, ProcessGroupBootstrap):
            return DistributedFabric(bootstrap.group)
        if isinstance(bootstrap, SoloBootstrap):
            return DistributedFabric(None)
        raise BackendUnavailableError("backend 'reference' needs a torch.distributed process group")
