"""Quantised rows. The one place that knows what a scale covers and how it is laid out.

"fp8": float8 e4m3, one float32 scale for every 128 columns (the last group may be shorter):
    scale = amax / 448, q = x / scale; scales [rows, ceil(hidden / 128)], row-major beside the row.
"int8": one float32 scale for a row: scale = amax / 127, q = round-half-even(x / scale); scales [rows, 1].
An all-zero group has scale 1. 448 is the largest finite e4m3 value.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ubep.workload import Quantisation

FP8_GROUP = 128
FP8_MAX = 448.0
INT8_MAX = 127.0
QUANTISED_DTYPE = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def num_scales(kind: Quantisation, hidden: int) -> int:
    """float32 scales that travel with one row."""
    return {"none": 0, "fp8": -(-hidden // FP8_GROUP), "int8": 1}[kind]


def _grouped(rows: Tensor, kind: Quantisation) -> Tensor:
    """[n, hidden] as [n, scales, columns of one scale], zero-padded."""
    if kind == "int8":
        return rows[:, None, :]
    groups = num_scales(kind, rows.shape[1])
    return pad(rows, (0, -rows.shape[1] % FP8_GROUP)).reshape(len(rows), groups, FP8_GROUP)


def quantise(rows: Tensor, kind: Quantisation) -> tuple[Tensor, Tensor]:
    """rows [n, hidden] of any float dtype -> (q [n, hidden] fp8 or int8, scales float32 [n, num_scales])."""
    limit = FP8_MAX if kind == "fp8" else INT8_MAX
    groups = _grouped(rows.float(), kind)
    amax = groups.abs().amax(-1, keepdim=True)
    scales = torch.where(amax > 0, amax / limit, 1.0)
    scaled = (groups / scales).clamp(-limit, limit)
    if kind == "int8":
        scaled = scaled.round()
    q = scaled.to(QUANTISED_DTYPE[kind]).flatten(1)[:, : rows.shape[1]]
    return q, scales.squeeze(-1)


def dequantise(q: Tensor, scales: Tensor, kind: Quantisation, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantise`, in float32, rounded once to `dtype`."""
    groups = _grouped(q.float(), kind) * scales[..., None]
    return groups.flatten(1)[:, : q.shape[1]].to(dtype)
