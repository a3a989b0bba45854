"""Work on rows that the strong peers need, so that they lose nothing to ubep but the way of moving.

A backend may offer its own through a method `kernels()` that returns an object with any of the methods
of `TorchKernels`; those that it lacks are done by torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ubep.backend import Backend

METHODS = ("sort_rows", "regroup", "gather_rows", "reduce_rows")


class Sorted(NamedTuple):
    """counts int64 [E]; token int64 [T*K]: of each row by expert; place int64 [T, K]: its place there."""

    counts: Tensor
    token: Tensor
    place: Tensor


class TorchKernels:
    """The fastest ways that torch has for one thread; what does not depend on the routing is kept."""

    def __init__(self) -> None:
        self._numbers = torch.arange(0)
        self._experts: dict[torch.Size, Tensor] = {}

    def _count_to(self, end: int) -> Tensor:
        if len(self._numbers) < end:
            self._numbers = torch.arange(end)
        return self._numbers[:end]

    def sort_rows(self, idx: Tensor, experts: int) -> Sorted:
        """The rows of idx [T, K] by expert, stable."""
        flat = idx.view(-1)
        order = flat.argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = self._count_to(len(order))
        counts = torch.bincount(flat, minlength=experts)
        return Sorted(counts, order.div(idx.shape[1], rounding_mode="floor"), place.view(idx.shape))

    def regroup(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """counts [R, L] of rows by (source, expert) -> where each row by (expert, source) is; and back."""
        if counts.shape not in self._experts:
            self._experts[counts.shape] = torch.arange(counts.shape[1]).repeat(counts.shape[0])
        there = self._experts[counts.shape].repeat_interleave(counts.view(-1)).argsort(stable=True)
        back = torch.empty_like(there)
        back[there] = self._count_to(len(there))
        return there, back

    def gather_rows(self, out: Tensor, rows: Tensor, index: Tensor) -> None:
        """out[i] = rows[index[i]]."""
        torch.index_select(rows, 0, index, out=out)

    def reduce_rows(self, out: Tensor, rows: Tensor, index: Tensor, weights: Tensor) -> None:
        """out[t] = sum_k weights[t, k] rows[index[t, k]], accumulated in float32 (weights: in the dtype)."""
        out.copy_(embedding_bag(index, rows, per_sample_weights=weights.to(rows.dtype), mode="sum"))


class Kernels(TorchKernels):
    """A backend's kernels, completed by torch's. label: what torch does, empty if nothing."""

    def __init__(self, backend: Backend | None) -> None:
        super().__init__()
        offered: Any = getattr(backend, "kernels", None)
        native = offered() if callable(offered) else None
        missing = [name for name in METHODS if not hasattr(native, name)]
        for name in set(METHODS) - set(missing):
            setattr(self, name, getattr(native, name))
        if missing == list(METHODS):
            self.label = "torch kernels"
        else:
            self.label = f"torch {', '.join(missing)}" if missing else ""
