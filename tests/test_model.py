"""The model of the flag protocol (docs/model/flags.pml): spin proves it, and refutes each mutation of it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[1] / "docs" / "model" / "flags.pml"
MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {' and '.join(MISSING)} (apt-get install spin gcc)"
)

WRONG_ROW = "assertion violated"
DEADLOCK = "invalid end state"

PROVED = {
    "2 ranks, 9 operations": "R=2 OPS=9",
    "2 ranks, 8 operations, rows or none": "R=2 OPS=8 EMPTY",
    "2 ranks, 8 operations, self too": "R=2 OPS=8 SELF",
    "2 ranks, 8 operations, counts first": "R=2 OPS=8 CHECKED",
    "2 ranks, endless, rows or none": "R=2 OPS=9 ENDLESS EMPTY",
    "3 ranks, 8 operations": "R=3 OPS=8",
    "3 ranks, endless": "R=3 OPS=5 ENDLESS",
    "wrap to 0, every word written": "R=2 OPS=8 WRAP_TO_ZERO",
    "no rows, no flag: before the wrap": "R=2 OPS=5 CHECKED ROWS_FLAG_ON_DEMAND",
    "no rows, no flag: cleared around the wrap": "R=2 OPS=9 CHECKED ROWS_FLAG_ON_DEMAND CLEAR_AT_WRAP",
}

REFUTED = {
    "one parity: wrong row": ("ONE_PARITY", "-E", WRONG_ROW),
    "one parity: deadlock": ("ONE_PARITY", "-A", DEADLOCK),
    "flag before data": ("FLAG_BEFORE_DATA", "-E", WRONG_ROW),
    "no epoch": ("NO_EPOCH", "-E", WRONG_ROW),
    "greater or equal": ("GREATER_EQUAL", "-E", WRONG_ROW),
    "no flag when empty": ("NO_FLAG_WHEN_EMPTY", "", DEADLOCK),
    "rows flag on demand": ("CHECKED ROWS_FLAG_ON_DEMAND", "-E", WRONG_ROW),
    "flag before the reads": ("LATE_READ", "-E", WRONG_ROW),
    "wrap to 1": ("WRAP_TO_ONE", "-E", WRONG_ROW),
    "start at 0": ("START_AT_ZERO", "-E", WRONG_ROW),
    "one epoch per parity": ("MAX=3", "-E", WRONG_ROW),
}


def search(folder: Path, defines: str, build: str = "-DSAFETY", options: str = "") -> str:
    """Explore the model with these macros; what pan printed. -E ignores deadlocks, -A assertions."""
    steps = (
        ["spin", *(f"-D{name}" for name in defines.split()), "-a", str(MODEL)],
        ["gcc", "-O1", "-w", build, "-DNOFAIR", "-DMEMLIM=2000", "-o", "pan", "pan.c"],
        ["./pan", "-m2000000", "-w22", *options.split()],
    )
    for step in steps:
        done = subprocess.run(step, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, f"{' '.join(step)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def errors(report: str) -> int:
    found = re.search(r"errors: (\d+)", report)
    assert found, report
    return int(found[1])


def assert_proved(report: str) -> None:
    assert errors(report) == 0, report
    for sign in ("Search not completed", "max search depth too small", "out of memory", "MEMLIM bound"):
        assert sign not in report, report
    assert "unreached in proctype Rank" in report, report  # printed at the end of a search


@pytest.mark.parametrize("defines", PROVED.values(), ids=PROVED.keys())
def test_no_wrong_row_and_no_deadlock(tmp_path: Path, defines: str) -> None:
    assert_proved(search(tmp_path, defines))


def test_operations_go_on_for_ever(tmp_path: Path) -> None:
    assert_proved(search(tmp_path, "R=2 OPS=9 ENDLESS", build="-DNP", options="-l"))


@pytest.mark.parametrize(("defines", "options", "finding"), REFUTED.values(), ids=REFUTED.keys())
def test_mutation_is_refuted(tmp_path: Path, defines: str, options: str, finding: str) -> None:
    report = search(tmp_path, defines, options=options)
    assert errors(report) >= 1, report
    assert finding in report.splitlines()[0], report
