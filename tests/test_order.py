"""Send orders: exactly once, far tiers first, one receiver never hit by two senders in a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ubep.protocol.order import SEND_ORDERS, send_steps, transposed
from ubep.topology import Topology

UNEVEN = Topology.from_groups({"node": [0, 0, 0, 1, 1, 1, 1, 1]})
REGULAR = Topology.regular({"die": 2, "node": 3, "pod": 2})


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Up to 12 ranks in up to three tiers, groups of any size."""
    ranks = draw(st.integers(1, 12))
    depth = draw(st.integers(0, 2))
    names = ["die", "node"][:depth]
    ids = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)
    groups = {name: draw(ids) for name in names}
    return Topology.from_groups(groups) if groups else Topology.flat(ranks)


@given(topologies(), st.sampled_from(SEND_ORDERS), st.booleans())
def test_every_order_serves_every_rank_once(topology: Topology, order: str, receive: bool) -> None:
    for rank in range(topology.world_size):
        steps = send_steps(topology, rank, order, receive=receive)
        assert sorted(s for s in steps if s >= 0) == list(range(topology.world_size))


@given(topologies())
def test_tiered_goes_from_far_to_near_and_serves_itself_last(topology: Topology) -> None:
    for rank in range(topology.world_size):
        tiers = [topology.tier(rank, s) for s in send_steps(topology, rank) if s >= 0]
        assert tiers == sorted(tiers, reverse=True)
        assert tiers[-1] == 0


@given(topologies(), st.sets(st.integers(0, 11), max_size=3))
def test_no_receiver_is_hit_by_two_senders_in_a_step(topology: Topology, masked: set[int]) -> None:
    columns = zip(
        *(send_steps(topology, r, masked=frozenset(masked)) for r in range(topology.world_size)),
        strict=True,
    )
    for step in columns:
        targets = [t for t in step if t >= 0]
        assert len(targets) == len(set(targets))
        assert not masked & set(targets)


@pytest.mark.parametrize("topology", [Topology.flat(7), REGULAR], ids=["7 ranks", "2x3x2"])
def test_equal_groups_give_a_latin_square_without_idle_steps(topology: Topology) -> None:
    for rank in range(topology.world_size):
        assert len(send_steps(topology, rank)) == topology.world_size
        assert -1 not in send_steps(topology, rank)


def test_unequal_groups_idle_because_five_senders_do_not_fit_on_three_receivers() -> None:
    # Nodes of 3 and 5: the far tier needs 5 steps; ranks of the large node idle in 2 of them.
    assert send_steps(UNEVEN, 3)[:5].count(-1) == 2
    assert send_steps(UNEVEN, 0)[:5].count(-1) == 0


@given(topologies())
def test_receive_order_mirrors_the_send_order(topology: Topology) -> None:
    """Rank a serves b in the step in which b expects a."""
    for rank in range(topology.world_size):
        for step, target in enumerate(send_steps(topology, rank)):
            if target >= 0:
                assert send_steps(topology, target, receive=True)[step] == rank


def test_near_first_reverses_the_tiers() -> None:
    tiers = [REGULAR.tier(0, peer) for peer in send_steps(REGULAR, 0, "near-first")]
    assert tiers == sorted(tiers)


@given(st.integers(0, 40), st.integers(1, 8))
def test_transposition_is_a_permutation(count: int, workers: int) -> None:
    assert sorted(transposed(count, workers).tolist()) == list(range(count))


def test_transposition_mixes_tiers_evenly() -> None:
    """12 far and 4 near experts over 4 workers: each equal slice of 4 gets 3 far and 1 near."""
    near = torch.arange(16) >= 12
    for part in near[transposed(16, 4)].split(4):
        assert part.sum() == 1
