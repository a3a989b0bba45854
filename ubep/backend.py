"""The plugin surface: all that a backend imports from ubep, and all that it implements.

A backend is a class, published under the entry-point group `ubep.backends`:

    [project.entry-points."ubep.backends"]
    mine = "ubep_backend_mine:Backend"

Importing its module must be cheap and must not fail for want of a driver: vendor libraries are loaded
in `open`. `docs/architecture.md` has the memory model that a fabric promises.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ubep.bootstrap import Bootstrap, ProcessGroupBootstrap, SoloBootstrap
from ubep.capabilities import Capabilities, Placement, Signalling
from ubep.errors import (
    BackendUnavailableError,
    CapacityError,
    ClosedError,
    ConfigError,
    DeadlineError,
    DeadlockError,
    InvalidInputError,
    PeerFailureError,
    UbepError,
    UnsupportedError,
)
from ubep.protocol.chunking import Link
from ubep.protocol.flags import pack_word, unpack_word
from ubep.protocol.plan import Plan, RankPlan
from ubep.topology import Topology
from ubep.workload import Workload

if TYPE_CHECKING:
    from ubep.fused import Fused

__all__ = [
    "INTERFACE_VERSION",
    "Backend",
    "BackendUnavailableError",
    "Bootstrap",
    "Capabilities",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "DeadlineError",
    "DeadlockError",
    "Fabric",
    "InvalidInputError",
    "Link",
    "PeerFailureError",
    "Placement",
    "Plan",
    "Probe",
    "ProcessGroupBootstrap",
    "RankPlan",
    "Signalling",
    "SoloBootstrap",
    "Topology",
    "UbepError",
    "UnsupportedError",
    "Window",
    "Workload",
    "pack_word",
    "unpack_word",
]

INTERFACE_VERSION = 1


@dataclass(frozen=True)
class Probe:
    """Whether a backend can run on this machine.

    available; reason: why not, or what was found; versions: of the libraries found;
    fix: the command or setting that would make it available.
    """

    available: bool
    reason: str
    versions: Mapping[str, str] = field(default_factory=dict)
    fix: str = ""


@dataclass
class Window:
    """Memory of this rank that every peer can write, at the same offsets on every rank.

    local: uint8 [nbytes], zeroed at first.  key: whatever the fabric needs to find it again.
    """

    local: Tensor
    key: Any = None

    @property
    def nbytes(self) -> int:
        return self.local.numel()

    def word(self, offset: int) -> int:
        """The 64-bit word at an offset."""
        return int(self.local[offset : offset + 8].view(torch.int64))


class Fabric(abc.ABC):
    """One rank's access to its peers. Offsets and sizes are bytes in a window; peer may be this rank."""

    rank: int
    world_size: int

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> Window:
        """A zeroed window of nbytes on every rank. Collective: same order and sizes on all ranks.

        Raises CapacityError with the bytes needed and available.
        """

    @abc.abstractmethod
    def put(self, window: Window, peer: int, offset: int, data: Tensor) -> None:
        """Write contiguous uint8 `data` into the peer's window; the source may be reused on return.

        Aligned blocks of `atomic_block` bytes are seen whole; otherwise puts arrive in any order.
        """

    @abc.abstractmethod
    def signal(self, window: Window, peer: int, offset: int, word: int) -> None:
        """Write a signed 64-bit word, whole, seen only after all earlier puts to that peer (release)."""

    @abc.abstractmethod
    def progress(self, timeout_s: float) -> None:
        """Called when this rank can only wait: let writes of peers become visible in `window.local`.

        Returns when something may have changed, a failed peer included, or after timeout_s at the latest.
        Writes are seen in the order that their signals promise (acquire).
        """

    def wait(self, window: Window, offset: int, epoch: int, minimum: int, timeout_s: float) -> int | None:
        """Until the own word at `offset` has this epoch and a payload of at least `minimum`.

        Returns the payload, or None after timeout_s or when a peer has failed. What was put before that
        word is then visible.
        """
        end = time.monotonic() + timeout_s
        while True:
            found, payload = unpack_word(window.word(offset))
            if found == epoch and payload >= minimum:
                return payload
            left = end - time.monotonic()
            if left <= 0 or any(self.failure(peer) for peer in range(self.world_size)):
                return None
            self.progress(left)

    def delivered(self) -> bool:
        """Asked at the end of an operation, until true: peers get this rank's writes without its help."""
        return True

    def get(self, window: Window, peer: int, offset: int, nbytes: int) -> Tensor:
        """Read uint8 [nbytes] from the peer's window (capability `get`)."""
        raise UnsupportedError("get", f"{type(self).__name__} has no one-sided reads")

    def failure(self, peer: int) -> str | None:
        """Why a peer is known to be dead or unreachable; None while nothing is known against it."""
        return None

    def pick(self, workers: int) -> int:
        """Which of this rank's workers the driver tries first; a scheduler may choose at will."""
        return 0

    def fuse(self, plan: Plan, windows: Sequence[Window]) -> Fused | None:
        """A native executor of the plan on these windows, one a lane; None: use the driver. Collective."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent, not collective, allowed after any failure."""


class Backend(abc.ABC):
    """One kind of hardware.

    name: as in the configuration.  rank_preference: the automatic choice takes the highest.
    interface_version: the INTERFACE_VERSION that it was written for.
    """

    name: ClassVar[str]
    rank_preference: ClassVar[int] = 0
    interface_version: ClassVar[int] = INTERFACE_VERSION

    @classmethod
    @abc.abstractmethod
    def probe(cls) -> Probe:
        """Whether it can run here. Never raises, initialises nothing."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """What it can do; may be asked before anything is allocated."""

    def supports(self, workload: Workload, world_size: int) -> str | None:
        """None, or why it cannot carry this workload on that many ranks."""
        refusal = self.capabilities.refusal(workload, world_size)
        return None if refusal is None else refusal[1]

    @abc.abstractmethod
    def open(self, bootstrap: Bootstrap, options: Mapping[str, Any]) -> Fabric:
        """This rank's fabric. Collective. `options` is the backend's own table of the configuration."""

    def topology(self, bootstrap: Bootstrap) -> Topology | None:
        """What the hardware tells of distances; None: ask environment and host names. Collective."""
        return None

    def launch(
        self, fn: Callable[[Bootstrap], Any], world_size: int, options: Mapping[str, Any]
    ) -> Sequence[Any] | None:
        """Run fn, which never raises, on every rank of a world without processes; None: use processes."""
        return None
