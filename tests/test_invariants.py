"""The promises of the protocol, as properties of whole worlds of virtual ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import cases
from tests.worlds import Case, as_code, build, check, program
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


@settings(max_examples=20)
@given(cases())
def test_a_case_replays_from_the_code_that_a_failure_prints(case: Case) -> None:
    names: dict[str, object] = {}
    exec(as_code(case).replace("check(", "case = ("), names)
    assert names["case"] == case


def test_a_failure_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.worlds.expected", lambda case, rank, round_: torch.ones(1))
    with pytest.raises(AssertionError) as caught:
        check(Case(world_size=3, seed=5))
    assert "check(Case(world_size=3, seed=5))" in "".join(caught.value.__notes__)


def test_the_scheduler_replays_from_its_seed() -> None:
    """The same seed takes the same number of steps; other seeds take others."""

    def steps(seed: int) -> int:
        case = Case(world_size=3, seed=seed)
        world, layers = build(case)
        world.run([program(case, layer) for layer in layers])
        return world.steps

    assert steps(1) == steps(1)
    assert len({steps(seed) for seed in range(8)}) > 4
