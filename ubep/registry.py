"""Finds backends by entry point, asks each whether it can run, and chooses with reasons."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from stevedore import ExtensionManager

from ubep.backend import INTERFACE_VERSION, Backend, Probe
from ubep.bootstrap import Bootstrap
from ubep.errors import BackendUnavailableError
from ubep.workload import Workload

NAMESPACE = "ubep.backends"


@dataclass(frozen=True)
class Entry:
    """One entry point: the backend if it loaded, and what its probe (or its failure to load) says."""

    name: str
    backend: Backend | None
    probe: Probe


def discover() -> list[Entry]:
    """All installed backends, best first. One that is broken gives an entry that says why; never raises."""
    listing: ExtensionManager[Backend] = ExtensionManager.make_test_instance([], namespace=NAMESPACE)
    entries = [_load(point) for point in listing.list_entry_points()]
    return sorted(entries, key=lambda e: (-(e.backend.rank_preference if e.backend else -1), e.name))


def _load(point: EntryPoint) -> Entry:
    name = point.name
    try:
        cls = point.load()
    except (Exception, SystemExit) as error:  # whatever a plugin does at import concerns that plugin alone
        return Entry(name, None, Probe(False, f"failed to import: {type(error).__name__}: {error}"))
    return check_class(name, cls)


def check_class(name: str, cls: object) -> Entry:
    """The entry of a loaded class; says what is wrong with one that is not a backend of this version."""
    if not (inspect.isclass(cls) and issubclass(cls, Backend)):
        return Entry(name, None, Probe(False, f"{cls!r} is not a subclass of ubep.backend.Backend"))
    if cls.interface_version != INTERFACE_VERSION:
        older = cls.interface_version < INTERFACE_VERSION
        return Entry(
            name,
            None,
            Probe(
                False,
                f"written for plugin interface {cls.interface_version}, this ubep has {INTERFACE_VERSION}",
                fix=f"install a {'newer' if older else 'matching'} release of the plugin"
                + ("" if older else " or a newer ubep"),
            ),
        )
    try:
        return Entry(name, cls(), cls.probe())
    except Exception as error:  # as above
        return Entry(name, None, Probe(False, f"failed to probe: {type(error).__name__}: {error}"))


@dataclass(frozen=True)
class Choice:
    """The backend chosen, why, and why each of the others was not."""

    backend: Backend
    reason: str
    rejected: dict[str, str]


def choose(name: str, workload: Workload, bootstrap: Bootstrap, entries: list[Entry] | None = None) -> Choice:
    """The backend called `name`, or for "auto" the best that can carry the workload on every rank.

    Collective: a backend must be able to run on all ranks, and all ranks choose the same.
    Raises BackendUnavailableError, with the nearest spelling for a name that is not known.
    """
    entries = discover() if entries is None else entries
    local = {entry.name: _objection(entry, workload, bootstrap.world_size) for entry in entries}
    everywhere = bootstrap.all_gather(local)
    objections: dict[str, str] = {}
    for entry in entries:
        for rank, answers in enumerate(everywhere):
            reason = answers.get(entry.name, "not installed")
            if reason is not None:
                on = "" if all(a.get(entry.name, "") == reason for a in everywhere) else f" (on rank {rank})"
                objections.setdefault(entry.name, reason + on)
    if name != "auto":
        return _named(name, entries, objections)
    for entry in entries:
        if entry.backend is not None and entry.name not in objections:
            rejected = {e.name: objections.get(e.name, "ranked lower") for e in entries if e is not entry}
            return Choice(entry.backend, "the best available", rejected)
    reasons = "; ".join(f"{key}: {value}" for key, value in objections.items())
    raise BackendUnavailableError(f"no backend can run here: {reasons or 'none is installed'}")


def _objection(entry: Entry, workload: Workload, world_size: int) -> str | None:
    if entry.backend is None or not entry.probe.available:
        fix = f"; fix: {entry.probe.fix}" if entry.probe.fix else ""
        return entry.probe.reason + fix
    return entry.backend.supports(workload, world_size)


def _named(name: str, entries: list[Entry], objections: dict[str, str]) -> Choice:
    known = {entry.name: entry for entry in entries}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BackendUnavailableError(
            f"unknown backend {name!r}; installed: {', '.join(known) or 'none'}{hint}"
        )
    if name in objections:
        raise BackendUnavailableError(f"backend {name!r} cannot be used: {objections[name]}")
    backend = known[name].backend
    assert backend is not None
    others = {e.name: objections.get(e.name, "not asked for") for e in entries if e.name != name}
    return Choice(backend, "asked for", others)
