"""What the tests of the shared-memory backend share: launching, and skipping where it is not built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ubep
from ubep_backends.shm import Backend

needs_shm = pytest.mark.skipif(not Backend.probe().available, reason=Backend.probe().reason)


def run(
    world_size: int, fn: Callable[..., Any], *args: Any, options: Any = None, **settings: Any
) -> list[Any]:
    """fn(comm, *args) on ranks of the shared-memory backend."""
    config = ubep.Config(backend="shm", options={"shm": options or {}}, **settings)
    return ubep.launch(fn, world_size, args, config=config, timeout_s=60)


def draw(
    rank: int, tokens: int, experts: int, topk: int, hidden: int, dtype: torch.dtype, empty: float = 0.2
) -> tuple[Tensor, Tensor, Tensor]:
    """x, topk_idx and topk_weights of one rank; a share `empty` of the ids is -1."""
    generator = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    idx = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :topk]
    idx[torch.rand(tokens, topk, generator=generator) < empty] = -1
    return x, idx, torch.rand(tokens, topk, generator=generator)
