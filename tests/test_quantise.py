"""Quantised rows: scales, error bounds, and every size."""

from __future__ import annotations

import pytest
import torch

from ubep.protocol.quantise import dequantise, num_scales, quantise

KINDS = ["fp8", "int8"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_shapes_for_any_hidden_and_any_number_of_rows(kind: str, hidden: int, rows: int) -> None:
    q, scales = quantise(torch.randn(rows, hidden), kind)
    assert q.shape == (rows, hidden)
    assert scales.shape == (rows, num_scales(kind, hidden))
    assert dequantise(q, scales, kind, torch.float32).shape == (rows, hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_stays_within_half_a_step(kind: str) -> None:
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    back = dequantise(*quantise(x, kind), kind, torch.float32)
    if kind == "int8":
        bound = x.abs().amax(1, keepdim=True) / 127 / 2  # half an integer step of the row's scale
    else:
        group = x.view(16, 2, 128).abs().amax(2).repeat_interleave(128, 1)
        # e4m3 has 3 bits of mantissa: half a step is 2^-4 of the value, or of the smallest subnormal step.
        bound = torch.maximum(x.abs() * 2**-4, group / 448 * 2**-10)
    assert ((back - x).abs() <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_value_of_a_group_is_kept(kind: str) -> None:
    x = torch.zeros(1, 128)
    x[0, 5] = -3.5
    back = dequantise(*quantise(x, kind), kind, torch.float32)
    assert torch.equal(back, x)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_rows_have_scale_one(kind: str) -> None:
    q, scales = quantise(torch.zeros(2, 130), kind)
    assert (scales == 1).all()
    assert not q.float().any()


def test_fp8_groups_are_128_columns_and_independent() -> None:
    x = torch.ones(1, 256)
    x[0, :128] *= 1000
    assert quantise(x, "fp8")[1][0].tolist() == pytest.approx([1000 / 448, 1 / 448])
