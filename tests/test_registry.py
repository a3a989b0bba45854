"""Discovery and choice of backends. Broken plugins cost one line, and are never in anybody's way."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from stevedore import ExtensionManager

from ubep import registry
from ubep.backend import (
    INTERFACE_VERSION,
    Backend,
    Bootstrap,
    Capabilities,
    Fabric,
    Probe,
    SoloBootstrap,
    Workload,
)
from ubep.errors import BackendUnavailableError
from ubep.registry import Entry, check_class, choose, discover

WORKLOAD = Workload(8, 64, 2, 4)


class Fine(Backend):
    name = "fine"
    rank_preference = 5

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "always")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def open(self, bootstrap: Bootstrap, options: Mapping[str, Any]) -> Fabric:
        raise AssertionError("choosing opens nothing")


class Picky(Fine):
    name = "picky"
    rank_preference = 9

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(max_topk=1)


class Absent(Fine):
    name = "absent"
    rank_preference = 10

    @classmethod
    def probe(cls) -> Probe:
        return Probe(False, "libvendor.so not found", fix="install the vendor's toolkit")


class Old(Fine):
    interface_version = INTERFACE_VERSION - 1


class New(Fine):
    interface_version = INTERFACE_VERSION + 1


class Raising(Fine):
    @classmethod
    def probe(cls) -> Probe:
        raise RuntimeError("driver exploded")


def entries(*classes: type[Backend]) -> list[Entry]:
    return [check_class(cls.name, cls) for cls in classes]


def test_installed_backends_are_found_best_first() -> None:
    names = [entry.name for entry in discover()]
    assert {"reference", "virtual"} <= set(names)
    assert names.index("reference") < names.index("virtual")


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs the C++ compiler that builds it")
def test_shared_memory_is_built_where_there_is_a_compiler_and_comes_first() -> None:
    best = discover()[0]
    assert (best.name, best.probe.available) == ("shm", True), best.probe.reason


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Old, f"written for plugin interface {INTERFACE_VERSION - 1}, this ubep has {INTERFACE_VERSION}"),
        (New, f"written for plugin interface {INTERFACE_VERSION + 1}"),
        (Raising, "failed to probe: RuntimeError: driver exploded"),
        (int, "is not a subclass of ubep.backend.Backend"),
        (Fabric, "is not a subclass"),
        (Backend, "failed to probe: TypeError"),
    ],
)
def test_a_class_that_is_wrong_gives_one_line(cls: object, reason: str) -> None:
    entry = check_class("wrong", cls)
    assert entry.backend is None
    assert reason in entry.probe.reason
    assert "\n" not in entry.probe.reason


@pytest.mark.parametrize(
    "target", ["no_such_module:Backend", "ubep.errors:Nothing", "antigravity_missing.x:Y"]
)
def test_a_plugin_that_does_not_import_gives_one_line(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", target, registry.NAMESPACE)
    good = EntryPoint("fine", f"{__name__}:Fine", registry.NAMESPACE)
    monkeypatch.setattr(ExtensionManager, "list_entry_points", lambda self: [broken, good])
    found = {entry.name: entry for entry in discover()}
    assert "failed to import" in found["broken"].probe.reason
    assert found["fine"].probe.available


def test_auto_takes_the_best_that_can_and_keeps_the_reasons_for_the_others() -> None:
    choice = choose("auto", WORKLOAD, SoloBootstrap(), entries(Absent, Picky, Fine))
    assert choice.backend.name == "fine"
    assert choice.rejected == {
        "absent": "libvendor.so not found; fix: install the vendor's toolkit",
        "picky": "topk 2 is above the limit 1",
    }


def test_auto_needs_a_backend_that_all_ranks_have() -> None:
    class Two(Bootstrap):
        rank, world_size = 0, 2

        def all_gather(self, value: Any) -> list[Any]:
            return [value, {**value, "fine": "no driver"}]

    with pytest.raises(BackendUnavailableError, match=r"fine: no driver \(on rank 1\)"):
        choose("auto", WORKLOAD, Two(), entries(Fine))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fien", r"unknown backend 'fien'; installed: absent, picky, fine; did you mean 'fine'\?"),
        ("absent", "libvendor.so not found; fix: install the vendor's toolkit"),
        ("picky", "topk 2 is above the limit 1"),
    ],
)
def test_a_name_that_cannot_be_used_says_why(name: str, says: str) -> None:
    with pytest.raises(BackendUnavailableError, match=says):
        choose(name, WORKLOAD, SoloBootstrap(), entries(Absent, Picky, Fine))


def test_optional_methods_are_concrete_and_name_the_capability() -> None:
    from ubep.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="no one-sided reads") as caught:
        Fabric.get(object(), None, 0, 0, 0)  # type: ignore[arg-type]
    assert caught.value.capability == "get"
