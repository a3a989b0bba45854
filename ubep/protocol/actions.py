"""The vocabulary of the protocol: what a worker of a rank can do. Streams yield these, interpreters act.

An action says who, where and how much; an interpreter sends back what the action produces, if anything.
Offsets and sizes are bytes in the window; `peer` is a rank.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Event:
    """A word that workers of one rank share: set once in an operation."""

    name: str
    is_set: bool = False


@dataclass(slots=True)
class PackHeader:
    """Build the announcement for a peer. Produces the wire bytes."""

    peer: int


@dataclass(slots=True)
class Pack:
    """Build the wire bytes of records [lo, hi) for a peer (gather, quantise, encode). Produces them."""

    peer: int
    lo: int
    hi: int


@dataclass(slots=True)
class Put:
    """One-sided write into a peer's window."""

    peer: int
    offset: int
    nbytes: int
    data: Any = field(repr=False)


@dataclass(slots=True)
class Signal:
    """Write a flag word at a peer, visible after every earlier put to that peer (release)."""

    peer: int
    offset: int
    done: int
    data: Any = field(repr=False)


@dataclass(slots=True)
class Wait:
    """Until `count` records from a peer lie at `offset` of the own window (acquire).

    flag: offset of the flag word that tells, with at least `done` as its payload; or None where the
    records themselves tell.
    """

    peer: int
    flag: int | None
    done: int
    offset: int
    count: int
    wire_bytes: int


@dataclass(slots=True)
class Hear:
    """Read a peer's announcement from the own window."""

    peer: int
    offset: int


@dataclass(slots=True)
class Settle:
    """All announcements are in: compute where every row goes, or why the operation is refused."""


@dataclass(slots=True)
class Place:
    """Move records [lo, hi) of a peer from the own window to their final rows."""

    peer: int
    lo: int
    hi: int


@dataclass(slots=True)
class Publish:
    """Lay rows out in the own window for peers to read."""


@dataclass(slots=True)
class Fetch:
    """Read the `count` rows that a peer has published for this rank, and place them."""

    peer: int
    count: int
    nbytes: int


@dataclass(slots=True)
class Finish:
    """Last step of an operation: zero the gaps after dispatch, reduce after combine."""


@dataclass(slots=True)
class Notify:
    """Set an event of this rank."""

    event: Event


@dataclass(slots=True)
class Await:
    """Until another worker of this rank has set an event."""

    event: Event


Action = (
    PackHeader
    | Pack
    | Put
    | Signal
    | Wait
    | Hear
    | Settle
    | Place
    | Publish
    | Fetch
    | Finish
    | Notify
    | Await
)
Stream = Generator[Action, Any, None]
