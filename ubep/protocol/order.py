"""Send orders: in which sequence a rank serves its peers."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from ubep.topology import Topology

SendOrder = Literal["tiered", "near-first", "rotated", "rank", "size-aware"]
SEND_ORDERS: tuple[str, ...] = get_args(SendOrder)


def send_steps(
    topology: Topology,
    rank: int,
    order: SendOrder = "tiered",
    *,
    masked: frozenset[int] = frozenset(),
    receive: bool = False,
) -> list[int]:
    """The destination of `rank` in every step, -1 where it idles; every active rank occurs once.

    tiered: far tiers first, self last. A step is a displacement in the mixed-radix digits of the
        topology, so in each step the map source -> destination is one-to-one: a Latin square when
        groups are equal. Groups of different sizes are padded to the largest, and a step whose
        destination is a gap (or masked) is idle: with unequal groups no order can be one-to-one, far
        first and free of idle steps at once (5 senders do not fit on 3 far receivers).
    near-first: the tiers reversed.  rotated: rank + step, blind to tiers.  rank: 0, 1, 2, ...
    size-aware: as tiered; each call then moves the fullest destinations to the front.
    receive: the mirror image: the source from which `rank` is served in every step.
    """
    world = topology.world_size
    if order == "rank":
        steps = torch.arange(world)
    elif order == "rotated":
        sign = -1 if receive else 1
        steps = (rank + sign * torch.arange(1, world + 1)) % world
    else:
        steps = _displaced(topology, rank, near_first=order == "near-first", receive=receive)
    if masked:
        steps[torch.isin(steps, torch.tensor(sorted(masked)))] = -1
    result: list[int] = steps.tolist()
    return result


def _displaced(topology: Topology, rank: int, *, near_first: bool, receive: bool) -> Tensor:
    radices = topology.radices
    weights = torch.tensor([math.prod(radices[:level]) for level in range(len(radices))])
    sizes = torch.tensor(radices)
    table = torch.full((math.prod(radices),), -1)
    table[(torch.tensor(topology.digits) * weights).sum(1)] = torch.arange(topology.world_size)

    # Displacement as digits. Counting down makes the highest non-zero digit, the tier, fall.
    steps = torch.arange(len(table)) if near_first else torch.arange(len(table) - 1, -1, -1)
    delta = steps[:, None] // weights % sizes
    own = torch.tensor(topology.digits[rank])
    target = (own - delta if receive else own + delta) % sizes
    return table[(target * weights).sum(1)]


def transposed(count: int, workers: int) -> Tensor:
    """The paper's expert remapping: a workers x ceil(count / workers) matrix filled by rows, read by columns.

    `count` items sorted by tier come out so that every run of `workers` items spans all tiers; equal
    slices of the result then hold an even mix. Returns the item at each position, int64 [count].
    """
    columns = -(-count // workers) if count else 0
    items = torch.arange(workers * columns).reshape(workers, columns).T.flatten()
    return items[items < count]
