"""The promises of the protocol, as properties of whole worlds of virtual ranks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import cases
from tests.worlds import Case, check
from ubep.protocol.flags import EPOCHS


@settings(max_examples=200)
@given(cases())
def test_combine_of_dispatch_is_the_dense_answer(case: Case) -> None:
    """Exactly once, after its flag, never overwritten, no deadlock: or a result would be wrong or missing."""
    check(case)


@settings(max_examples=60)
@given(cases(rounds=5), st.sampled_from((1, 3)))
def test_the_wrap_of_epochs_is_invisible(case: Case, before: int) -> None:
    """Words of epochs 1 to 4 are still there when, one wrap later, the same epochs come again."""
    check(replace(case, jump=(2, EPOCHS - before)))
