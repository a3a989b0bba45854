"""Plans: automatic choices with reasons, identity, differences by field and rank."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import cases
from tests.worlds import Case, build
from ubep.capabilities import Capabilities
from ubep.errors import PlanMismatchError
from ubep.protocol.plan import Plan, RankPlan, check_equal
from ubep.protocol.planner import PlanOptions, expected_distinct_ranks, make_plan
from ubep.topology import Topology
from ubep.workload import ExpertMap, Workload

WORKLOAD = Workload(num_experts=64, hidden=256, topk=8, max_tokens=32)
HOST = Capabilities(placements=("direct", "staged"), get=True, max_workers=48)


@given(cases())
def test_json_and_back_is_the_same_plan(case: Case) -> None:
    plan = build(case)[1][0].plan
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest


def test_any_change_changes_the_digest() -> None:
    plan = make_plan(WORKLOAD, Topology.flat(4))
    for change in ({"order": "rank"}, {"lanes": 2}, {"checked": False}, {"chunk_records": (1, 1)}):
        assert replace(plan, **change).digest != plan.digest


def test_a_difference_names_field_values_and_ranks() -> None:
    plans = [make_plan(replace(WORKLOAD, hidden=h), Topology.flat(3)).as_dict() for h in (256, 512, 256)]
    with pytest.raises(
        PlanMismatchError, match=r"workload.hidden: 256 on ranks \[0, 2\]; 512 on ranks \[1\]"
    ):
        check_equal(plans)


@pytest.mark.parametrize(
    ("topology", "deduplicate", "reason"),
    [
        (Topology.flat(2), True, "25% as many ranks"),
        (Topology.flat(8), False, "66% as many ranks"),
        (Topology.regular({"node": 4, "pod": 2}), True, "links between groups are slower"),
    ],
)
def test_deduplication_is_chosen_by_expected_distinct_ranks(
    topology: Topology, deduplicate: bool, reason: str
) -> None:
    plan = make_plan(WORKLOAD, topology)
    assert plan.deduplicate is deduplicate
    assert reason in plan.decisions["deduplicate"]


def test_expected_distinct_ranks() -> None:
    # Measured and published for top-8: 2.0 of 2, 3.6 of 4, 5.25 of 8 ranks.
    assert [round(expected_distinct_ranks(r, 8), 2) for r in (2, 4, 8)] == [1.99, 3.6, 5.25]


def test_placement_and_transfer_follow_the_capabilities() -> None:
    assert make_plan(WORKLOAD, Topology.flat(2), HOST).transfer == "pull"
    assert make_plan(WORKLOAD, Topology.flat(2), replace(HOST, get=False)).transfer == "push"
    assert make_plan(WORKLOAD, Topology.flat(2)).placement == "staged"


def test_an_option_that_was_asked_for_says_so() -> None:
    plan = make_plan(WORKLOAD, Topology.flat(2), HOST, PlanOptions(placement="staged", deduplicate=False))
    assert plan.decisions["placement"] == "staged: asked for"
    assert plan.decisions["deduplicate"] == "False: asked for"


def test_the_window_is_known_before_the_first_call_and_holds_what_is_promised() -> None:
    plan = make_plan(WORKLOAD, Topology.flat(4), options=PlanOptions(deduplicate=False, lanes=2))
    # 4 sources x 32 tokens x top-8 records of 256 bf16 and 16 bytes of metadata, 2 parities, 2 lanes.
    payload = 4 * 32 * 8 * (512 + 16) * 2 * 2
    assert payload <= plan.window_bytes <= payload * 1.01


@given(cases(), st.integers(0, 3))
def test_the_regions_of_a_window_do_not_overlap(case: Case, source: int) -> None:
    layout = build(case)[1][0].plan.layout
    source %= case.world_size
    marks = [
        (layout.flag(0, source, 0), 8 * layout.flags_per_source),
        (layout.header(0, source), layout.header_bytes),
        (layout.slot(0, source), layout.slot_bytes),
        (layout.rows(0), layout.row_bytes),
        (layout.lists(0), layout.list_bytes),
        (layout.flag(1, 0, 0), 0),
    ]
    for (begin, size), (following, _) in itertools.pairwise(marks):
        assert begin + size <= following
    assert layout.flag(0, 1, 0) - layout.flag(0, 0, 0) >= layout.flag_stride


def test_workers_take_even_mixes_of_tiers() -> None:
    """Two nodes of 4 ranks, 4 workers of which 3 send: neighbours in the item order differ in tier."""
    topology = Topology.regular({"node": 4, "pod": 2})
    plan = make_plan(WORKLOAD, topology, HOST, PlanOptions(placement="staged", deduplicate=False, workers=4))
    assert plan.roles == (1, 3)
    items = RankPlan(plan, 0).items.tolist()
    far = [topology.tier(0, plan.experts.rank_of[e]) == 2 for e in items]
    for start in range(0, 63, 3):
        assert 1 <= sum(far[start : start + 3]) <= 2


def test_experts_that_do_not_divide_go_to_the_first_ranks() -> None:
    assert ExpertMap.contiguous(10, 4).rank_of == (0, 0, 0, 1, 1, 1, 2, 2, 3, 3)
    assert ExpertMap.contiguous(2, 3).rank_of == (0, 1)


def test_local_indices_follow_an_explicit_map() -> None:
    experts = ExpertMap((1, 0, 1, 1))
    assert experts.local_index.tolist() == [0, 0, 1, 2]
    assert experts.experts_of(1) == [0, 2, 3]
