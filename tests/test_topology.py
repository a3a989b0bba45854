"""Topologies: distances, uneven groups, where they come from."""

from __future__ import annotations

import pytest

from ubep.bootstrap import Bootstrap, SoloBootstrap
from ubep.errors import ConfigError
from ubep.topology import Topology


class FakeBootstrap(Bootstrap):
    """Stands for ranks whose host names are given."""

    def __init__(self, hosts: list[str]) -> None:
        self.hosts = hosts
        self.rank, self.world_size = 0, len(hosts)

    def all_gather(self, value):  # type: ignore[no-untyped-def]
        return self.hosts


def test_tier_counts_the_groups_that_two_ranks_do_not_share() -> None:
    topology = Topology.regular({"die": 2, "node": 2, "pod": 2})
    assert [topology.tier(0, dst) for dst in range(8)] == [0, 1, 2, 2, 3, 3, 3, 3]
    assert topology.tier_names == ("self", "die", "node", "pod")


def test_tier_is_symmetric_in_uneven_groups() -> None:
    topology = Topology.from_groups({"die": [0, 0, 1, 2, 2], "node": [0, 0, 0, 1, 1]})
    table = [[topology.tier(a, b) for b in range(5)] for a in range(5)]
    assert table == [list(row) for row in zip(*table, strict=True)]
    assert table[0] == [0, 1, 2, 3, 3]


def test_a_group_id_may_be_reused_in_another_enclosing_group() -> None:
    topology = Topology.from_groups({"die": [0, 0, 0, 0], "node": [0, 0, 1, 1]})
    assert topology.tier(0, 1) == 1
    assert topology.tier(0, 2) == 3


def test_digits_tell_the_tier() -> None:
    topology = Topology.from_groups({"die": [0, 0, 1, 2, 2], "node": [0, 0, 0, 1, 1]})
    for a in range(5):
        for b in range(5):
            differing = [
                i
                for i, (x, y) in enumerate(zip(topology.digits[a], topology.digits[b], strict=True))
                if x != y
            ]
            assert topology.tier(a, b) == (max(differing) + 1 if differing else 0)


def test_host_names_become_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    topology = Topology.detect(FakeBootstrap(["a", "a", "b", "a", "b"]))
    assert topology.tiers == ("node", "pod")
    assert topology.tier(0, 3) == 1
    assert topology.tier(0, 2) == 2


def test_one_host_is_flat() -> None:
    assert Topology.detect(SoloBootstrap()).tiers == ("node",)


def test_torchrun_group_rank_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "7")
    seen: list[str] = []

    class Recording(FakeBootstrap):
        def all_gather(self, value):  # type: ignore[no-untyped-def]
            seen.append(value)
            return self.hosts

    assert Topology.detect(Recording(["7", "8"])).tier(0, 1) == 2
    assert seen == ["7"]


@pytest.mark.parametrize(
    ("table", "ranks", "says"),
    [
        ({"shape": {"node": 2, "pod": 2}}, 8, "4 ranks, world size is 8"),
        ({"groups": {"node": [0, 0, 1]}}, 2, "3 ranks, world size is 2"),
        ({"groups": {"die": [0, 1], "node": [0, 0, 1]}}, 2, "'die': 2, 'node': 3"),
        ({"groups": {"self": [0, 1]}}, 2, "'self'"),
    ],
)
def test_wrong_tables_are_refused_with_both_numbers(table: dict, ranks: int, says: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=says):
        Topology.from_config(table, ranks)
