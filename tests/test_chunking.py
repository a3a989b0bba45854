"""Chunk sizes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ubep.protocol.chunking import Link, chunk_records, optimal_chunk_bytes

links = st.builds(Link, st.floats(0.1, 20), st.floats(0.1, 900))


def pipeline_time(chunk: float, message: float, link: Link, stages: int = 3) -> float:
    """T(c) of the docstring, in microseconds."""
    return (message / chunk + stages - 1) * (link.latency_us + chunk / (link.bandwidth_gbps * 1e3))


@given(st.floats(1e3, 1e8), links, st.floats(0.3, 3))
def test_the_optimum_is_no_slower_than_any_other_size(message: float, link: Link, factor: float) -> None:
    best = optimal_chunk_bytes(message, link)
    other = pipeline_time(best * factor, message, link)
    assert pipeline_time(best, message, link) <= other * (1 + 1e-9)


def test_a_worked_example() -> None:
    # 1 MB, 2 us, 50 GB/s, 3 stages: sqrt(1e6 * 2 us * 50e3 B/us / 2)
    assert math.isclose(optimal_chunk_bytes(1e6, Link(2.0, 50.0)), math.sqrt(1e6 * 1e5 / 2))


def test_records_stay_between_one_and_the_maximum() -> None:
    assert chunk_records(0.01, 7168, 64, Link(0.1, 1)) == 1
    assert chunk_records(1e9, 16, 64, Link(20, 900)) == 64
