"""Run a function on ranks of the reference backends: as processes over gloo, or as virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ubep
from ubep.handle import Received

FORMS = ("virtual", "reference", "shm")


def run_ranks(
    form: str, world_size: int, fn: Callable[..., Any], *args: Any, options: Any = None, **settings: Any
) -> list[Any]:
    """fn(comm, *args) on every rank of one form; `settings` are configuration, `options` the backend's."""
    config = ubep.Config(backend=form, options={form: options or {}}, **settings)
    return ubep.launch(fn, world_size, args, config=config, timeout_s=60)


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """('', '') if the call returns, else the name and the text of what it raised."""
    try:
        call()
    except ubep.UbepError as error:
        return type(error).__name__, str(error)
    return "", ""


def routing(rank: int, tokens: int, experts: int, topk: int) -> tuple[Tensor, Tensor]:
    """Distinct experts for each token, and weights that sum to 1; different on every rank."""
    generator = torch.Generator().manual_seed(rank)
    idx = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :topk]
    return idx, torch.rand(tokens, topk, generator=generator).softmax(1)


def affine_experts(received: Received, local_experts: list[int]) -> Tensor:
    """Expert e adds e + 1 times a pattern over the columns, so no expert, row or column can be confused."""
    y = received.x.clone()
    pattern = (torch.arange(y.shape[1]) % 5 + 1).to(y.dtype)
    for local, expert in enumerate(local_experts):
        begin = int(received.expert_offsets[local])
        y[begin : begin + int(received.expert_counts[local])] += (expert + 1) * pattern
    return y


def affine_dense(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    """The same, without any communication, in float64."""
    pattern = torch.arange(x.shape[1]) % 5 + 1.0
    out = torch.zeros(x.shape, dtype=torch.float64)
    for k in range(idx.shape[1]):
        y = x.double() + (idx[:, k, None] + 1) * pattern
        out += torch.where(idx[:, k, None] >= 0, weights[:, k, None] * y, 0.0)
    return out
