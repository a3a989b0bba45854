"""The stated reduction order. Executors that declare `deterministic` reproduce it to the bit."""

from __future__ import annotations

import torch
from torch import Tensor


def reduce_rows(rows: Tensor, weights: Tensor | None, valid: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Sum over the second dimension in ascending order, accumulating in float32.

    rows [n, m, H]; weights float32 [n, m] or None (all 1); valid bool [n, m]. Returns [n, H].

        acc = w_0 * x_0;  acc = acc + w_j * x_j   for j = 1, 2, ...   (product and sum rounded separately)

    skipping entries that are not valid, whatever their bits; rounded to `out_dtype` at the end. A row
    without valid entries is +0. The sum starts from -0.0, the true neutral element, so that a single
    entry of weight 1 comes back to the bit, -0.0 included.
    """
    acc = torch.full((rows.shape[0], rows.shape[2]), -0.0, device=rows.device)
    for j in range(rows.shape[1]):
        term = rows[:, j].float()
        if weights is not None:
            term = term * weights[:, j, None]
        acc = torch.where(valid[:, j, None], acc + term, acc)
    acc[~valid.any(1)] = 0.0
    return acc.to(out_dtype)
