"""Gradients of dispatch and combine against a dense computation on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ubep
from tests.ranks import FORMS, routing, run_ranks
from ubep.errors import UnsupportedError

SIZES = {"num_experts": 6, "hidden": 8, "topk": 2, "max_tokens": 5, "dtype": torch.float32}
TOKENS = (5, 0, 3)


def weight_of(expert: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(expert)) / 3


def call_of(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = TOKENS[rank]
    idx, weights = routing(rank, tokens, 6, 2)
    idx[:1, 0] = -1
    return torch.randn(tokens, 8, generator=torch.Generator().manual_seed(rank)), idx, weights


def distributed(comm: ubep.Communicator, layout: str, combine: str) -> dict[str, Any]:
    layer = comm.expert_parallel(**SIZES, receive_layout=layout, combine=combine)
    x, idx, weights = call_of(comm.rank)
    x.requires_grad_()
    weights.requires_grad_()
    matrices = [weight_of(e).requires_grad_() for e in layer.local_experts]
    received = layer.dispatch(x, idx, weights)
    if layout == "token-expert":
        parts = [
            received.x[received.expert_offsets[i] : received.expert_offsets[i + 1]] @ m
            for i, m in enumerate(matrices)
        ]
        y = torch.cat(parts)
        if combine == "sum":
            y = y * received.weights[:, None]
    else:
        mine = torch.stack(matrices)[received.topk_idx.clamp(min=0)]
        y = (torch.einsum("nh,nkho->nko", received.x, mine) * received.weights[:, :, None]).sum(1)
    out = layer.combine(y, received.handle)
    (out.square().sum() + out.sum()).backward()
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, "experts": [m.grad for m in matrices]}


def dense() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    matrices = [weight_of(e).requires_grad_() for e in range(6)]
    xs, ws = [], []
    for rank in range(3):
        x, idx, weights = call_of(rank)
        x.requires_grad_()
        weights.requires_grad_()
        rows = torch.einsum("th,tkho->tko", x, torch.stack(matrices)[idx.clamp(min=0)])
        out = (rows * torch.where(idx >= 0, weights, 0.0)[:, :, None]).sum(1)
        (out.square().sum() + out.sum()).backward()
        xs.append(x.grad)
        ws.append(weights.grad)
    return xs, ws, [m.grad for m in matrices]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("layout", "combine"), [("token-expert", "weighted"), ("token-expert", "sum"), ("token-rank", "sum")]
)
@pytest.mark.parametrize("placement", ["staged", "direct"])
def test_gradients_equal_the_dense_ones(form: str, layout: str, combine: str, placement: str) -> None:
    """Of tokens, router weights and experts, with an empty rank and a -1 among the ids."""
    xs, ws, experts = dense()
    results = run_ranks(form, 3, distributed, layout, combine, placement=placement)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["x"], xs[rank])
        torch.testing.assert_close(result["weights"], ws[rank])
        for local, grad in enumerate(result["experts"]):
            torch.testing.assert_close(grad, experts[2 * rank + local])


def test_quantised_layers_refuse_gradients() -> None:
    with ubep.Communicator(config=ubep.Config(backend="reference")) as comm:
        layer = comm.expert_parallel(**SIZES, quantise="int8")
        x, idx, weights = call_of(0)
        with pytest.raises(UnsupportedError, match="quantise='none'"):
            layer.dispatch(x.requires_grad_(), idx, weights)
