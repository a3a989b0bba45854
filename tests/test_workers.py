"""Roles and equal slices."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ubep.protocol.workers import slice_cuts, slice_edges, split_roles

counts = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(counts, st.integers(1, 7))
def test_slices_cover_everything_once_and_differ_by_at_most_one(items: list[int], workers: int) -> None:
    sizes = slice_edges(sum(items), workers).diff()
    assert int(sizes.sum()) == sum(items)
    assert int(sizes.max() - sizes.min()) <= 1


@given(counts, st.integers(1, 7))
def test_cuts_agree_with_laying_the_records_out_one_by_one(items: list[int], workers: int) -> None:
    owner = [item for item, count in enumerate(items) for _ in range(count)]
    for edge, cut in zip(
        slice_edges(len(owner), workers), slice_cuts(torch.tensor(items), workers), strict=True
    ):
        before = owner[: int(edge)]
        assert cut.tolist() == [before.count(item) for item in range(len(items))]


@given(st.integers(2, 64), st.integers(1, 512), st.integers(1, 8192))
def test_every_role_has_a_worker(workers: int, experts: int, pairs: int) -> None:
    counting, sending = split_roles(workers, experts, pairs)
    assert counting >= 1
    assert sending >= 1
    assert counting + sending == workers


def test_more_experts_shift_workers_to_counting_and_more_tokens_to_sending() -> None:
    few, many = split_roles(48, 64, 1024)[0], split_roles(48, 4096, 1024)[0]
    assert few < many
    assert split_roles(48, 4096, 65536)[0] < many


def test_a_single_worker_does_both() -> None:
    assert split_roles(1, 256, 1024) == (1, 1)
