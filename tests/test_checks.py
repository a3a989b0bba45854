"""The checks that planted faults must trip over hold for the code as it is."""

from __future__ import annotations

import pytest

from tests import checks
from tests.faults import SURVEYS


@pytest.mark.parametrize(
    "check",
    [
        checks.offsets_are_64_bit,
        checks.sum_is_float32,
        checks.sum_is_in_ascending_k,
        checks.deduplicated_sum_has_two_levels,
        checks.gaps_are_zero,
        checks.any_payload_passes,
        checks.stale_handles_are_refused,
        checks.unsound_modes_are_refused,
        checks.refusals_reach_every_rank,
    ],
    ids=lambda check: check.__name__,
)
def test_check(check) -> None:  # type: ignore[no-untyped-def]
    check()


@pytest.mark.parametrize("name", SURVEYS)
def test_core_property_under_many_schedules(name: str) -> None:
    SURVEYS[name]()
