"""Every error that ubep raises, in one tree. Each message says what, where, why, and what to do."""

from __future__ import annotations


class UbepError(Exception):
    """Root of all errors raised by ubep."""


class ConfigError(UbepError):
    """A configuration key or value is wrong; the message names its source, the key and what is allowed."""


class BackendUnavailableError(UbepError):
    """The backend asked for is unknown, cannot run here, or cannot carry the workload."""


class UnsupportedError(UbepError):
    """An operation needs a capability that the backend does not declare; `capability` names it."""

    def __init__(self, capability: str, message: str) -> None:
        super().__init__(message)
        self.capability = capability


class PlanMismatchError(UbepError):
    """Ranks built different plans; the message names the fields, the values and the ranks."""


class InvalidInputError(UbepError, ValueError):
    """An argument of this rank was refused; the message holds the value given and the limit."""


class CapacityError(UbepError):
    """What was asked does not fit; the message holds the amount needed and the amount available."""


class PeerRefusedError(UbepError):
    """Another rank refused its input, so this operation was refused on every rank alike."""


class StaleHandleError(UbepError):
    """A handle was used outside the communicator, lane and generation that it belongs to."""


class ClosedError(UbepError):
    """The object was closed, or was given up after a failure."""


class DeadlineError(UbepError, TimeoutError):
    """A wait outlasted its deadline; names operation, phase, epoch, lane and how far each peer got."""


class PeerFailureError(UbepError):
    """A peer died or cannot be reached; names the rank, operation, phase and epoch."""


class DeadlockError(DeadlineError):
    """A wait that can never end: no rank can go on and no write is in flight."""


class LaunchError(UbepError):
    """A launched rank failed; the message holds its rank and traceback."""
