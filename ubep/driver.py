"""Carries out the protocol's actions on a fabric's primitives. Works on any backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ubep.backend import Fabric, Window
from ubep.errors import DeadlineError, DeadlockError, PeerFailureError, UbepError
from ubep.protocol import actions as act
from ubep.protocol.flags import clears_other_parity, pack_word, unpack_word
from ubep.protocol.operation import Operation
from ubep.protocol.streams import worker_streams
from ubep.trace import Tracer

T = TypeVar("T")


@dataclass(frozen=True)
class Blocked:
    """A rank can only wait, in the operation that `driver` carries out: for `wait`, or for its end."""

    driver: Driver
    wait: act.Wait | None

    def __str__(self) -> str:
        return self.driver.describe(self.wait)


class Driver:
    """One operation of one rank on a fabric.

    `steps` is a generator, so that a scheduler may interleave ranks; `run` drives it to its end.
    """

    def __init__(self, fabric: Fabric, window: Window, op: Operation, tracer: Tracer | None = None) -> None:
        self.fabric = fabric
        self.window = window
        self.op = op
        self.tracer = tracer
        self._perform: dict[type, Callable[[Any], Any]] = {
            act.PackHeader: self._pack_header,
            act.Pack: self._pack,
            act.Put: self._put,
            act.Signal: self._signal,
            act.Hear: self._hear,
            act.Settle: lambda _: self.op.settle(),
            act.Place: self._place,
            act.Publish: self._publish,
            act.Fetch: lambda a: self.op.fetch(a.peer, a.count, self._read),
            act.Finish: lambda _: self.op.finish(),
            act.Notify: self._notify,
            act.Wait: lambda _: None,
            act.Await: lambda _: None,
        }

    # ---- running

    def steps(self) -> Iterator[Blocked | None]:
        """Advance the workers action by action; yields None after each, Blocked when none can go on."""
        if clears_other_parity(self.op.epoch):
            self._clear(1 - self.op.parity)
        streams = worker_streams(self.op)
        waiting: list[tuple[int, act.Action]] = [
            (worker, next(stream)) for worker, stream in enumerate(streams)
        ]
        while waiting:
            first = self.fabric.pick(len(waiting)) if len(waiting) > 1 else 0
            for index in (*range(first, len(waiting)), *range(first)):
                if self._ready(waiting[index][1]):
                    break
            else:
                yield Blocked(self, next(a for _, a in waiting if isinstance(a, act.Wait)))
                continue
            worker, action = waiting.pop(index)
            result = (
                self._perform[type(action)](action) if self.tracer is None else self._timed(worker, action)
            )
            try:
                waiting.append((worker, streams[worker].send(result)))
            except StopIteration:
                continue
            yield None
        while not self.fabric.delivered():
            yield Blocked(self, None)

    def _clear(self, parity: int) -> None:
        layout = self.op.plan.layout
        self.window.local[layout.flags(parity)] = 0
        self.op.plan.codec.forget(self.window.local[layout.data(parity)])

    def block(self, wait: act.Wait | None, deadline: float, timeout_s: float) -> None:
        """Wait a while in the fabric. Raises PeerFailureError, or DeadlineError after the deadline."""
        for peer in range(self.op.plan.world_size):
            reason = self.fabric.failure(peer)
            if reason is not None:
                raise PeerFailureError(f"rank {peer} failed: {reason}; {self.describe(wait)}")
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"no answer within {timeout_s:g} s: {self.describe(wait)}")
        try:
            if wait is not None and wait.flag is not None and not self.op.plan.codec.reads_data:
                self.fabric.wait(self.window, wait.flag, self.op.epoch, wait.done, left)
            else:
                self.fabric.progress(left)
        except DeadlockError as error:
            raise DeadlockError(f"{error}: {self.describe(wait)}") from None

    def describe(self, wait: act.Wait | None) -> str:
        """Where this operation stands: phase, epoch, lane, and how far each missing peer got."""
        op = self.op
        missing = []
        for source in range(op.plan.world_size):
            if source not in op.headers:
                missing.append(f"rank {source}: nothing announced")
            elif op.placed[source] < (total := op.incoming(source)[-1]):
                missing.append(f"rank {source}: {op.placed[source]} of {total} records")
        phase = "rows" if len(op.headers) == op.plan.world_size else "announcements"
        what = "delivery to all ranks" if wait is None else f"{phase} of rank {wait.peer}"
        return (
            f"rank {op.rank} in {op.name} waits for {what} (epoch {op.epoch}, lane {op.lane}); "
            f"missing: {'; '.join(missing) or 'nothing'}"
        )

    # ---- actions

    def _timed(self, worker: int, action: act.Action) -> Any:
        assert self.tracer is not None
        begin = time.perf_counter()
        result = self._perform[type(action)](action)
        self.tracer.record(self.op, worker, action, begin, time.perf_counter())
        return result

    def _ready(self, action: act.Action) -> bool:
        if isinstance(action, act.Await):
            return action.event.is_set
        if not isinstance(action, act.Wait):
            return True
        payload = None
        if action.flag is not None:
            epoch, found = unpack_word(self.window.word(action.flag))
            payload = found if epoch == self.op.epoch else None
            if payload is None:
                return False
        codec = self.op.plan.codec
        wire = None
        if codec.reads_data:
            wire = self._own(action.offset, action.count, action.wire_bytes)
        return codec.arrived(wire, self.op.epoch, payload, action.done)

    def _own(self, offset: int, count: int, size: int) -> torch.Tensor:
        """`count` records of `size` bytes in the own window."""
        return self.window.local[offset : offset + count * size].view(count, size)

    def _pack_header(self, action: act.PackHeader) -> torch.Tensor:
        return self.op.plan.codec.encode(self.op.pack_header(action.peer), self.op.epoch)

    def _pack(self, action: act.Pack) -> torch.Tensor:
        return self.op.plan.codec.encode(self.op.pack(action.peer, action.lo, action.hi), self.op.epoch)

    def _put(self, action: act.Put) -> None:
        self.fabric.put(self.window, action.peer, action.offset, action.data.reshape(-1))

    def _signal(self, action: act.Signal) -> None:
        payload = self.op.plan.codec.payload(action.data, action.done)
        self.fabric.signal(self.window, action.peer, action.offset, pack_word(self.op.epoch, payload))

    def _take(self, offset: int, count: int, record_bytes: int) -> torch.Tensor:
        """Records out of the own window, which is then made ready for its next use."""
        codec = self.op.plan.codec
        wire = self._own(offset, count, codec.wire_bytes(record_bytes))
        records = codec.decode(wire, record_bytes)
        codec.fill(wire)
        return records

    def _hear(self, action: act.Hear) -> None:
        self.op.hear(action.peer, self._take(action.offset, 1, self.op.plan.header_bytes))

    def _place(self, action: act.Place) -> None:
        for offset, lo, hi in self.op.sources(action.peer, action.lo, action.hi):
            self.op.place(action.peer, lo, hi, self._take(offset, hi - lo, self.op.record.nbytes))

    def _publish(self, action: act.Publish) -> None:
        for offset, data in self.op.publish():
            self.window.local[offset : offset + data.numel()] = data.reshape(-1)

    def _read(self, peer: int, offset: int, nbytes: int) -> torch.Tensor:
        return self.fabric.get(self.window, peer, offset, nbytes)

    def _notify(self, action: act.Notify) -> None:
        action.event.is_set = True


def run(steps: Generator[Blocked | None, None, T], timeout_s: float) -> T:
    """Drive a step generator to its end, blocking in the fabric; returns what it returns.

    Raises what the generator raises, DeadlineError after timeout_s, or PeerFailureError.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            blocked = next(steps)
            if blocked is not None:
                try:
                    blocked.driver.block(blocked.wait, deadline, timeout_s)
                except UbepError as error:
                    steps.throw(error)
    except StopIteration as stop:
        result: T = stop.value
        return result
