"""One operation of one rank: what the streams ask while they run. Dispatch and combine fill it in."""

from __future__ import annotations

import abc
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from ubep.errors import PeerRefusedError, PlanMismatchError, UbepError
from ubep.protocol import header
from ubep.protocol.flags import parity
from ubep.protocol.header import Header
from ubep.protocol.plan import RankPlan
from ubep.protocol.records import RecordFormat

Piece = tuple[int, int, int]  # offset in a window, first record, last record + 1


class Reader(Protocol):
    """One-sided reads from a peer's window."""

    def __call__(self, peer: int, offset: int, nbytes: int) -> Tensor: ...


class Operation(abc.ABC):
    """State of one operation on one rank.

    name: "dispatch" or "combine".  record: format of what it moves.  tag: see protocol.header.
    error: why this rank refuses its own input, or, once announcements are in, why the operation ends
        without a result on every rank.
    """

    name: str
    record: RecordFormat
    tag: int

    def __init__(self, view: RankPlan, epoch: int, lane: int, error: UbepError | None) -> None:
        self.view = view
        self.plan = view.plan
        self.rank = view.rank
        self.epoch = epoch
        self.lane = lane
        self.parity = parity(epoch)
        self.error = error
        self.own_refusal = error
        self.headers: dict[int, Header] = {}
        self.placed = [0] * self.plan.world_size
        self._none = [0] * (self.plan.roles[1] + 1)

    # ---- what the streams ask

    @cached_property
    def placement(self) -> Literal["staged", "push", "pull"]:
        """How rows travel: into slots, written to their place, or read by the destination."""
        return self.plan.transfer if self.plan.direct else "staged"

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes of one record in the window."""
        return self.plan.codec.wire_bytes(self.record.nbytes)

    @property
    def refused(self) -> bool:
        return self.error is not None

    def outgoing(self, peer: int) -> list[int]:
        """Slice bounds of the records for a peer; the last one is their number."""
        return self._none if self.own_refusal else self._outgoing[peer]

    def incoming(self, source: int) -> list[int]:
        """The same for records from a source; known once its announcement was heard."""
        return list(self.headers[source].bounds) or self._none

    def peers(self, sender: int) -> list[int]:
        """Destinations with records in a sending worker's slice, in sending order."""
        order = self.view.peers.tolist() if self.plan.roles[1] > 1 else self.view.send_order
        mine = [peer for peer in order if self.outgoing(peer)[sender] < self.outgoing(peer)[sender + 1]]
        if self.plan.order == "size-aware":
            mine.sort(key=lambda peer: -self.outgoing(peer)[-1])
        return mine

    def targets(self, peer: int, lo: int, hi: int) -> list[Piece]:
        """Where records [lo, hi) go in the peer's window, in contiguous pieces."""
        return [(self.plan.layout.slot(self.parity, self.rank) + lo * self.wire_bytes, lo, hi)]

    def sources(self, source: int, lo: int, hi: int) -> list[Piece]:
        """Where records [lo, hi) from a source lie in the own window."""
        return [(self.plan.layout.slot(self.parity, source) + lo * self.wire_bytes, lo, hi)]

    # ---- what an interpreter calls for an action

    def pack_header(self, peer: int) -> Tensor:
        """PackHeader: the announcement for a peer as one record, uint8 [1, header_bytes]."""
        if self.own_refusal is not None:
            head = Header(refusal=f"{self.name}: {self.own_refusal}")
        else:
            bounds = self._outgoing[peer]
            head = Header(bounds[-1], self._base(peer), self.tag, bounds, self._counts(peer))
        return header.encode(head, self.plan.header_bytes)

    def hear(self, source: int, record: Tensor) -> None:
        """Hear: read a source's announcement, uint8 [1, header_bytes]."""
        self.headers[source] = header.decode(record, self.plan.roles[1], self._counts_heard())

    def settle(self) -> None:
        """Settle: all announcements are in; decide, alike on every rank, whether the operation goes on."""
        refusals = {s: h.refusal for s, h in sorted(self.headers.items()) if h.refusal is not None}
        if refusals and self.error is None:
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in refusals.items())
            self.error = PeerRefusedError(f"{self.name} was refused by {reasons} (epoch {self.epoch})")
        tags = {source: h.tag for source, h in sorted(self.headers.items()) if h.refusal is None}
        if self.error is None and len(set(tags.values())) > 1:
            calls = "; ".join(f"rank {rank}: {header.describe_tag(tag)}" for rank, tag in tags.items())
            self.error = PlanMismatchError(
                f"ranks called different operations in epoch {self.epoch}: {calls}"
            )
        if self.error is None:
            self._settle()

    @abc.abstractmethod
    def pack(self, peer: int, lo: int, hi: int) -> Tensor:
        """Pack: records [lo, hi) for a peer, uint8 [hi - lo, record.nbytes]."""

    @abc.abstractmethod
    def place(self, source: int, lo: int, hi: int, records: Tensor) -> None:
        """Place: records [lo, hi) from a source; ignored when the operation was refused."""

    def publish(self) -> list[tuple[int, Tensor]]:
        """Publish: (offset in the own window, bytes) of everything that peers will read."""
        return []

    def fetch(self, source: int, count: int, read: Reader) -> None:
        """Fetch: read the rows that a source published for this rank, and place them."""
        raise NotImplementedError(f"{self.name} has nothing to fetch")

    @abc.abstractmethod
    def finish(self) -> None:
        """Finish: the last step; `result` is valid after it."""

    # ---- what an operation knows

    _outgoing: list[list[int]]

    def _base(self, peer: int) -> int:
        """Where a peer's records begin in the published lists."""
        return 0

    def _counts(self, peer: int) -> Tensor | None:
        """Row counts announced to a peer, int64 [groups]."""
        return None

    def _counts_heard(self) -> int:
        """How many row counts an announcement carries."""
        return 0

    @abc.abstractmethod
    def _settle(self) -> None:
        """Compute offsets; set `error`, alike on every rank, if the rows don't fit."""


def read_rows(read: Reader, peer: int, offset: int, stride: int, rows: Tensor) -> Tensor:
    """The rows with the given indices of a peer's array of `stride` bytes a row, uint8 [n, stride]."""
    parts = [read(peer, offset + row * stride, stride) for row in rows.tolist()]
    return torch.stack(parts) if parts else torch.empty(0, stride, dtype=torch.uint8)
