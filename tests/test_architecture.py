"""Arrows point down: the core imports no backend, a backend imports only the plugin surface."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module or ""


def offenders(folder: str, package: str, allowed: set[str]) -> list[str]:
    """Imports of a package (or its modules) in a folder's files, but for the allowed ones."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, module in imported(path)
        if module.split(".")[0] == package and module not in allowed
    ]


def test_the_core_imports_no_backend() -> None:
    assert offenders("ubep", "ubep_backends", set()) == []


def test_backends_import_only_the_plugin_surface() -> None:
    assert offenders("backends", "ubep", {"ubep.backend"}) == []


@pytest.mark.parametrize(
    "line",
    ["import ubep_backends.shm", "from ubep_backends.shm import x", "def f():\n    import ubep_backends"],
)
def test_an_offender_would_be_found(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ubep").mkdir()
    (tmp_path / "ubep" / "bad.py").write_text(line)
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert len(offenders("ubep", "ubep_backends", set())) == 1
