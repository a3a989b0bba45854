"""Dispatch and combine as streams of actions, one for each worker of a rank.

Both operations have the same shape: announce, send rows, hear all announcements, place what arrives,
finish. What is packed, where it is placed and what finishing means is the operation's business
(protocol.dispatch, protocol.combine); *what happens in which order* is here, and only here.

The first `counting` workers announce, and worker 0 hears all announcements and settles the offsets.
The `sending` workers send their equal slices meanwhile. The only dependency between them, offsets
before placing, is the event `heard`. All workers place, each its share of the sources. A single
worker does everything in turn.
"""

from __future__ import annotations

from collections.abc import Iterator

from ubep.protocol.actions import (
    Await,
    Event,
    Fetch,
    Finish,
    Hear,
    Notify,
    Pack,
    PackHeader,
    Place,
    Publish,
    Put,
    Settle,
    Signal,
    Stream,
    Wait,
)
from ubep.protocol.operation import Operation

HEADER_FLAG = 0


def worker_streams(op: Operation) -> list[Stream]:
    """The action streams of one rank's workers for one operation."""
    published, heard = Event("published"), Event("heard")
    workers = op.plan.workers
    done = [Event(f"placed by worker {worker}") for worker in range(workers)]
    return [_worker(op, worker, published, heard, done) for worker in range(workers)]


def _worker(op: Operation, worker: int, published: Event, heard: Event, done: list[Event]) -> Stream:
    plan = op.plan
    counting, _ = plan.roles
    counts = worker < counting
    sender = worker if plan.workers == 1 else worker - counting
    staged = op.placement == "staged"
    push = op.placement == "push"
    if op.placement == "pull":  # peers may read as soon as they have heard from any worker
        if worker == 0:
            yield Publish()
            yield Notify(published)
        else:
            yield Await(published)
    if counts:
        yield from _announce(op, op.view.send_order[worker::counting])
    # Rows may leave before anything is heard only where they need no offsets and nobody may refuse.
    early = staged and not plan.checked and sender >= 0
    if early:
        yield from _send(op, sender)
    if worker == 0:
        yield from _hear(op)
        yield Notify(heard)
    else:
        yield Await(heard)
    if op.refused and (plan.checked or not staged):
        return  # on every rank alike, before any row moved
    if (staged or push) and sender >= 0 and not early:
        yield from _send(op, sender)
    for source in op.view.receive_order[worker :: plan.workers]:
        if op.placement == "pull":
            count = op.incoming(source)[-1]
            yield Fetch(source, count, count * op.record.nbytes)
        else:
            yield from _receive(op, source)
    yield Notify(done[worker])
    if worker == 0:
        for other in done[1:]:
            yield Await(other)
        yield Finish()


def _announce(op: Operation, peers: list[int]) -> Stream:
    layout, wire = op.plan.layout, op.plan.codec.wire_bytes(op.plan.header_bytes)
    for peer in peers:
        data = yield PackHeader(peer)
        yield Put(peer, layout.header(op.parity, op.rank), wire, data)
        if op.plan.codec.flagged:
            yield Signal(peer, layout.flag(op.parity, op.rank, HEADER_FLAG), 1, data)


def _hear(op: Operation) -> Stream:
    layout, codec = op.plan.layout, op.plan.codec
    wire = codec.wire_bytes(op.plan.header_bytes)
    for source in op.view.receive_order:
        offset = layout.header(op.parity, source)
        flag = layout.flag(op.parity, source, HEADER_FLAG) if codec.flagged else None
        yield Wait(source, flag, 1, offset, 1, wire)
        yield Hear(source, offset)
    yield Settle()


def _chunks(op: Operation, bounds: list[int], chunk: int, sender: int) -> Iterator[tuple[int, int, int]]:
    """(flag index, lo, hi) of every chunk in one sending worker's run; runs and chunks are never empty."""
    lo, end = bounds[sender], bounds[sender + 1]
    flag = 1 + sender * op.plan.flags_per_sender
    while lo < end:
        hi = min(lo + chunk, end)
        yield flag, lo, hi
        lo = hi
        flag += not op.plan.ordered


def _send(op: Operation, sender: int) -> Stream:
    plan, layout = op.plan, op.plan.layout
    for peer in op.peers(sender):
        for flag, lo, hi in _chunks(op, op.outgoing(peer), plan.chunk(op.rank, peer), sender):
            data = yield Pack(peer, lo, hi)
            for offset, begin, end in op.targets(peer, lo, hi):
                piece = None if data is None else data[begin - lo : end - lo]
                yield Put(peer, offset, (end - begin) * op.wire_bytes, piece)
            if plan.codec.flagged:
                yield Signal(peer, layout.flag(op.parity, op.rank, flag), hi, data)


def _receive(op: Operation, source: int) -> Stream:
    plan, layout = op.plan, op.plan.layout
    for sender in range(plan.roles[1]):
        for index, lo, hi in _chunks(op, op.incoming(source), plan.chunk(source, op.rank), sender):
            offset = layout.slot(op.parity, source) + lo * op.wire_bytes
            flag = layout.flag(op.parity, source, index) if plan.codec.flagged else None
            yield Wait(source, flag, hi, offset, hi - lo, op.wire_bytes)
            yield Place(source, lo, hi)
