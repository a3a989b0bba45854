"""The plan: everything that does not depend on the routing of one call. Plain data, equal on all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ubep.capabilities import Placement, Signalling
from ubep.errors import PlanMismatchError
from ubep.protocol.header import HEADER_WORDS
from ubep.protocol.order import SendOrder, send_steps, transposed
from ubep.protocol.records import RecordFormat, align, combine_format, dispatch_format, meta_words
from ubep.protocol.signalling import Codec, make_codec
from ubep.protocol.window import WindowLayout
from ubep.protocol.workers import split_roles
from ubep.topology import Topology
from ubep.workload import ExpertMap, Workload

PROTOCOL_VERSION = 1
MIN_HEADER_BYTES = 256  # room for the reason of a refusal


@dataclass(frozen=True)
class Plan:
    """How one expert-parallel layer moves its tokens.

    placement "staged": sources push records into slots; "direct": rows go straight to their place,
        by `transfer` "pull" (the destination reads) or "push" (the source writes).
    deduplicate: a token with several experts on one rank travels once, and is summed there first.
    signalling, atomic_block, flag_stride, ordered: how completion travels; see protocol.signalling.
    order: the send order.  chunk_records: by tier number, records that are flagged together.
    workers: of each rank.  lanes: operations that can be in flight.
    checked: no row is sent before every rank has announced that it takes part; otherwise the
        announcements hide behind the rows, and a refusal is raised after the rows have drained.
    decisions: why each automatic choice was made; not part of the plan's identity.
    """

    topology: Topology
    workload: Workload
    experts: ExpertMap
    placement: Placement
    transfer: Literal["push", "pull"]
    deduplicate: bool
    signalling: Signalling
    atomic_block: int
    flag_stride: int
    ordered: bool
    order: SendOrder
    chunk_records: tuple[int, ...]
    workers: int
    lanes: int
    checked: bool
    version: int = PROTOCOL_VERSION
    decisions: Mapping[str, str] = field(default_factory=dict, compare=False)

    # ---- sizes that follow

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def direct(self) -> bool:
        return self.placement == "direct"

    @property
    def per_rank(self) -> bool:
        """Whether received rows are one for each (token, rank)."""
        return self.workload.receive_layout == "token-rank"

    @property
    def entries(self) -> int:
        """Experts that one record can name: top-k when a token travels once to a rank, else 1."""
        return self.workload.topk if self.deduplicate else 1

    @property
    def max_records(self) -> int:
        """Most records from one source to one destination."""
        return self.workload.max_tokens * (1 if self.deduplicate else self.workload.topk)

    @cached_property
    def local_experts(self) -> tuple[tuple[int, ...], ...]:
        """Expert ids of each rank, in local order."""
        return tuple(tuple(self.experts.experts_of(rank)) for rank in range(self.world_size))

    @property
    def max_rows(self) -> int:
        """Most rows that a rank can receive, alignment gaps included."""
        w = self.workload
        groups = 1 if self.per_rank else max(map(len, self.local_experts))
        rows = self.world_size * w.max_tokens * (1 if self.per_rank else w.topk)
        if w.expert_capacity is not None:
            rows = min(rows, groups * w.expert_capacity)
        return rows + groups * (w.expert_alignment - 1)

    @cached_property
    def roles(self) -> tuple[int, int]:
        """(counting, sending) workers."""
        w = self.workload
        return split_roles(self.workers, w.num_experts, w.max_tokens * w.topk)

    @property
    def counts_everywhere(self) -> bool:
        """Whether announcements carry the counts for all ranks, so that each can see everyone's layout."""
        w = self.workload
        return self.direct or (w.expert_capacity is not None and w.overflow == "refuse")

    @cached_property
    def codec(self) -> Codec:
        return make_codec(self.signalling, self.atomic_block)

    @cached_property
    def dispatch_record(self) -> RecordFormat:
        return dispatch_format(self.workload, self.entries)

    @cached_property
    def combine_record(self) -> RecordFormat:
        return combine_format(self.workload, self.entries)

    @property
    def list_bytes(self) -> int:
        """Bytes of one record's metadata, as it lies in the lists of a direct dispatch."""
        return 4 * meta_words(self.entries)

    @cached_property
    def header_bytes(self) -> int:
        """Bytes of one announcement before encoding."""
        if self.counts_everywhere:
            counts = self.world_size if self.per_rank else self.workload.num_experts
        else:
            counts = 1 if self.per_rank else max(map(len, self.local_experts))
        words = HEADER_WORDS + self.roles[1] - 1 + counts
        return align(max(4 * words, MIN_HEADER_BYTES), 16)

    @property
    def flags_per_sender(self) -> int:
        """One progress word, or one word for each chunk where the transport may reorder signals."""
        return 1 if self.ordered else -(-self.max_records // min(self.chunk_records))

    @property
    def flags_per_source(self) -> int:
        """The announcement's flag, then those of each sending worker."""
        return 1 + self.roles[1] * self.flags_per_sender

    @cached_property
    def layout(self) -> WindowLayout:
        wire = self.codec.wire_bytes
        dispatched, returned = self.dispatch_record.nbytes, self.combine_record.nbytes
        slot = row = lists = 0
        if not self.direct:
            slot = self.max_records * max(wire(dispatched), wire(returned))
        elif self.transfer == "push":
            slot = self.max_records * wire(returned)
            row = self.max_rows * dispatched
        else:
            row = max(self.workload.max_tokens * dispatched, self.max_rows * returned)
            lists = self.world_size * self.max_records * self.list_bytes
        return WindowLayout(
            world_size=self.world_size,
            flags_per_source=self.flags_per_source,
            flag_stride=self.flag_stride,
            header_bytes=wire(self.header_bytes),
            slot_bytes=slot,
            row_bytes=row,
            list_bytes=lists,
            block=self.atomic_block,
        )

    @property
    def window_bytes(self) -> int:
        """Window memory of one rank, all lanes."""
        return self.lanes * self.layout.nbytes

    def chunk(self, rank: int, peer: int) -> int:
        """Records in a chunk between two ranks."""
        if self.signalling == "checksum":
            return self.max_records
        return self.chunk_records[self.topology.tier(rank, peer)]

    # ---- identity

    def as_dict(self) -> dict[str, Any]:
        """Every field as plain data."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "decisions"}
        plain["topology"] = {
            "tiers": list(self.topology.tiers),
            "coords": [list(coord) for coord in self.topology.coords],
        }
        plain["workload"] = replace(self.workload, experts=None).as_dict()
        plain["experts"] = {"rank_of": list(self.experts.rank_of), "logical": self.experts.logical}
        plain["chunk_records"] = list(self.chunk_records)
        return plain

    def to_json(self) -> str:
        """A canonical JSON text; `Plan.from_json` reads it back."""
        return json.dumps(self.as_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        plain = json.loads(text)
        topology, experts = plain["topology"], plain["experts"]
        plain["topology"] = Topology(
            tuple(topology["tiers"]), tuple(tuple(coord) for coord in topology["coords"])
        )
        logical = experts["logical"]
        plain["experts"] = ExpertMap(tuple(experts["rank_of"]), None if logical is None else tuple(logical))
        plain["workload"] = Workload(**plain["workload"])
        plain["chunk_records"] = tuple(plain["chunk_records"])
        return cls(**plain)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


@dataclass(frozen=True)
class RankPlan:
    """The plan as one rank sees it."""

    plan: Plan
    rank: int

    @cached_property
    def send_order(self) -> list[int]:
        """Peers (itself included) in the order in which this rank serves them."""
        return [peer for peer in send_steps(self.plan.topology, self.rank, self.plan.order) if peer >= 0]

    @cached_property
    def receive_order(self) -> list[int]:
        """Sources in the order in which they serve this rank."""
        steps = send_steps(self.plan.topology, self.rank, self.plan.order, receive=True)
        return [peer for peer in steps if peer >= 0]

    @cached_property
    def peers(self) -> Tensor:
        """The send order, transposed over several sending workers so that each serves all tiers."""
        return self._mixed(torch.tensor(self.send_order))

    @cached_property
    def items(self) -> Tensor:
        """The experts in that same order: peer by peer, transposed over the workers. int64 [E]."""
        experts = [expert for peer in self.send_order for expert in self.plan.local_experts[peer]]
        return self._mixed(torch.tensor(experts))

    @cached_property
    def expert_key(self) -> Tensor:
        """A sort key for each expert, int64 [E]: by owner, then in the order of `items`."""
        return self.plan.experts.owner * self.plan.workload.num_experts + self.items.argsort()

    def _mixed(self, items: Tensor) -> Tensor:
        sending = self.plan.roles[1]
        return items[transposed(len(items), sending)] if sending > 1 else items


def flatten(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one level with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def check_equal(plans: Sequence[Mapping[str, Any]]) -> None:
    """Raise PlanMismatchError unless the plans of all ranks (as dictionaries, by rank) are equal."""
    flat = [flatten(plan) for plan in plans]
    complaints = []
    for key in dict.fromkeys(key for plan in flat for key in plan):
        by_value: dict[str, list[int]] = {}
        for rank, plan in enumerate(flat):
            by_value.setdefault(repr(plan.get(key)), []).append(rank)
        if len(by_value) > 1:
            values = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
            complaints.append(f"{key}: {values}")
    if complaints:
        raise PlanMismatchError(
            "these values must be the same on every rank and are not: " + " | ".join(complaints)
        )
