"""`ubep run`: the main job, with a table, a picture and a trace."""

from __future__ import annotations

import json
import multiprocessing
import threading
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ubep import __version__, plots, routing_file
from ubep.config import resolve
from ubep.errors import UbepError
from ubep.launch import launch
from ubep.moe_job import Job, RankReport, largest_error, run_rank, tolerance
from ubep.trace import write_trace

POLL_SECONDS = 0.05
TIMES = ("pack", "send", "wait", "place", "experts", "reduce")


def run(
    backend: Annotated[
        str | None, typer.Option(help="Name of an installed backend (default: configured).")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, as processes of this machine.")] = 4,
    routing: Annotated[Path | None, typer.Option(help="Recorded routing (docs/routing-format.md).")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    quantise: Annotated[str, typer.Option(help="Dispatched rows: none, fp8 or int8.")] = "none",
    out: Annotated[Path, typer.Option(help="Folder for the picture and the trace.")] = Path("ubep-run"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures as JSON.")] = None,
) -> None:
    """Run an MoE layer over several ranks and check it against a dense computation.

    Tokens travel to their experts (dispatch), through real expert MLPs, and back (combine). Exit status
    1 if the result differs from the dense one by more than the tolerance of the dtype.

    Examples:  ubep run   |   ubep run --ranks 8 --dtype bfloat16 --quantise fp8 --json run.json
    """
    console = Console()
    torch.set_num_threads(1)  # ranks and the dense check share the cores of one machine
    recorded = routing_file.load(routing or routing_file.DEFAULT)
    config = resolve({"backend": backend} if backend else {}).config
    job = Job(recorded, ranks, dtype, quantise)
    counter = multiprocessing.Value("i", 0)
    layers = len(recorded.layers)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{ranks} ranks", total=layers)
        finished = threading.Event()

        def follow() -> None:
            while not finished.wait(POLL_SECONDS):
                progress.update(task, completed=counter.value)

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            reports = launch(run_rank, ranks, (job, counter), config=config)
        finally:
            finished.set()
            follower.join()
        progress.update(task, completed=layers)
        checking = progress.add_task("dense check", total=layers)
        error = largest_error(job, reports, lambda: progress.advance(checking))
    out.mkdir(parents=True, exist_ok=True)
    write_trace(out / "trace.json", [event for report in reports for event in report.events])
    _show(console, job, reports)
    _picture(console, out / "traffic.png", job, reports)
    console.print(f"Trace for https://ui.perfetto.dev: {out / 'trace.json'}", soft_wrap=True)
    passed = error <= tolerance(job)
    if json_file is not None:
        json_file.write_text(json.dumps(_as_json(job, reports, error, passed), indent=2))
    verdict = "[bold green]equal[/]" if passed else "[bold red]DIFFERENT[/]"
    console.print(f"Largest error against dense: {error:.2e} (tolerance {tolerance(job):.0e}): {verdict}")
    if not passed:
        raise typer.Exit(1)


def _show(console: Console, job: Job, reports: list[RankReport]) -> None:
    first = reports[0]
    console.print(f"Backend [bold]{first.backend}[/]: {first.reason}")
    for name, reason in first.rejected.items():
        console.print(f"  not {name}: {reason}", soft_wrap=True)
    routing = job.routing
    console.print(
        f"{len(routing.layers)} MoE layers, top-{routing.topk} of {routing.num_experts} experts, "
        f"hidden {routing.hidden}, {job.dtype}; routing: {routing.model or 'unnamed'}",
        soft_wrap=True,
    )
    moved = _table("What moved", "tokens in", "rows received", "experts hit", "chunks", "flags", "moved MB")
    times = _table("Time in ms, by phase", *TIMES)
    for r in reports:
        hit = f"{r.experts_hit} of {len(r.expert_rows)}"
        counts = (r.rank, r.tokens, r.rows, hit, r.chunks, r.flags, f"{r.moved_bytes / 1e6:.2f}")
        moved.add_row(*map(str, counts))
        times.add_row(str(r.rank), *(f"{1e3 * r.seconds[name]:.1f}" for name in TIMES))
    console.print(moved, times)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in ("rank", *headings):
        table.add_column(heading, justify="right")
    return table


def _picture(console: Console, path: Path, job: Job, reports: list[RankReport]) -> None:
    load = {expert: rows for report in reports for expert, rows in report.expert_rows.items()}
    title = job.routing.model or "recorded routing"
    try:
        plots.traffic_picture(path, [report.sent_to for report in reports], load, title)
        console.print(f"Picture of who sent what to whom: {path}", soft_wrap=True)
    except UbepError as error:
        console.print(f"No picture: {escape(str(error))}")


def _as_json(job: Job, reports: list[RankReport], error: float, passed: bool) -> dict[str, Any]:
    left_out = {"outputs", "events"}
    return {
        "ubep": __version__,
        "ranks": [{k: v for k, v in vars(report).items() if k not in left_out} for report in reports],
        "dtype": job.dtype,
        "quantise": job.quantise,
        "largest_error": error,
        "tolerance": tolerance(job),
        "passed": passed,
    }
