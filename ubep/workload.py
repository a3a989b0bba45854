"""What is to be carried: the sizes and semantics of one expert-parallel layer, and where its experts live."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ubep.errors import InvalidInputError

ReceiveLayout = Literal["token-expert", "token-rank"]
CombineSemantics = Literal["weighted", "sum"]
Quantisation = Literal["none", "fp8", "int8"]
Overflow = Literal["refuse", "drop"]
DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def dtype_name(dtype: torch.dtype | str) -> str:
    """'bfloat16' for torch.bfloat16; refuses dtypes that activations cannot have."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise InvalidInputError(f"dtype {name} is not one of {', '.join(DTYPES)}")
    return name


@dataclass(frozen=True)
class ExpertMap:
    """Which rank holds each physical expert.

    rank_of: owner of each expert, one entry for each physical id. An expert's local index is its place
        among the experts of its rank, in ascending id.
    logical: for redundant experts, the logical expert that each physical id is a copy of; None: no copies.
    """

    rank_of: tuple[int, ...]
    logical: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.logical is not None and len(self.logical) != len(self.rank_of):
            raise InvalidInputError(
                f"logical lists {len(self.logical)} experts, rank_of lists {len(self.rank_of)}"
            )

    @classmethod
    def contiguous(cls, num_experts: int, world_size: int) -> ExpertMap:
        """Contiguous blocks; when experts don't divide by ranks, the first ranks hold one more."""
        edges = [rank * num_experts // world_size for rank in range(world_size + 1)]
        sizes = sorted((hi - lo for lo, hi in pairwise(edges)), reverse=True)
        return cls(tuple(rank for rank, size in enumerate(sizes) for _ in range(size)))

    @property
    def num_experts(self) -> int:
        return len(self.rank_of)

    @cached_property
    def owner(self) -> Tensor:
        """Owner rank of each expert, int64 [E]."""
        return torch.tensor(self.rank_of, dtype=torch.int64)

    @cached_property
    def local_index(self) -> Tensor:
        """Index of each expert on its owner, int64 [E]."""
        seen: dict[int, int] = {}
        index = []
        for rank in self.rank_of:
            index.append(seen.get(rank, 0))
            seen[rank] = index[-1] + 1
        return torch.tensor(index, dtype=torch.int64)

    def experts_of(self, rank: int) -> list[int]:
        """Ids of the experts that `rank` holds, in local order."""
        return [expert for expert, owner in enumerate(self.rank_of) if owner == rank]

    def to_physical(self, logical_idx: Tensor) -> Tensor:
        """Spread logical expert ids [T, K] over their physical copies, token by token in turn; -1 stays."""
        if self.logical is None:
            return logical_idx
        copies: dict[int, list[int]] = {}
        for physical, logical in enumerate(self.logical):
            copies.setdefault(logical, []).append(physical)
        most = max(map(len, copies.values()))
        table = torch.full((max(copies) + 1, most), -1, dtype=torch.int64)
        for logical, ids in copies.items():
            table[logical] = torch.tensor((ids * most)[:most])
        count = torch.tensor([len(copies.get(logical, ())) or 1 for logical in range(len(table))])
        turn = torch.arange(len(logical_idx))[:, None]
        known = logical_idx.clamp(min=0)
        return torch.where(logical_idx < 0, -1, table[known, turn % count[known]])


@dataclass(frozen=True)
class Workload:
    """Sizes and semantics that every rank must agree on before the first call.

    num_experts E, hidden H, topk K; max_tokens: the most tokens that any rank brings to one dispatch.
    dtype: of activations, by name.
    receive_layout: "token-expert": one row for each (token, expert), grouped by local expert;
        "token-rank": one row for each (token, rank), grouped by source.
    combine: "weighted": rows are multiplied by the top-k weights, a token-rank row by the sum of its
        weights on that rank; "sum": plain sum of the rows returned, the caller applied the weights.
    quantise: of dispatched rows: "fp8" (e4m3, one float32 scale for 128 columns), "int8" (one for a token).
    expert_alignment: every expert's rows start at a multiple of this; the gaps are zeroed rows.
    expert_capacity: most rows of one expert (of one rank in token-rank); None: whatever max_tokens admits.
    overflow: beyond the capacity, "refuse" on every rank, or "drop" and count.
    experts: where each expert lives; None: contiguous blocks.
    """

    num_experts: int
    hidden: int
    topk: int
    max_tokens: int
    dtype: str = "bfloat16"
    receive_layout: ReceiveLayout = "token-expert"
    combine: CombineSemantics = "weighted"
    quantise: Quantisation = "none"
    expert_alignment: int = 1
    expert_capacity: int | None = None
    overflow: Overflow = "refuse"
    experts: ExpertMap | None = None

    def __post_init__(self) -> None:
        for name in ("num_experts", "hidden", "topk", "max_tokens", "expert_alignment"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.expert_capacity is not None and self.expert_capacity < 1:
            raise InvalidInputError(f"expert_capacity must be at least 1, got {self.expert_capacity}")
        dtype_name(self.dtype)
        for name, kind in (
            ("receive_layout", ReceiveLayout),
            ("combine", CombineSemantics),
            ("quantise", Quantisation),
            ("overflow", Overflow),
        ):
            if getattr(self, name) not in get_args(kind):
                raise InvalidInputError(
                    f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}"
                )
        if self.experts is not None and self.experts.num_experts != self.num_experts:
            raise InvalidInputError(
                f"the expert map places {self.experts.num_experts} experts, num_experts is {self.num_experts}"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for comparison between ranks."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.experts is not None:
            plain["experts"] = {"rank_of": list(self.experts.rank_of), "logical": self.experts.logical}
        return plain
