"""The main job: an MoE layer over several ranks on recorded routing, checked against a dense computation."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ubep.communicator import Communicator
from ubep.expert_parallel import ExpertParallel
from ubep.protocol.reduction import reduce_rows
from ubep.routing_file import Routing
from ubep.trace import TraceEvent, Tracer
from ubep.workload import DTYPES

EXPANSION = 2  # width of an expert's inner layer over hidden
# Sums of K terms rounded once to the dtype, and expert inputs rounded once more where rows are quantised.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
QUANTISED_TOLERANCE = 0.2
PHASES = {
    "pack": ("PackHeader", "Pack", "Publish"),
    "send": ("Put", "Signal"),
    "place": ("Hear", "Settle", "Place", "Fetch"),
    "reduce": ("Finish",),
}


@dataclass(frozen=True)
class Job:
    """What is to run: `routing`, its tokens cut into one contiguous shard for each rank."""

    routing: Routing
    world_size: int
    dtype: str = "float32"
    quantise: str = "none"
    seed: int = 0

    def shard(self, layer: int, rank: int) -> slice:
        """This rank's tokens of a layer; shards differ by at most one token."""
        tokens = len(self.routing.layers[layer].topk_idx)
        return slice(rank * tokens // self.world_size, (rank + 1) * tokens // self.world_size)

    @property
    def max_tokens(self) -> int:
        most = max(len(layer.topk_idx) for layer in self.routing.layers)
        return -(-most // self.world_size)

    def tokens(self, layer: int) -> Tensor:
        """All tokens of a layer, [T, hidden] of the job's dtype."""
        generator = torch.Generator().manual_seed(self.seed + layer)
        shape = (len(self.routing.layers[layer].topk_idx), self.routing.hidden)
        rows = torch.randn(shape, generator=generator)
        return rows.to(DTYPES[self.dtype])


class ExpertMLP:
    """A gated MLP, down(silu(gate(x)) * up(x)), whose weights follow from its id: any rank can make it."""

    def __init__(self, expert: int, hidden: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + expert)
        inner = EXPANSION * hidden
        self.gate, self.up = (torch.randn(inner, hidden, generator=generator) / hidden**0.5 for _ in range(2))
        self.down = torch.randn(hidden, inner, generator=generator) / inner**0.5

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.float()
        inner = silu(rows @ self.gate.T) * (rows @ self.up.T)
        out: Tensor = inner @ self.down.T
        return out.to(x.dtype)


@dataclass
class RankReport:
    """What one rank did, summed over the layers. Times in seconds."""

    rank: int
    tokens: int = 0
    rows: int = 0
    experts_hit: int = 0
    chunks: int = 0
    flags: int = 0
    moved_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    sent_to: list[int] = field(default_factory=list)
    expert_rows: dict[int, int] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    events: list[TraceEvent] = field(default_factory=list)
    backend: str = ""
    reason: str = ""
    rejected: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, str] = field(default_factory=dict)


def run_rank(comm: Communicator, job: Job, progress: Any) -> RankReport:
    """All layers on one rank. progress: a shared counter that rank 0 raises after each layer."""
    routing = job.routing
    layer = comm.expert_parallel(
        num_experts=routing.num_experts,
        hidden=routing.hidden,
        topk=routing.topk,
        max_tokens=job.max_tokens,
        dtype=job.dtype,
        quantise=job.quantise,
    )
    layer.tracer = Tracer()
    experts = [ExpertMLP(expert, routing.hidden, job.seed) for expert in layer.local_experts]
    report = RankReport(comm.rank, sent_to=[0] * comm.world_size, decisions=dict(layer.plan.decisions))
    if comm.choice is not None:
        report.backend, report.reason = comm.choice.backend.name, comm.choice.reason
        report.rejected = comm.choice.rejected
    spent: dict[str, float] = defaultdict(float)
    for index in range(len(routing.layers)):
        report.outputs.append(_one_layer(layer, experts, job, index, report, spent))
        if comm.rank == 0 and progress is not None:
            progress.value += 1
    report.events = layer.tracer.events
    report.experts_hit = sum(rows > 0 for rows in report.expert_rows.values())
    _count(report, spent)
    return report


def _one_layer(
    layer: ExpertParallel,
    experts: Sequence[ExpertMLP],
    job: Job,
    index: int,
    report: RankReport,
    spent: dict[str, float],
) -> Tensor:
    shard = job.shard(index, report.rank)
    routing = job.routing.layers[index]
    topk_idx = routing.topk_idx[shard]
    begin = time.perf_counter()
    received = layer.dispatch(job.tokens(index)[shard], topk_idx, routing.topk_weights[shard])
    dispatched = time.perf_counter()
    y = torch.zeros_like(received.x)
    for local, expert in enumerate(experts):
        first = int(received.expert_offsets[local])
        rows = slice(first, first + int(received.expert_counts[local]))
        y[rows] = expert(received.x[rows])
    computed = time.perf_counter()
    out: Tensor = layer.combine(y, received.handle)
    spent["dispatch"] += dispatched - begin
    spent["experts"] += computed - dispatched
    spent["combine"] += time.perf_counter() - computed
    report.tokens += len(topk_idx)
    report.rows += int(received.expert_counts.sum())
    for expert_id, rows_ in zip(layer.local_experts, received.expert_counts.tolist(), strict=True):
        report.expert_rows[expert_id] = report.expert_rows.get(expert_id, 0) + rows_
    owners = layer.plan.experts.owner[topk_idx[topk_idx >= 0]]
    for peer, count in enumerate(torch.bincount(owners, minlength=layer.plan.world_size).tolist()):
        report.sent_to[peer] += count
    return out


def _count(report: RankReport, spent: dict[str, float]) -> None:
    """Chunks, flags, bytes and times by phase out of the trace; waiting is what is left of the two."""
    names = Counter(event.action for event in report.events)
    report.chunks, report.flags = names["Pack"] + names["Fetch"], names["Signal"]
    report.moved_bytes = sum(event.nbytes for event in report.events if event.peer != report.rank)
    for phase, actions in PHASES.items():
        spent[phase] = sum(e.end - e.begin for e in report.events if e.action in actions)
    busy = sum(spent[phase] for phase in PHASES)
    spent["wait"] = max(0.0, spent["dispatch"] + spent["combine"] - busy)
    report.seconds = dict(spent)


def dense(job: Job, layer: int) -> Tensor:
    """The same layer on one process, without any communication: sum_k w_k expert_k(x), float32 sums."""
    routing, x = job.routing.layers[layer], job.tokens(layer)
    rows = torch.zeros(len(x), job.routing.topk, job.routing.hidden, dtype=x.dtype)
    for expert in range(job.routing.num_experts):
        token, k = (routing.topk_idx == expert).nonzero(as_tuple=True)
        if len(token):
            rows[token, k] = ExpertMLP(expert, job.routing.hidden, job.seed)(x[token])
    return reduce_rows(rows, routing.topk_weights, routing.topk_idx >= 0, x.dtype)


def largest_error(job: Job, reports: Sequence[RankReport], advance: Any) -> float:
    """Largest difference to the dense computation, relative to the largest dense value of its layer."""
    worst = 0.0
    for index in range(len(job.routing.layers)):
        want = dense(job, index).float()
        got = torch.cat([report.outputs[index] for report in reports]).float()
        error = (got - want).abs().max() / want.abs().max().clamp(min=1e-30)
        worst = max(worst, float(error.nan_to_num(float("inf"))))
        advance()
    return worst


def tolerance(job: Job) -> float:
    """The largest error that counts as equal."""
    return TOLERANCE[job.dtype] if job.quantise == "none" else QUANTISED_TOLERANCE
