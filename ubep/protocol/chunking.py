"""Chunk size: how many records are flagged together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

PIPELINE_STAGES = 3  # pack, wire, place


@dataclass(frozen=True)
class Link:
    """One tier's link: start-up latency of a put with its flag, and bandwidth in one direction."""

    latency_us: float
    bandwidth_gbps: float  # gigabytes (1e9 bytes) per second


# Used for tiers about which nothing was declared or measured. Orders of magnitude from published
# machines (a package, a node, a rack, a pod); a tuned or declared value replaces them.
DEFAULT_LINKS: Mapping[str, Link] = {
    "self": Link(0.1, 200.0),
    "die": Link(0.3, 200.0),
    "node": Link(1.0, 150.0),
    "rack": Link(2.0, 100.0),
    "pod": Link(2.5, 50.0),
}
UNKNOWN_LINK = Link(2.5, 50.0)


def optimal_chunk_bytes(message_bytes: float, link: Link, stages: int = PIPELINE_STAGES) -> float:
    """The chunk size that minimises the time of one message through a pipeline.

    A message of S bytes cut into chunks of c bytes passes d stages, each of which costs
    a + c / b for a chunk (a: start-up, b: bandwidth). The last chunk leaves after

        T(c) = (S / c + d - 1) * (a + c / b),   minimal at   c = sqrt(S * a * b / (d - 1)),

    the usual segmentation optimum for pipelined transfers under the linear (Hockney) cost model.
    """
    start_up_bytes = link.latency_us * link.bandwidth_gbps * 1e3  # a * b, in bytes
    return math.sqrt(message_bytes * start_up_bytes / (stages - 1))


def chunk_records(expected_records: float, record_bytes: int, max_records: int, link: Link) -> int:
    """Records in a chunk for messages of `expected_records`, between 1 and max_records."""
    best = optimal_chunk_bytes(expected_records * record_bytes, link) / record_bytes
    return min(max(round(best), 1), max_records)
