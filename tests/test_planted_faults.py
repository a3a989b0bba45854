"""The suite can fail: every planted fault is noticed by the check that is there for it."""

from __future__ import annotations

import pytest

from tests.faults import FAULTS, Fault
from ubep.errors import UbepError


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    with pytest.raises((AssertionError, UbepError)):  # a wrong row, or ranks that stop or disagree
        fault.check()
