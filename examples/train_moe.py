"""Train a small MoE language model, expert-parallel over processes, on text that every machine has.

The text is Python's own documentation and licence. Dense parameters are replicated and their gradients
summed over ranks; experts live on one rank each, and their gradients come home through ubep. With
--check the same model is trained on one process without ubep, and the losses must agree. Sums in another
order differ in their last bits, which can turn a near-tie between two experts, and with it the training.
So the one process repeats the ranks' choices of experts, and each must be within a tolerance of its own.

    python examples/train_moe.py --ranks 4 --check
    python examples/train_moe.py --steps 400 --record routing.safetensors
"""

from __future__ import annotations

import pydoc_data.topics
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import ubep
from ubep.routing_file import Layer, Routing, save

VOCABULARY = 256  # bytes
HIDDEN = 128
HEADS = 4
LAYERS = 3
EXPERTS = 16
TOPK = 4
CONTEXT = 64
BALANCE = 0.01  # weight of the load-balancing loss
LOSS_TOLERANCE = 1e-4  # float32 sums in another order, amplified by the optimiser's steps
CHOICE_TOLERANCE = 1e-4  # probability by which a repeated expert may fall short of the best TOPK

Choices = list[Tensor]  # for each layer the experts of every token; [T, K]


@dataclass(frozen=True)
class Job:
    """What every rank is told."""

    steps: int
    batch: int  # sequences in a step, over all ranks
    record_tokens: int
    seed: int = 0


def text() -> Tensor:
    """Python's documentation topics and its licence, as bytes; uint8 [n]."""
    topics = pydoc_data.topics.topics
    parts = [topics[name] for name in sorted(topics)]
    licence = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    if licence.is_file():
        parts.append(licence.read_text())
    return torch.frombuffer(bytearray("\n".join(parts).encode()), dtype=torch.uint8)


class Experts(nn.Module):
    """Some experts, side by side: down(silu(up(x))). Weights follow from the expert's id."""

    def __init__(self, ids: list[int], seed: int) -> None:
        super().__init__()
        self.up, self.down = nn.ParameterList(), nn.ParameterList()
        for expert in ids:
            generator = torch.Generator().manual_seed(seed * 1000 + expert)
            self.up.append(torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) / HIDDEN**0.5)
            self.down.append(torch.randn(2 * HIDDEN, HIDDEN, generator=generator) / (2 * HIDDEN) ** 0.5)

    def forward(self, local: int, rows: Tensor) -> Tensor:
        return silu(rows @ self.up[local]) @ self.down[local]


Exchange = Callable[[Experts, Tensor, Tensor, Tensor], Tensor]


def through_ubep(layer: ubep.ExpertParallel) -> Exchange:
    """Tokens travel to the ranks of their experts and back."""

    def exchange(experts: Experts, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        received = layer.dispatch(x, idx, weights)
        rows = received.x.split(received.expert_counts.tolist())
        y = torch.cat([experts(local, part) for local, part in enumerate(rows)])
        out: Tensor = layer.combine(y, received.handle)
        return out

    return exchange


def dense(experts: Experts, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    """All experts on this process: no ubep anywhere."""
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, k = (idx == expert).nonzero(as_tuple=True)
        out = out.index_add(0, token, experts(expert, x[token]) * weights[token, k, None])
    return out


class Block(nn.Module):
    """Causal attention, then a mixture of experts."""

    def __init__(self, ids: list[int], exchange: Exchange, seed: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts(ids, seed)
        self.exchange = exchange

    def forward(self, x: Tensor, repeat: Tensor | None) -> tuple[Tensor, Tensor, Layer]:
        """[B, C, H] -> (same shape, router probabilities [T, E], the routing: chosen or repeated)."""
        b, c, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, c, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, c, h)
        )
        tokens = self.norm2(x).view(b * c, h)
        probabilities = self.router(tokens).softmax(-1)
        idx = probabilities.topk(TOPK).indices if repeat is None else repeat.long()
        weights = probabilities.gather(-1, idx)
        weights = weights / weights.sum(-1, keepdim=True)
        routed = self.exchange(self.experts, tokens, idx, weights)
        return x + routed.view(b, c, h), probabilities, Layer(idx, weights.detach())


class Model(nn.Module):
    """A byte-level language model. The same seed gives the same parameters, whichever experts are local."""

    def __init__(self, ids: list[int], exchanges: list[Exchange], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Parameter(torch.randn(CONTEXT, HIDDEN) * 0.02)
        self.blocks = nn.ModuleList(Block(ids, e, seed + 1 + i) for i, e in enumerate(exchanges))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(
        self, tokens: Tensor, repeat: Choices | None = None
    ) -> tuple[Tensor, list[Tensor], list[Layer]]:
        x = self.embed(tokens) + self.position
        probabilities, routing = [], []
        for i, block in enumerate(self.blocks):
            x, p, layer = block(x, repeat[i] if repeat else None)
            probabilities.append(p)
            routing.append(layer)
        return self.head(x), probabilities, routing

    def shared_parameters(self) -> Iterator[nn.Parameter]:
        """All but the experts."""
        return (p for name, p in self.named_parameters() if ".experts." not in name)


def batch(data: Tensor, job: Job, step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """This rank's share of the step's sequences; shares differ by at most one. (inputs, targets)"""
    generator = torch.Generator().manual_seed(job.seed * 100_003 + step)
    starts = torch.randint(len(data) - CONTEXT - 1, (job.batch,), generator=generator)
    mine = starts[rank * job.batch // world_size : (rank + 1) * job.batch // world_size]
    rows = data[mine[:, None] + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def global_sum(values: Tensor, world_size: int) -> Tensor:
    """Sum over ranks, without gradient."""
    values = values.detach().clone()
    if world_size > 1:
        dist.all_reduce(values)
    return values


def shortfall(probabilities: Tensor, idx: Tensor) -> float:
    """How far the least likely expert of any token's idx falls short of the TOPK-th best."""
    gap = probabilities.topk(TOPK).values[:, -1] - probabilities.gather(-1, idx).amin(-1)
    return float(gap.max()) if len(gap) else 0.0


@dataclass
class Course:
    """What a training came to, by step: loss over all ranks, this rank's choices, their worst shortfall."""

    losses: list[float] = field(default_factory=list)
    choices: list[Choices] = field(default_factory=list)
    shortfall: float = 0.0


def train(
    model: Model, data: Tensor, job: Job, rank: int, world_size: int, repeat: list[Choices] | None = None
) -> Course:
    """Train, repeating the given choices of experts if there are any."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    course = Course()
    steps = range(job.steps)
    for step in track(steps, f"training on {world_size} rank(s)") if rank == 0 else steps:
        inputs, targets = batch(data, job, step, rank, world_size)
        logits, probabilities, routing = model(inputs, repeat[step] if repeat else None)
        tokens = job.batch * CONTEXT
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens
        # Share of the pairs of an expert over all ranks, times this rank's part of its mean probability:
        # linear in what is local, so that the sum over ranks is the loss of one process.
        balance = torch.zeros(())
        for p, layer in zip(probabilities, routing, strict=True):
            course.shortfall = max(course.shortfall, shortfall(p.detach(), layer.topk_idx))
            share = torch.bincount(layer.topk_idx.flatten(), minlength=EXPERTS).float()
            share = global_sum(share, world_size) / (tokens * TOPK)
            balance = balance + EXPERTS * (share * p.sum(0) / tokens).sum()
        optimiser.zero_grad()
        (loss + BALANCE * balance).backward()
        for parameter in model.shared_parameters():
            if world_size > 1:
                dist.all_reduce(parameter.grad)
        optimiser.step()
        course.losses.append(float(global_sum(loss, world_size)))
        course.choices.append([layer.topk_idx.to(torch.uint8) for layer in routing])
    return course


def train_rank(comm: ubep.Communicator, job: Job) -> tuple[Course, list[Layer]]:
    """One rank: its experts, its share of every batch, its share of the recorded routing."""
    data = text()
    most = (
        max(-(-job.batch // comm.world_size), -(-job.record_tokens // CONTEXT // comm.world_size)) * CONTEXT
    )
    layers = [
        comm.expert_parallel(
            num_experts=EXPERTS, hidden=HIDDEN, topk=TOPK, max_tokens=most, dtype=torch.float32
        )
        for _ in range(LAYERS)
    ]
    model = Model(layers[0].local_experts, [through_ubep(layer) for layer in layers], job.seed)
    course = train(model, data, job, comm.rank, comm.world_size)
    last = Job(1, job.record_tokens // CONTEXT, 0, job.seed + 1)
    with torch.no_grad():
        inputs, _ = batch(data, last, 0, comm.rank, comm.world_size)
        return course, model(inputs)[2]


def compare(console: Console, courses: list[Course], job: Job) -> bool:
    """Train again on one process without ubep; show both losses. Whether they agree."""
    torch.set_num_threads(1)
    by_step = zip(*(course.choices for course in courses), strict=True)
    repeat = [[torch.cat(shards) for shards in zip(*ranks, strict=True)] for ranks in by_step]
    model = Model(list(range(EXPERTS)), [dense] * LAYERS, job.seed)
    reference = train(model, text(), job, 0, 1, repeat)
    losses, alone = courses[0].losses, reference.losses
    table = Table("step", "loss over ranks", "loss on one process", title="the same model, twice")
    shown = sorted({*range(0, job.steps, max(1, job.steps // 8)), job.steps - 1})
    for step in shown:
        table.add_row(str(step), f"{losses[step]:.6f}", f"{alone[step]:.6f}")
    console.print(table)
    worst = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    agree = worst <= LOSS_TOLERANCE and reference.shortfall <= CHOICE_TOLERANCE
    console.print(f"shortfall of choices {reference.shortfall:.1e} (tolerance {CHOICE_TOLERANCE:.0e})")
    verdict = "equal" if agree else "DIFFERENT"
    console.print(f"largest difference {worst:.1e} (tolerance {LOSS_TOLERANCE:.0e}): {verdict}")
    return agree


def main(
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 40,
    batch_size: Annotated[int, typer.Option(help="Sequences in a step, over all ranks.")] = 14,
    check: Annotated[bool, typer.Option(help="Train on one process too, and compare.")] = False,
    record: Annotated[Path | None, typer.Option(help="Write the routing of a last batch.")] = None,
    record_tokens: Annotated[int, typer.Option(help="Tokens of that batch.")] = 2048,
) -> None:
    """Train a small MoE language model, expert-parallel through ubep. Exit status 1 if --check fails.

    Example:  python examples/train_moe.py --ranks 4 --steps 200 --check --record routing.safetensors
    """
    console = Console()
    job = Job(steps, batch_size, record_tokens)
    results = ubep.launch(train_rank, ranks, (job,), timeout_s=3600)
    courses = [course for course, _ in results]
    losses = courses[0].losses
    console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a byte in {steps} steps on {ranks} ranks")
    if record is not None:
        layers = []
        for shards in zip(*(routing for _, routing in results), strict=True):
            idx = torch.cat([shard.topk_idx for shard in shards])
            layers.append(Layer(idx, torch.cat([shard.topk_weights for shard in shards])))
        model = f"byte-level MoE language model, {steps} steps of examples/train_moe.py"
        save(record, Routing(EXPERTS, TOPK, HIDDEN, layers, model, "Python documentation topics and licence"))
        console.print(f"routing of {len(layers)} layers written to {record}")
    if check and not compare(console, courses, job):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
