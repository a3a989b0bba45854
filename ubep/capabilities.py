"""What a backend declares that it can do: plain data that users can query before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ubep.protocol.chunking import Link
from ubep.workload import CombineSemantics, Quantisation, ReceiveLayout, Workload

Placement = Literal["staged", "direct"]
Signalling = Literal["word", "fused", "checksum", "sentinel"]


@dataclass(frozen=True)
class Capabilities:
    """Declared abilities and limits. None as a limit means "no limit of the backend's own".

    placements: what it carries out, best first.
    get: one-sided reads.  ordered: signals to one peer arrive in the order they were sent.
    release: a signal is seen only after every earlier put to that peer (without it only the
        "checksum" signalling is sound).
    atomic_block: largest aligned block, in bytes, that a put writes whole; 1: none; decides "fused".
    flag_stride: distance in bytes that keeps flags of different sources apart.
    stream / graph_capture: works in stream order / inside a captured graph.
    deterministic: results are bit-identical to the reduction order stated in the protocol.
    fused_kernels: brings native dispatch and combine beside the fabric's primitives.
    staged_up_to: bytes of rows that a rank sends in one operation, up to which slots with deduplication
        are faster than final places, where a token's experts lie on few ranks.
    links: what is known of each tier's link, by tier name; used to choose chunk sizes.
    """

    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    quantise: tuple[Quantisation, ...] = ("none", "fp8", "int8")
    receive_layouts: tuple[ReceiveLayout, ...] = ("token-expert", "token-rank")
    combine: tuple[CombineSemantics, ...] = ("weighted", "sum")
    placements: tuple[Placement, ...] = ("staged",)
    max_hidden: int | None = None
    hidden_multiple: int = 1
    max_topk: int | None = None
    max_ranks: int | None = None
    max_workers: int = 1
    get: bool = False
    ordered: bool = True
    release: bool = True
    stream: bool = False
    graph_capture: bool = False
    deterministic: bool = True
    fused_kernels: bool = False
    atomic_block: int = 8
    flag_stride: int = 64
    staged_up_to: int = 0
    links: Mapping[str, Link] = field(default_factory=dict)

    def signalling(self) -> tuple[Signalling, ...]:
        """The signalling modes that are sound on this transport, best first."""
        modes: list[Signalling] = ["word"] if self.release else []
        if self.atomic_block >= 8:
            modes += ["fused", "sentinel"]
        return (*modes, "checksum")

    def refusal(self, workload: Workload, world_size: int) -> tuple[str, str] | None:
        """None if the workload fits, else (capability, reason with both values)."""
        w = workload
        limits = (
            ("max_hidden", w.hidden, self.max_hidden),
            ("max_topk", w.topk, self.max_topk),
            ("max_ranks", world_size, self.max_ranks),
        )
        for name, value, limit in limits:
            if limit is not None and value > limit:
                return name, f"{name.removeprefix('max_')} {value} is above the limit {limit}"
        if w.hidden % self.hidden_multiple:
            return "hidden_multiple", f"hidden {w.hidden} is not a multiple of {self.hidden_multiple}"
        choices: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("dtypes", w.dtype, self.dtypes),
            ("quantise", w.quantise, self.quantise),
            ("receive_layouts", w.receive_layout, self.receive_layouts),
            ("combine", w.combine, self.combine),
        )
        for name, choice, allowed in choices:
            if choice not in allowed:
                return name, f"{name}: {choice} is not one of {', '.join(allowed)}"
        return None
