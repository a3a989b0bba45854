"""`ubep bench`: ubep against its peers, or against itself on an emulated link."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ubep import registry
from ubep.bench import html, link, report, start
from ubep.bench.case import Case
from ubep.bench.contestants import Variant
from ubep.bench.job import PEERS, PROGRESS_STEPS, Sample, Spec
from ubep.config import Config, resolve
from ubep.errors import BackendUnavailableError, InvalidInputError, UbepError

POLL_SECONDS = 0.1
WIDE = 4096  # columns from which on models have 256 experts
TIMEOUT_S = 3600.0  # of one launch


def bench(
    backend: Annotated[
        str | None, typer.Option(help="Name of an installed backend (default: configured).")
    ] = None,
    peer: Annotated[str, typer.Option(help=f"Peers, of {', '.join(PEERS)}.")] = ",".join(PEERS),
    ranks: Annotated[str, typer.Option(help="Ranks, as processes of this machine: N,...")] = "2",
    tokens: Annotated[str, typer.Option(help="Tokens of each rank: T,...")] = "8,32,128",
    hidden: Annotated[str, typer.Option(help="Columns of a token: H,...")] = "2048,7168",
    experts: Annotated[int | None, typer.Option(help="Experts (default: 128; 256 if H is large).")] = None,
    topk: Annotated[int, typer.Option(help="Experts of a token.")] = 8,
    launches: Annotated[int, typer.Option(min=1, help="Fresh jobs; 3 for figures to quote.")] = 1,
    seconds: Annotated[float, typer.Option(help="At least this long for each case and launch.")] = 1.0,
    attempts: Annotated[int, typer.Option(min=1, help="At a sample, while the machine is noisy.")] = 3,
    quiet: Annotated[float, typer.Option(help="Seconds to wait, at most, for a quiet machine.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of tokens, routing and the order of blocks.")] = 0,
    link_file: Annotated[
        Path | None, typer.Option("--link", help="Ablation on the emulated link in this TOML file.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with plots.")] = None,
) -> None:
    """Measure dispatch and combine against other ways to move the same rows, as ratios in one job.

    Every contestant's output is checked. Samples during which the machine was not quiet are repeated;
    if none was quiet, the figures are marked noisy.

    Examples:  ubep bench --peer mpi,memcpy --launches 3   |   ubep bench --link link.toml --ranks 4
    """
    console = Console()
    config = resolve({"backend": backend} if backend else {}).config
    start.check_backend(config.backend)
    counts = _numbers(ranks, "--ranks")
    sizes = [(t, h) for h in _numbers(hidden, "--hidden") for t in _numbers(tokens, "--tokens")]
    cases = {count: tuple(_case(count, t, h, experts, topk, seed) for t, h in sizes) for count in counts}
    variants: tuple[Variant, ...] = (Variant("ubep"),)
    base, emulated = "ubep", ""
    peers, skipped = start.choose_peers([name for name in peer.split(",") if name], max(counts))
    if link_file is not None:
        variants = link.variants(config, _concrete(config), link.read(link_file))
        base, emulated, peers, skipped = link.BASE, str(link_file), (), {}
    for name, reason in skipped.items():
        console.print(f"Skipped {name}: {reason}", soft_wrap=True, highlight=False)
    specs = [
        Spec(own, peers, config, variants, seconds=seconds, attempts=attempts, quiet_s=quiet, launch=launch)
        for launch in range(launches)
        for own in cases.values()
    ]
    samples = run(specs, console)
    summaries = report.summarise(samples, base)
    skipped |= {name: why for summary in summaries for name, why in summary.skipped.items()}
    title = "ubep bench" + (f", emulated link {emulated}" if emulated else "")
    console.print(report.table(summaries, base, title))
    _remarks(console, samples, summaries, skipped)
    if json_file is not None:
        more: dict[str, Any] = {"emulated": emulated, "seed": seed, "launches": launches}
        json_file.write_text(json.dumps(report.as_json(samples, summaries, base, skipped, **more), indent=1))
    if html_file is not None:
        html.write(html_file, title, summaries, base, skipped, report.provenance(), emulated)
        console.print(f"Page with plots: {html_file}", soft_wrap=True)


def run(specs: list[Spec], console: Console) -> list[Sample]:
    """All launches, with a progress bar. Raises LaunchError."""
    samples: list[Sample] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    total = sum(len(spec.cases) for spec in specs) * PROGRESS_STEPS
    with tempfile.TemporaryDirectory(prefix="ubep-") as name, Progress(*columns, console=console) as bar:
        folder, done = Path(name), 0
        task = bar.add_task("bench", total=total)
        for spec in specs:
            bar.update(task, description=f"launch {spec.launch + 1}, {spec.cases[0].ranks} ranks")
            with _following(partial(_update, bar, task, folder, done)):
                samples += [Sample(**sample) for sample in start.start(spec, folder, TIMEOUT_S)]
            done += len(spec.cases) * PROGRESS_STEPS
            bar.update(task, completed=done)
    return samples


def _update(bar: Progress, task: TaskID, folder: Path, done: int) -> None:
    bar.update(task, completed=done + start.progress(folder))


class _following:  # noqa: N801 (a context manager, used as a word)
    """Calls a function every POLL_SECONDS."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            self._look()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


def _numbers(text: str, option: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{text!r} is not like '8,32,128'", param_hint=option)
    return found


def _case(ranks: int, tokens: int, hidden: int, experts: int | None, topk: int, seed: int) -> Case:
    count = experts or (256 if hidden >= WIDE else 128)
    if count % ranks or topk > count:
        raise InvalidInputError(
            f"{count} experts must be a multiple of {ranks} ranks and at least topk {topk}"
        )
    return Case(ranks, tokens, hidden, count, topk, seed=seed)


def _concrete(config: Config) -> str:
    """The name of the backend that "auto" comes to, for its options."""
    for entry in registry.discover():
        if entry.probe.available and config.backend in ("auto", entry.name):
            return entry.name
    raise BackendUnavailableError(f"backend {config.backend!r} cannot run here; see `ubep backends`")


def _remarks(
    console: Console, samples: list[Sample], summaries: list[report.Summary], skipped: dict[str, str]
) -> None:
    for name, reason in skipped.items():
        console.print(f"Not measured, {name}: {reason}", soft_wrap=True, highlight=False)
    for label, mean in report.means(summaries).items():
        console.print(f"Geometric mean of ratios, {label}: {mean:.2f}", soft_wrap=True)
    pings = [f"{s.pingpong_ns:.0f}" for s in summaries if s.pingpong_ns]
    if pings:
        console.print(f"Core to core, one way, by case: {', '.join(pings)} ns (interpreter included)")
    rejected = [reason for sample in samples for reasons in sample.rejected for reason in reasons]
    loud = [reason for sample in samples for reason in sample.objections]
    if rejected or loud:
        console.print(f"Attempts rejected for noise: {len(rejected)}; samples kept though noisy: {len(loud)}")
    if not samples:
        raise UbepError("nothing was measured")
