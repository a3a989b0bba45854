"""Native kernels against the stated arithmetic, to the bit, on every instruction set of this processor.

A NaN has to be a NaN; its bits differ even between the paths of torch and are not compared.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from ubep.protocol.quantise import QUANTISED_DTYPE, dequantise, num_scales, quantise
from ubep.protocol.reduction import reduce_rows
from ubep.workload import Quantisation

native = pytest.importorskip("ubep_backends.shm._native", reason="the native extension is not built")
if not hasattr(native, "kernels"):
    pytest.skip("the native extension has no kernels", allow_module_level=True)
kernels = native.kernels

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KINDS: list[Quantisation] = ["fp8", "int8"]
HIDDEN = (1, 7, 64, 127, 128, 129, 2048, 7168)
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32}
SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 6e-8, 3e-5, 65519.0, 65520.0)
FULL_NAN = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(
    torch.float32
)  # rounds to -0.0 if taken for a number
GUARD = 0x5A

isas = pytest.mark.parametrize("isa", kernels.available())
dtypes = pytest.mark.parametrize("dtype", DTYPES)
kinds = pytest.mark.parametrize("kind", KINDS)
hiddens = pytest.mark.parametrize("hidden", HIDDEN)


class Place:
    """A copy of a tensor (or room for one) at an address off by `shift` bytes, between guard bytes."""

    def __init__(self, like: Tensor, shift: int = 0, fill: bool = True) -> None:
        self.like = like.contiguous()
        self.size = like.numel() * like.element_size()
        self.memory = torch.full((self.size + 256,), GUARD, dtype=torch.uint8)
        self.begin = -self.memory.data_ptr() % 64 + 64 + shift
        self.address = self.memory.data_ptr() + self.begin
        if fill:
            self.memory[self.begin : self.begin + self.size] = self.like.flatten().view(torch.uint8)

    def take(self) -> Tensor:
        """What is there now; nothing around it was touched."""
        end = self.begin + self.size
        assert (self.memory[: self.begin] == GUARD).all()
        assert (self.memory[end:] == GUARD).all()
        return self.memory[self.begin : end].clone().view(self.like.dtype).reshape(self.like.shape)


def same(got: Tensor, want: Tensor) -> None:
    """Equal to the bit, but for the bits of NaN."""
    assert got.dtype == want.dtype
    as_bits = INTEGER[got.element_size()]
    equal = got.view(as_bits) == want.view(as_bits)
    if got.is_floating_point():
        equal |= got.float().isnan() & want.float().isnan()
    where = (~equal).nonzero()[:4].tolist()
    assert equal.all(), f"{where}: {got[~equal][:4].tolist()} for {want[~equal][:4].tolist()}"


def anything(n: int, hidden: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of any bit patterns, ordinary numbers, special values, and rows that cancel."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, hidden, generator=generator).to(dtype)
    as_bits = INTEGER[x.element_size()]
    if seed % 3 == 1:
        limit = torch.iinfo(as_bits)
        x = torch.randint(limit.min, limit.max, x.shape, generator=generator, dtype=as_bits).view(dtype)
    elif seed % 3 == 2:
        pick = torch.randint(0, len(SPECIAL), x.shape, generator=generator)
        usual = torch.rand(x.shape, generator=generator) < 0.5
        x = torch.where(usual, x, torch.tensor(SPECIAL)[pick].to(dtype))
    if n > 2:
        x[2] = -x[0]
    return x


def reduced(isa: str, x: Tensor, weights: Tensor | None, shift: int = 0, stream: bool = False) -> Tensor:
    """The rows of `x` summed by the native kernel."""
    name = str(x.dtype).removeprefix("torch.")
    rows = [Place(row, shift) for row in x]
    out = Place(x.new_empty(x.shape[1]), shift, fill=False)
    address = 0 if weights is None else weights.data_ptr()
    addresses = [row.address for row in rows]
    kernels.reduce_rows(isa, name, out.address, addresses, address, x.shape[1], stream)
    return out.take()


def expected(x: Tensor, weights: Tensor | None) -> Tensor:
    """The same from the stated order."""
    valid = torch.ones(1, len(x), dtype=torch.bool)
    return reduce_rows(x[None], None if weights is None else weights[None], valid, x.dtype)[0]


@isas
@dtypes
@hiddens
def test_reduce(isa: str, dtype: str, hidden: int) -> None:
    for n in range(9):
        for seed in range(3):
            x = anything(n, hidden, DTYPES[dtype], seed + 3 * n)
            weights = torch.randn(n, generator=torch.Generator().manual_seed(seed))
            for given in (None, weights):
                want = expected(x, given)
                for stream in (False, True):
                    same(reduced(isa, x, given, stream=stream), want)


@isas
@dtypes
@pytest.mark.parametrize("shift", [1, 2, 4, 6, 13, 16, 32, 63])
def test_reduce_unaligned(isa: str, dtype: str, shift: int) -> None:
    x = anything(3, 333, DTYPES[dtype], shift)
    weights = torch.tensor([0.3, -0.7, 1e-3])
    for stream in (False, True):
        same(reduced(isa, x, weights, shift, stream), expected(x, weights))


@isas
@pytest.mark.parametrize("weight", [0.0, -0.0, float("nan"), float("inf"), 1e-40, 1.0])
def test_special_weights(isa: str, weight: float) -> None:
    for dtype in DTYPES.values():
        x = anything(2, 71, dtype, 2)
        for other in (torch.tensor(0.5), FULL_NAN):
            weights = torch.stack([torch.tensor(weight), other])
            same(reduced(isa, x, weights), expected(x, weights))


@isas
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_value_rounds_and_returns(isa: str, dtype: str) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(DTYPES[dtype])[None]
    same(reduced(isa, x, None), x[0])
    for scale in (2**-6 + 2**-13, 0.37, 2**-1, 3e4):  # ties, subnormals, overflow
        weights = torch.tensor([scale])
        same(reduced(isa, x, weights), expected(x, weights))


@isas
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 127, 128, 4097, 14336])
def test_copy(isa: str, nbytes: int) -> None:
    x = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    for shift in (0, 1, 16, 63):
        source, out = Place(x, 5), Place(x, shift, fill=False)
        kernels.copy(isa, out.address, source.address, nbytes)
        assert torch.equal(out.take(), x)


def quantised(isa: str, kind: Quantisation, row: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """A row quantised by the native kernel."""
    q = Place(torch.empty(len(row), dtype=QUANTISED_DTYPE[kind]), shift, fill=False)
    scales = Place(torch.empty(num_scales(kind, len(row))), shift, fill=False)
    source = Place(row, shift)
    name = str(row.dtype).removeprefix("torch.")
    kernels.quantise(isa, kind, name, q.address, scales.address, source.address, len(row))
    return q.take(), scales.take()


def dequantised(isa: str, kind: Quantisation, q: Tensor, scales: Tensor, dtype: str, shift: int) -> Tensor:
    """And back."""
    source, held = Place(q, shift), Place(scales, shift)
    out = Place(torch.empty(len(q), dtype=DTYPES[dtype]), shift, fill=False)
    kernels.dequantise(isa, kind, dtype, out.address, source.address, held.address, len(q))
    return out.take()


@isas
@kinds
@dtypes
@hiddens
def test_quantise(isa: str, kind: Quantisation, dtype: str, hidden: int) -> None:
    for seed in range(6):
        rows = anything(3, hidden, DTYPES[dtype], seed) * (1 if seed < 3 else 1e-3)
        rows[1, : hidden // 2] = -0.0
        q, scales = quantise(rows, kind)
        back = dequantise(q, scales, kind, DTYPES[dtype])
        for i, row in enumerate(rows):
            got, factors = quantised(isa, kind, row, shift=seed)
            same(got, q[i])
            same(factors, scales[i])
            same(dequantised(isa, kind, q[i], scales[i], dtype, shift=seed), back[i])


@isas
@kinds
def test_quantise_rounding(isa: str, kind: Quantisation) -> None:
    """Scale 1: every value, every tie between two, and their float32 neighbours."""
    limit, group = {"fp8": (448.0, 128), "int8": (127.0, 1 << 20)}[kind]
    grid = torch.arange(256, dtype=torch.uint8).view(QUANTISED_DTYPE[kind]).float()
    grid = grid[grid.isfinite() & (grid.abs() <= limit)].sort().values
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2])
    points = torch.cat([points, points.nextafter(points + 1), points.nextafter(points - 1)])
    points = points.clamp(-limit, limit)
    for start in range(0, len(points), group - 1):
        row = torch.cat([torch.tensor([limit]), points[start : start + group - 1]])
        q, scales = quantise(row[None], kind)
        got, factors = quantised(isa, kind, row, shift=0)
        assert scales.tolist() == [[1.0]]
        same(got, q[0])
        same(factors, scales[0])


@isas
@kinds
@dtypes
def test_dequantise_every_value(isa: str, kind: Quantisation, dtype: str) -> None:
    q = torch.arange(256, dtype=torch.uint8).view(QUANTISED_DTYPE[kind])
    for scale in (1.0, 0.3, 1e-9, 3e38, 1e-42, float("inf")):
        scales = torch.full((num_scales(kind, 256),), scale)
        want = dequantise(q[None], scales[None], kind, DTYPES[dtype])[0]
        same(dequantised(isa, kind, q, scales, dtype, shift=3), want)


@pytest.mark.parametrize("isa", ["", *kernels.available(), "mmx"])
def test_forced(isa: str) -> None:
    script = "from ubep_backends.shm import _native; print(_native.isa())"
    env = os.environ | {"UBEP_SHM_ISA": isa}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    if isa == "mmx":
        assert done.returncode != 0
        assert "UBEP_SHM_ISA=mmx" in done.stderr
    else:
        assert done.stdout.strip() == (isa or kernels.available()[-1])
