"""Bad input: refused before any row moves, on every rank alike, with both values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ubep
from tests.ranks import FORMS, outcome, run_ranks
from ubep.capabilities import Capabilities
from ubep.errors import CapacityError, InvalidInputError, UnsupportedError
from ubep.protocol.planner import PlanOptions, make_plan
from ubep.topology import Topology
from ubep.workload import ExpertMap, Workload

SIZES = {"num_experts": 4, "hidden": 8, "topk": 2, "max_tokens": 4, "dtype": torch.float32}
Call = tuple[Any, Any, Any]


def good() -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(2, 8), torch.tensor([[0, 3], [1, 2]]), torch.full((2, 2), 0.5)


BAD: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Call], str]] = {
    "too many tokens": (
        lambda x, i, w: (x.repeat(3, 1), i.repeat(3, 1), w.repeat(3, 1)),
        "6 tokens, max_tokens is 4",
    ),
    "wrong hidden": (lambda x, i, w: (x[:, :5], i, w), r"x is \[2, 5\], must be \[rows, 8\]"),
    "wrong dtype": (lambda x, i, w: (x.half(), i, w), "torch.float16, this layer was made for torch.float32"),
    "not a matrix": (lambda x, i, w: (x[0], i, w), r"x is \[8\], must be"),
    "id too large": (lambda x, i, w: (x, i + 2, w), "holds expert 5, allowed are -1 .none. to 3"),
    "id too small": (lambda x, i, w: (x, i - 2, w), "holds expert -2"),
    "wrong top-k": (
        lambda x, i, w: (x, i[:, :1], w),
        r"topk_idx is \[2, 1\], must be \[tokens, topk\] = \[2, 2\]",
    ),
    "float ids": (lambda x, i, w: (x, i.float(), w), "float32, must be torch.int64 or torch.int32"),
    "half weights": (lambda x, i, w: (x, i, w.half()), "torch.float16"),
    "NaN weight": (lambda x, i, w: (x, i, w * float("nan")), r"topk_weights\[0, 0\] is nan, must be finite"),
}


def one_bad_rank(comm: ubep.Communicator, name: str) -> tuple[tuple[str, str], float]:
    layer = comm.expert_parallel(**SIZES)
    call: Call = BAD[name][0](*good()) if comm.rank == 1 else good()
    said = outcome(lambda: layer.dispatch(*call))
    received = layer.dispatch(*good())
    return said, layer.combine(received.x, received.handle)[0, 0].item()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BAD)
def test_bad_dispatch_on_one_rank_is_refused_on_all_and_the_layer_goes_on(form: str, name: str) -> None:
    for rank, ((kind, text), out) in enumerate(run_ranks(form, 3, one_bad_rank, name)):
        assert kind == ("InvalidInputError" if rank == 1 else "PeerRefusedError")
        assert re.search(BAD[name][1], text), text
        assert rank == 1 or "rank 1" in text
        assert out == 1.0


def bad_combine(comm: ubep.Communicator, checked: bool) -> tuple[tuple[str, str], float]:
    layer = comm.expert_parallel(**SIZES)
    received = layer.dispatch(*good())
    y = received.x[:-1] if comm.rank == 0 else received.x
    said = outcome(lambda: layer.combine(y, received.handle))
    return said, layer.combine(received.x, received.handle)[0, 0].item()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("placement", ["staged", "direct"])
def test_bad_combine_is_refused_on_all_and_may_be_repeated(form: str, checked: bool, placement: str) -> None:
    results = run_ranks(form, 2, bad_combine, checked, checked=checked, placement=placement)
    assert results[0][0][0] == "InvalidInputError"
    assert "y has 3 rows, the dispatch of this handle delivered 4" in results[0][0][1]
    assert results[1][0][0] == "PeerRefusedError"
    assert [out for _, out in results] == [1.0, 1.0]


def mixed_up(comm: ubep.Communicator) -> list[tuple[str, str]]:
    layer = comm.expert_parallel(**SIZES)
    first, second = layer.dispatch(*good()), layer.dispatch(*good())
    mine = (first, second)[comm.rank]
    said = [outcome(lambda: layer.combine(mine.x, mine.handle))]
    if comm.rank == 0:
        said.append(outcome(lambda: layer.dispatch(*good())))
    else:
        said.append(outcome(lambda: layer.combine(first.x, first.handle)))
    return said


@pytest.mark.parametrize("form", FORMS)
def test_ranks_that_mix_up_handles_or_calls_are_told(form: str) -> None:
    """The commonest silent corruption: ranks combine different dispatches, or call in different orders."""
    for handles, calls in run_ranks(form, 2, mixed_up):
        assert handles[0] == "PlanMismatchError"
        assert "rank 0: combine of the dispatch of epoch 1" in handles[1]
        assert "rank 1: combine of the dispatch of epoch 2" in handles[1]
        assert calls[0] == "PlanMismatchError"
        assert "rank 0: dispatch; rank 1: combine of the dispatch of epoch 1" in calls[1]


def different_maximum(comm: ubep.Communicator) -> tuple[str, str]:
    return outcome(lambda: comm.expert_parallel(**{**SIZES, "max_tokens": 4 + comm.rank // 2}))


@pytest.mark.parametrize("form", FORMS)
def test_a_maximum_that_differs_by_rank_is_refused_with_field_values_and_ranks(form: str) -> None:
    for kind, text in run_ranks(form, 3, different_maximum):
        assert kind == "PlanMismatchError"
        assert "workload.max_tokens: 4 on ranks [0, 1]; 5 on ranks [2]" in text


def different_settings(comm: ubep.Communicator) -> tuple[str, str]:
    comm.config = comm.config.model_copy(update={"checked": comm.rank == 0})
    return outcome(lambda: comm.expert_parallel(**SIZES))


def test_settings_that_differ_by_rank_are_refused() -> None:
    for kind, text in run_ranks("virtual", 2, different_settings):
        assert kind == "PlanMismatchError"
        assert "config.checked: True on ranks [0]; False on ranks [1]" in text


def refused_sizes(comm: ubep.Communicator) -> tuple[str, str]:
    changes = {"hidden": 0} if comm.rank == 1 else {}
    return outcome(lambda: comm.expert_parallel(**{**SIZES, **changes}))


def test_sizes_that_one_rank_gets_wrong_are_refused_on_all() -> None:
    results = run_ranks("virtual", 2, refused_sizes)
    assert results[1] == ("InvalidInputError", "hidden must be at least 1, got 0")
    assert results[0] == ("UbepError", "rank 1 refused: InvalidInputError: hidden must be at least 1, got 0")


def too_large(comm: ubep.Communicator) -> tuple[str, str]:
    size = 2**22 if comm.world_size == 2 else 1
    return outcome(lambda: comm.expert_parallel(**{**SIZES, "max_tokens": size, "hidden": 2**16}))


def test_a_window_that_does_not_fit_is_refused_with_needed_and_available_bytes() -> None:
    for kind, text in run_ranks("reference", 2, too_large):
        assert kind == "CapacityError"
        # 2 ranks x 2^22 tokens x (2^16 float32 + 32 bytes of metadata) and more, in two parities.
        needed, available = (int(word) for word in text.split() if word.isdigit())
        assert needed > 2 * 2 * 2**22 * 2**18
        assert 0 < available < needed


@pytest.mark.parametrize(
    ("declared", "workload", "capability", "text"),
    [
        (
            Capabilities(max_hidden=4096),
            Workload(8, 7168, 2, 4),
            "max_hidden",
            "hidden 7168 is above the limit 4096",
        ),
        (Capabilities(max_topk=8), Workload(16, 64, 9, 4), "max_topk", "topk 9 is above the limit 8"),
        (Capabilities(max_ranks=1), Workload(8, 64, 2, 4), "max_ranks", "ranks 2 is above the limit 1"),
        (
            Capabilities(hidden_multiple=128),
            Workload(8, 200, 2, 4),
            "hidden_multiple",
            "200 is not a multiple of 128",
        ),
        (
            Capabilities(dtypes=("bfloat16",)),
            Workload(8, 64, 2, 4, "float32"),
            "dtypes",
            "float32 is not one of bfloat16",
        ),
        (
            Capabilities(quantise=("none",)),
            Workload(8, 64, 2, 4, quantise="fp8"),
            "quantise",
            "fp8 is not one of none",
        ),
        (Capabilities(combine=("sum",)), Workload(8, 64, 2, 4), "combine", "weighted is not one of sum"),
        (
            Capabilities(receive_layouts=("token-rank",)),
            Workload(8, 64, 2, 4),
            "receive_layouts",
            "token-expert is not one of token-rank",
        ),
    ],
)
def test_limits_are_capabilities_and_named_with_both_values(
    declared: Capabilities, workload: Workload, capability: str, text: str
) -> None:
    with pytest.raises(UnsupportedError, match=text) as caught:
        make_plan(workload, Topology.flat(2), declared)
    assert caught.value.capability == capability


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (PlanOptions(placement="direct"), "placement direct is not one of staged"),
        (PlanOptions(workers=4), "workers 4 is above the limit 1"),
        (PlanOptions(chunk_records={"rack": 4}), "'rack'; the tiers are self, node"),
        (PlanOptions(chunk_records={"node": 0}), "node = 0"),
    ],
)
def test_options_that_cannot_be_carried_out_are_refused(options: PlanOptions, text: str) -> None:
    with pytest.raises(ubep.UbepError, match=text):
        make_plan(Workload(8, 64, 2, 4), Topology.flat(2), Capabilities(), options)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"expert_capacity": 0}, "expert_capacity must be at least 1, got 0"),
        ({"dtype": "float64"}, "float64 is not one of bfloat16, float16, float32"),
        ({"overflow": "clip"}, "refuse, drop, got 'clip'"),
        ({"experts": ExpertMap((0, 0))}, "places 2 experts, num_experts is 4"),
    ],
)
def test_workloads_are_validated_when_they_are_made(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        Workload(**{"num_experts": 4, "hidden": 8, "topk": 2, "max_tokens": 4, **change})


def test_an_expert_on_a_rank_that_does_not_exist_is_refused() -> None:
    workload = Workload(2, 8, 1, 4, experts=ExpertMap((0, 5)))
    with pytest.raises(ubep.UbepError, match="rank 5, world size is 2"):
        make_plan(workload, Topology.flat(2))


def test_every_error_is_a_ubep_error() -> None:
    import ubep.errors

    kinds = [kind for kind in vars(ubep.errors).values() if isinstance(kind, type)]
    assert CapacityError in kinds
    assert all(issubclass(kind, ubep.UbepError) for kind in kinds)
