"""What a user of a layer relies on, on both forms of the reference backend.

Names tell behaviours; many are failures that users of other libraries have met.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ubep
from tests.ranks import FORMS, affine_dense, affine_experts, outcome, routing, run_ranks
from ubep.protocol.quantise import dequantise, quantise

SIZES = {"num_experts": 8, "hidden": 16, "topk": 2, "max_tokens": 8, "dtype": torch.float32}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def round_trip(comm: ubep.Communicator, tokens: list[int], sizes: dict[str, Any], **call: Any) -> float:
    """Largest error of dispatch, affine experts and combine against the dense answer."""
    layer = comm.expert_parallel(**sizes)
    count = tokens[comm.rank]
    x = torch.randn(count, sizes["hidden"]).to(sizes["dtype"])
    idx, weights = routing(comm.rank, count, sizes["num_experts"], sizes["topk"])
    received = layer.dispatch(x, idx, weights, **call)
    out = layer.combine(affine_experts(received, layer.local_experts), received.handle)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    return float((out - affine_dense(x, idx, weights)).abs().max()) if count else 0.0


# ---- zero, one, uneven


@pytest.mark.parametrize(
    "tokens",
    [[0, 0, 0], [0, 5, 0], [1, 0, 8], [8, 8, 8], [2, 3, 1]],
    ids=["nobody", "one rank only", "0, 1, max", "all at the maximum", "ragged"],
)
def test_empty_and_ragged_ranks_are_ordinary(form: str, tokens: list[int]) -> None:
    assert max(run_ranks(form, 3, round_trip, tokens, SIZES)) < 1e-5


def test_a_world_of_one_rank_gives_the_dense_answer(form: str) -> None:
    assert run_ranks(form, 1, round_trip, [7], SIZES)[0] < 1e-5


def test_one_rank_needs_no_process_group() -> None:
    config = ubep.Config(backend="reference")
    with ubep.Communicator(config=config) as comm:
        assert round_trip(comm, [5], SIZES) < 1e-5


@pytest.mark.parametrize("chunk", [1, 2, 3], ids="chunk {}".format)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_sizes_around_the_chunk_behave_alike(chunk: int, tokens: int) -> None:
    assert max(run_ranks("virtual", 2, round_trip, [tokens] * 2, SIZES, chunk_records=chunk)) < 1e-5


def receive_nothing(comm: ubep.Communicator) -> tuple[Any, ...]:
    layer = comm.expert_parallel(**SIZES)
    idx = torch.zeros(4, 2, dtype=torch.int64)  # expert 0, on rank 0
    received = layer.dispatch(torch.ones(4, 16), idx, torch.ones(4, 2))
    out = layer.combine(received.x, received.handle)
    return tuple(received.x.shape), received.x.dtype, received.expert_counts.tolist(), out[0, 0].item()


def test_a_rank_that_receives_nothing_gets_empty_tensors_of_the_right_kind(form: str) -> None:
    first, second = run_ranks(form, 2, receive_nothing)
    assert second == ((0, 16), torch.float32, [0, 0, 0, 0], 2.0)
    # All tokens of both ranks to one expert, twice each: duplicates of an expert count twice.
    assert first == ((16, 16), torch.float32, [16, 0, 0, 0], 2.0)


def fewer_experts_than_ranks(comm: ubep.Communicator) -> tuple[int, float]:
    layer = comm.expert_parallel(**{**SIZES, "num_experts": 2})
    idx = torch.tensor([[0, 1]])
    received = layer.dispatch(torch.ones(1, 16), idx, torch.ones(1, 2))
    return layer.num_local_experts, layer.combine(received.x, received.handle)[0, 0].item()


def test_ranks_without_experts_take_part(form: str) -> None:
    assert run_ranks(form, 3, fewer_experts_than_ranks) == [(1, 2.0), (1, 2.0), (0, 2.0)]


def test_experts_that_do_not_divide_by_ranks(form: str) -> None:
    assert max(run_ranks(form, 3, round_trip, [4, 4, 4], {**SIZES, "num_experts": 10})) < 1e-5


# ---- ids


def masked_ids(comm: ubep.Communicator) -> list[list[float]]:
    layer = comm.expert_parallel(**SIZES)
    x = torch.arange(1.0, 4.0)[:, None].expand(3, 16).contiguous()
    idx = torch.tensor([[-1, -1], [3, -1], [0, 7]])
    received = layer.dispatch(x, idx, torch.full((3, 2), 0.5))
    return layer.combine(received.x, received.handle)[:, :1].tolist()


def test_minus_one_contributes_nothing_and_is_not_counted(form: str) -> None:
    assert run_ranks(form, 2, masked_ids) == [[[0.0], [1.0], [3.0]]] * 2


def padded(comm: ubep.Communicator) -> tuple[int, list[float]]:
    layer = comm.expert_parallel(**SIZES)
    idx = torch.tensor([[0, 1], [2, 3], [99, -7]])  # row 1 is padding that looks valid, row 2 garbage
    weights = torch.tensor([[1.0, 1.0], [1.0, 1.0], [float("nan"), 1.0]])
    received = layer.dispatch(torch.ones(3, 16), idx, weights, num_valid=1)
    return len(received.x), layer.combine(received.x, received.handle)[:, 0].tolist()


def test_rows_beyond_num_valid_are_ignored(form: str) -> None:
    results = run_ranks(form, 2, padded)
    assert sum(rows for rows, _ in results) == 4
    assert all(out == [2.0, 0.0, 0.0] for _, out in results)


def int32_ids(comm: ubep.Communicator) -> float:
    layer = comm.expert_parallel(**SIZES)
    idx, weights = routing(comm.rank, 4, 8, 2)
    x = torch.randn(4, 16)
    received = layer.dispatch(x, idx.to(torch.int32), weights)
    out = layer.combine(affine_experts(received, layer.local_experts), received.handle)
    return float((out - affine_dense(x, idx, weights)).abs().max())


def test_ids_may_be_int32() -> None:
    assert max(run_ranks("virtual", 2, int32_ids)) < 1e-5


def redundant(comm: ubep.Communicator) -> tuple[list[int], float]:
    # Logical expert 0 has copies on both ranks; physical ids 0..4.
    experts = ubep.ExpertMap(rank_of=(0, 0, 0, 1, 1), logical=(0, 1, 2, 0, 3))
    layer = comm.expert_parallel(**{**SIZES, "num_experts": 5, "topk": 1}, experts=experts)
    physical = experts.to_physical(torch.zeros(6, 1, dtype=torch.int64))
    received = layer.dispatch(torch.ones(6, 16), physical)
    return received.expert_counts.tolist(), layer.combine(received.x, received.handle).sum().item()


def test_redundant_experts_share_the_tokens_of_a_hot_one(form: str) -> None:
    # 6 tokens of each of 2 ranks alternate between the copies: 6 each.
    assert run_ranks(form, 2, redundant) == [([6, 0, 0], 96.0), ([6, 0], 96.0)]


# ---- what is received


def layout(comm: ubep.Communicator, layout: str, alignment: int) -> dict[str, Any]:
    layer = comm.expert_parallel(
        **{**SIZES, "num_experts": 4}, receive_layout=layout, expert_alignment=alignment
    )
    idx = torch.tensor([[0, 1], [1, 2]]) if comm.rank == 0 else torch.tensor([[1, 0]])
    x = 10.0 * comm.rank + torch.arange(len(idx))[:, None].expand(-1, 16) + 1
    received = layer.dispatch(x.contiguous(), idx, torch.arange(1.0, 1 + idx.numel()).view(-1, 2))
    return {
        "x": received.x[:, 0].tolist(),
        "weights": received.weights.tolist(),
        "counts": received.expert_counts.tolist(),
        "offsets": received.expert_offsets.tolist(),
        "source": list(zip(received.source_rank.tolist(), received.source_token.tolist(), strict=True)),
        "topk_idx": received.topk_idx.tolist() if layout == "token-rank" else None,
    }


def test_token_expert_rows_lie_by_expert_then_source_then_token(form: str) -> None:
    first = run_ranks(form, 2, layout, "token-expert", 1)[0]
    assert first["x"] == [1, 11, 1, 2, 11]  # expert 0: (0, 0), (1, 0); expert 1: (0, 0), (0, 1), (1, 0)
    assert first["weights"] == [1, 2, 2, 3, 1]
    assert first["counts"] == [2, 3]
    assert first["offsets"] == [0, 2, 5]
    assert first["source"] == [(0, 0), (1, 0), (0, 0), (0, 1), (1, 0)]


def test_aligned_experts_start_at_multiples_and_gaps_are_zero_rows(form: str) -> None:
    first = run_ranks(form, 2, layout, "token-expert", 4)[0]
    assert first["x"] == [1, 11, 0, 0, 1, 2, 11, 0]
    assert first["counts"] == [2, 3]
    assert first["offsets"] == [0, 4, 8]
    assert first["source"][2] == (-1, -1)
    assert first["weights"][2] == 0


def test_token_rank_rows_come_once_with_local_ids(form: str) -> None:
    first, second = run_ranks(form, 2, layout, "token-rank", 1)
    assert first["x"] == [1, 2, 11]
    assert first["topk_idx"] == [[0, 1], [1, -1], [1, 0]]
    assert first["weights"] == [[1, 2], [3, 0], [1, 2]]
    assert first["counts"] == [2, 3]
    assert second["topk_idx"] == [[-1, 0]]
    assert second["weights"] == [[0, 4]]


def weighted_token_rank(comm: ubep.Communicator) -> list[float]:
    layer = comm.expert_parallel(**{**SIZES, "num_experts": 4}, receive_layout="token-rank")
    received = layer.dispatch(torch.ones(1, 16), torch.tensor([[0, 3]]), torch.tensor([[0.25, 0.5]]))
    y = received.x * (comm.rank + 1)
    return layer.combine(y, received.handle)[0, :1].tolist()


def test_token_rank_weighted_multiplies_by_the_weights_on_that_rank(form: str) -> None:
    # Rank 0 returns 1 x, rank 1 returns 2 x: 0.25 * 1 + 0.5 * 2.
    assert run_ranks(form, 2, weighted_token_rank) == [[1.25]] * 2


def returned_weights(comm: ubep.Communicator, layout: str, deduplicate: bool) -> bool:
    layer = comm.expert_parallel(**SIZES, receive_layout=layout)
    idx, weights = routing(comm.rank, 5, 8, 2)
    idx[0, 0] = -1
    received = layer.dispatch(torch.ones(5, 16), idx, weights)
    _, back = layer.combine(received.x, received.handle, row_weights=received.weights)
    return torch.equal(back, torch.where(idx >= 0, weights, 0.0))


@pytest.mark.parametrize("kind", ["token-expert", "token-rank"])
@pytest.mark.parametrize("deduplicate", [False, True], ids=["each", "once"])
def test_row_weights_come_back_to_their_token_and_k(form: str, kind: str, deduplicate: bool) -> None:
    assert all(run_ranks(form, 2, returned_weights, kind, deduplicate, deduplicate=deduplicate))


# ---- dtypes and quantisation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_identity_experts_with_one_unit_weight_return_x_to_the_bit(form: str, dtype: torch.dtype) -> None:
    def identity(comm: ubep.Communicator) -> bool:
        layer = comm.expert_parallel(**{**SIZES, "topk": 1, "dtype": dtype})
        x = torch.randn(6, 16).to(dtype)
        x[0, :4] = torch.tensor([0.0, -0.0, float("inf"), 1e-7]).to(dtype)
        received = layer.dispatch(x, routing(comm.rank, 6, 8, 1)[0])
        out = layer.combine(received.x, received.handle)
        words = torch.int32 if dtype == torch.float32 else torch.int16
        return torch.equal(out.view(words), x.view(words))

    assert all(run_ranks(form, 2, identity))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_quantised_rows_arrive_as_the_quantiser_makes_them(form: str, kind: str, tokens: int) -> None:
    def quantised(comm: ubep.Communicator) -> bool:
        sizes = {**SIZES, "hidden": 200, "topk": 1, "dtype": torch.bfloat16}
        layer = comm.expert_parallel(**sizes, quantise=kind)
        x = torch.randn(tokens, 200, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        idx = torch.full((tokens, 1), 4 * comm.rank)
        q, scales = quantise(x, kind)
        raw = layer.dispatch(x, idx, keep_quantised=True)
        back = layer.dispatch(x, idx)
        layer.combine(back.x, back.handle)
        return (
            torch.equal(raw.x.view(torch.int8), q.view(torch.int8))
            and torch.equal(raw.scales, scales)
            and torch.equal(back.x, dequantise(q, scales, kind, torch.bfloat16))
        )

    assert all(run_ranks(form, 2, quantised))


# ---- capacity


def overflow(comm: ubep.Communicator, how: str) -> Any:
    layer = comm.expert_parallel(**{**SIZES, "topk": 1}, expert_capacity=3, overflow=how)
    x = torch.ones(2, 16) * (comm.rank + 1)
    results = []
    if how == "refuse":
        results.append(outcome(lambda: layer.dispatch(x, torch.zeros(2, 1, dtype=torch.int64))))
        received = layer.dispatch(x, torch.full((2, 1), 4 * comm.rank))
    else:
        received = layer.dispatch(x, torch.zeros(2, 1, dtype=torch.int64))
    out = layer.combine(received.x, received.handle)
    return [*results, received.expert_counts.tolist(), received.dropped, out[:, 0].tolist()]


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_overflow_is_refused_on_every_rank_and_the_layer_goes_on(form: str, checked: bool) -> None:
    refused = ("CapacityError", "expert 0 would receive 4 rows, expert_capacity is 3")
    for error, counts, dropped, out in run_ranks(form, 2, overflow, "refuse", checked=checked):
        assert error[0] == refused[0]
        assert refused[1] in error[1]
        assert counts[0] == 2
        assert dropped == 0
        assert out in ([1.0, 1.0], [2.0, 2.0])


def test_overflow_may_be_dropped_and_counted(form: str) -> None:
    first, second = run_ranks(form, 2, overflow, "drop", placement="staged")
    assert first == [[3, 0, 0, 0], 1, [1.0, 1.0]]  # rows 0 to 2 by source and token are kept
    assert second == [[0, 0, 0, 0], 0, [2.0, 0.0]]


# ---- repeated routing, lanes, several layers


def repeated(comm: ubep.Communicator) -> bool:
    layer = comm.expert_parallel(**SIZES)
    idx, weights = routing(comm.rank, 6, 8, 2)
    x = torch.randn(6, 16)
    first = layer.dispatch(x, idx, weights)
    again = layer.dispatch(2 * x, handle=first.handle)
    return torch.equal(again.x, 2 * first.x) and torch.equal(again.weights, first.weights)


def test_a_handle_repeats_its_routing(form: str) -> None:
    assert all(run_ranks(form, 3, repeated))


def two_lanes(comm: ubep.Communicator) -> float:
    first, second = comm.expert_parallel(**SIZES), comm.expert_parallel(**{**SIZES, "hidden": 8})
    worst = 0.0
    for step in range(3):
        live = []
        for layer, hidden in ((first, 16), (second, 8)):
            for lane in (0, 1):
                idx, weights = routing(comm.rank + 10 * step + lane, 4, 8, 2)
                x = torch.randn(4, hidden)
                live.append((layer, x, idx, weights, layer.dispatch(x, idx, weights, lane=lane)))
        for layer, x, idx, weights, received in reversed(live):
            out = layer.combine(affine_experts(received, layer.local_experts), received.handle)
            worst = max(worst, float((out - affine_dense(x, idx, weights)).abs().max()))
    return worst


def test_lanes_and_layers_interleave_with_live_handles(form: str) -> None:
    assert max(run_ranks(form, 2, two_lanes, lanes=2)) < 1e-5


def many(comm: ubep.Communicator) -> float:
    layer = comm.expert_parallel(**SIZES)
    worst = 0.0
    for step in range(100):
        count = (step * 5 + comm.rank) % 9
        idx, weights = routing(1000 * comm.rank + step, count, 8, 2)
        x = torch.randn(count, 16)
        received = layer.dispatch(x, idx, weights)
        out = layer.combine(affine_experts(received, layer.local_experts), received.handle)
        if count:
            worst = max(worst, float((out - affine_dense(x, idx, weights)).abs().max()))
    return worst


def test_a_hundred_operations_of_changing_size(form: str) -> None:
    assert max(run_ranks(form, 2, many)) < 1e-5


def large(comm: ubep.Communicator) -> bool:
    layer = comm.expert_parallel(
        **{**SIZES, "hidden": 2, "topk": 1, "max_tokens": 65536}, expert_capacity=131072
    )
    x = torch.arange(131072.0).view(65536, 2)
    received = layer.dispatch(x, torch.zeros(65536, 1, dtype=torch.int64))
    out = layer.combine(received.x + 1, received.handle)
    return torch.equal(out, x + 1) and len(received.x) == (131072 if comm.rank == 0 else 0)


def test_65536_tokens_of_every_rank_to_one_expert() -> None:
    assert all(run_ranks("virtual", 2, large, chunk_records=50000))
