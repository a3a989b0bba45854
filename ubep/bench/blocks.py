"""Blocks of rounds and what is concluded from them. Pure arithmetic; times in microseconds."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

ROUNDS = 8  # of one contestant in a row: shorter, and it runs on what its predecessor left in the caches
WARMUP = 2  # of these, thrown away
MIN_BLOCKS = 12


def order_of_block(seed: int, block: int, contestants: int) -> list[int]:
    """In which order the contestants run in this block: the same on all ranks."""
    order = list(range(contestants))
    random.Random(f"{seed}/{block}").shuffle(order)
    return order


def job_times_us(starts_ns: Sequence[Sequence[int]], ends_ns: Sequence[Sequence[int]]) -> list[float]:
    """[rank][round] of one clock -> for each round, the last rank's end minus the first rank's start."""
    first = [min(column) for column in zip(*starts_ns, strict=True)]
    last = [max(column) for column in zip(*ends_ns, strict=True)]
    return [(end - start) / 1e3 for start, end in zip(first, last, strict=True)]


def block_medians(times: Sequence[float], kept: int = ROUNDS - WARMUP) -> list[float]:
    """The median of every `kept` rounds in a row."""
    return [median(times[at : at + kept]) for at in range(0, len(times), kept)]


@dataclass(frozen=True)
class Ratio:
    """Of paired blocks: their median and quartiles."""

    median: float
    low: float
    high: float


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """above / below, block by block."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def spread(values: Sequence[float]) -> Ratio:
    """Median and quartiles of values."""
    if len(values) == 1:
        return Ratio(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Ratio(middle, low, high)


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between neighbours."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values."""
    return math.exp(sum(map(math.log, values)) / len(values))
