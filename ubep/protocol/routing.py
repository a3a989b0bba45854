"""From the routing of one call to the records that travel, and to the rows where they land."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ubep.protocol.plan import Plan, RankPlan
from ubep.protocol.workers import slice_cuts


@dataclass(frozen=True)
class SentRecords:
    """What one rank sends in one dispatch, destination by destination.

    n records, M = plan.entries experts in each. Records of destination d are start[d] .. start[d + 1].
    token int64 [n]; expert int64 [n, M]: local index at the destination, -1: none; position int64
    [n, M]: place among this rank's rows of that expert (token-rank: of that rank, in column 0);
    weight float32 [n, M].
    slot int64 [n]: where the returned record goes among the [T, K] inputs of the last reduction;
    slot_valid bool [T, K], slot_weight float32 [T, K] or None: which of those are used, and how.
    counts int64 [E] (token-rank: [R]): rows for each expert (rank).
    bounds[d]: records of d that lie before each edge of the sending workers' slices.
    """

    num_tokens: int
    token: Tensor
    expert: Tensor
    position: Tensor
    weight: Tensor
    slot: Tensor
    slot_valid: Tensor
    slot_weight: Tensor | None
    counts: Tensor
    start: list[int]
    bounds: list[list[int]]

    def meta(self) -> Tensor:
        """The metadata words of every record, int32 [n, 1 + 3 M]."""
        words = [self.token[:, None], self.expert, self.position]
        return torch.cat([*(w.to(torch.int32) for w in words), self.weight.view(torch.int32)], 1)


def route(view: RankPlan, topk_idx: Tensor, topk_weights: Tensor) -> SentRecords:
    """The records that a rank sends for topk_idx int64 [T, K] (-1: none) and topk_weights float32 [T, K]."""
    build = _one_per_rank if view.plan.deduplicate else _one_per_expert
    return build(view, topk_idx, topk_weights)


def _one_per_expert(view: RankPlan, topk_idx: Tensor, topk_weights: Tensor) -> SentRecords:
    plan = view.plan
    owner, local = plan.experts.owner, plan.experts.local_index
    num_tokens, topk = topk_idx.shape
    valid = topk_idx >= 0
    slot = valid.flatten().nonzero().squeeze(1)
    expert = topk_idx.flatten()[slot]
    # Sort by destination, then by the remapped place of the expert, then by token (stable).
    key, order = view.expert_key[expert].sort(stable=True)
    slot, expert = slot[order], expert[order]
    counts = torch.bincount(expert, minlength=plan.workload.num_experts)
    weighted = plan.workload.combine == "weighted"
    return SentRecords(
        num_tokens=num_tokens,
        token=slot // topk,
        expert=local[expert][:, None],
        position=_place_in_run(key)[:, None],
        weight=topk_weights.flatten()[slot][:, None],
        slot=slot,
        slot_valid=valid,
        slot_weight=topk_weights if weighted else None,
        counts=counts,
        start=_starts(torch.bincount(owner[expert], minlength=plan.world_size)),
        bounds=_bounds(plan, owner[view.items], counts[view.items]),
    )


def _one_per_rank(view: RankPlan, topk_idx: Tensor, topk_weights: Tensor) -> SentRecords:
    plan = view.plan
    world, topk = plan.world_size, plan.workload.topk
    num_tokens = len(topk_idx)
    valid = topk_idx >= 0
    known = topk_idx.clamp(min=0)
    owner = torch.where(valid, plan.experts.owner[known], -1)
    reached = (owner[:, :, None] == torch.arange(world)).any(1)  # [T, R]
    destination, token = reached.T.nonzero(as_tuple=True)
    here = owner[token] == destination[:, None]
    expert = torch.where(here, plan.experts.local_index[known][token], -1)
    weight = torch.where(here, topk_weights[token], 0.0)
    per_destination = reached.sum(0)
    # A token's records are reduced in ascending rank: its i-th destination takes slot i.
    ordinal = (reached.cumsum(1) - 1)[token, destination]
    filled = torch.arange(topk) < reached.sum(1, keepdim=True)
    slot = token * topk + ordinal
    slot_weight = None
    if plan.per_rank:
        position = _place_in_run(destination)[:, None].expand(-1, topk)
        if plan.workload.combine == "weighted":
            slot_weight = torch.zeros(num_tokens * topk)
            slot_weight[slot] = sum(weight.unbind(1))  # in ascending k
            slot_weight = slot_weight.view(num_tokens, topk)
        counts = per_destination
    else:
        counts = torch.bincount(topk_idx[valid], minlength=plan.workload.num_experts)
        position = _place_by_expert(topk_idx, valid)[token]
    return SentRecords(
        num_tokens=num_tokens,
        token=token,
        expert=expert,
        position=position,
        weight=weight,
        slot=slot,
        slot_valid=filled,
        slot_weight=slot_weight,
        counts=counts,
        start=_starts(per_destination),
        bounds=_bounds(plan, view.peers, per_destination[view.peers]),
    )


def _place_in_run(keys: Tensor) -> Tensor:
    """For sorted keys, the place of each element in its run of equal keys."""
    return torch.arange(len(keys)) - torch.searchsorted(keys, keys)


def _place_by_expert(topk_idx: Tensor, valid: Tensor) -> Tensor:
    """For each valid (token, k) its place among the pairs of its expert, in token order; int64 [T, K]."""
    pairs = valid.flatten().nonzero().squeeze(1)
    expert, order = topk_idx.flatten()[pairs].sort(stable=True)
    position = torch.zeros(topk_idx.numel(), dtype=torch.int64)
    position[pairs[order]] = _place_in_run(expert)
    return position.view_as(topk_idx)


def _starts(counts: Tensor) -> list[int]:
    """Exclusive prefix sums with the total at the end."""
    return [0, *counts.cumsum(0).tolist()]


def _bounds(plan: Plan, item_peer: Tensor, item_counts: Tensor) -> list[list[int]]:
    """bounds[peer][w]: records of that peer before the w-th edge of the sending workers' equal slices."""
    cuts = slice_cuts(item_counts, plan.roles[1])
    bounds = torch.zeros(plan.world_size, len(cuts), dtype=torch.int64)
    bounds.index_add_(0, item_peer, cuts.T)
    result: list[list[int]] = bounds.tolist()
    return result


def return_bounds(view: RankPlan, records: list[int]) -> list[list[int]]:
    """As SentRecords.bounds, for the `records[s]` records that go back to every source s in a combine."""
    return _bounds(view.plan, view.peers, torch.tensor(records)[view.peers])


@dataclass(frozen=True)
class RowLayout:
    """Where rows lie on one receiving rank.

    offset int64 [G + 1]: first row of each group (local expert, or the one group of token-rank), aligned;
    start int64 [R, G]: first row of each source's run in the group; count int64 [G]: rows kept.
    """

    offset: Tensor
    start: Tensor
    count: Tensor

    @classmethod
    def of(cls, plan: Plan, counts: Tensor) -> RowLayout:
        """From counts int64 [R, G] of rows by source and group: groups in order, sources ascending within."""
        workload = plan.workload
        total = counts.sum(0)
        if workload.expert_capacity is not None:
            total = total.clamp(max=workload.expert_capacity)
        aligned = -(-total // workload.expert_alignment) * workload.expert_alignment
        offset = torch.tensor(_starts(aligned))
        return cls(offset, offset[:-1] + counts.cumsum(0) - counts, total)

    @property
    def num_rows(self) -> int:
        return int(self.offset[-1])
