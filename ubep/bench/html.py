"""The page: plots, the table, and how the figures came about. Needs jinja2 (the extra `ubep[plot]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ubep.bench import svg
from ubep.bench.blocks import MIN_BLOCKS, ROUNDS, WARMUP
from ubep.bench.report import Summary
from ubep.errors import UbepError

INSTALL_HINT = "the HTML page needs jinja2: pip install 'ubep[plot]'"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 sans-serif; max-width: 1120px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse }
td, th { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right }
td.l, th.l { text-align: left } .plots { display: flex; flex-wrap: wrap; gap: 1em } .warn { color: #b00 }
</style></head><body>
<h1>{{ title }}</h1>
{% if emulated %}<p class="warn"><b>Emulated link:</b> {{ emulated }}. These are real ranks and flags,
but bytes take as long as the link's description says; nothing here was measured on such a link.</p>
{% endif %}
<p>{{ cpu }}, {{ cores }} usable cores, kernel {{ kernel }};
{% for name, v in versions.items() %}{{ name }} {{ v }}{{ ", " if not loop.last }}{% endfor %}.</p>
<div class="plots">{% for plot in plots %}{{ plot | safe }}{% endfor %}</div>
<h2>Figures</h2>
<table><tr><th>ranks</th><th>tokens</th><th>hidden</th><th>bytes</th><th class="l">contestant</th>
<th>med µs</th><th>p99 µs</th><th>ratio to {{ base }}</th><th>quartiles</th><th class="l"></th></tr>
{% for s in summaries %}{% for f in s.figures %}<tr><td>{{ s.case.ranks }}</td><td>{{ s.case.tokens }}</td>
<td>{{ s.case.hidden }}</td><td>{{ s.case.moved_bytes }}</td><td class="l">{{ f.label }}</td>
<td>{{ "%.1f" | format(f.median_us) }}</td><td>{{ "%.1f" | format(f.p99_us) }}</td>
<td>{% if f.ratio %}{{ "%.2f" | format(f.ratio.median) }}{% endif %}</td>
<td>{% if f.ratio %}{{ "%.2f" | format(f.ratio.low) }} to {{ "%.2f" | format(f.ratio.high) }}{% endif %}</td>
<td class="l warn">{{ "noisy" if s.noisy }}</td></tr>
{% endfor %}{% endfor %}</table>
{% if skipped %}<h2>Not measured</h2><ul>{% for name, why in skipped.items() %}<li>{{ name }}: {{ why }}</li>
{% endfor %}</ul>{% endif %}
<h2>How</h2>
<p>One job holds all contestants. A block is {{ rounds }} rounds of one contestant, of which the first
{{ warmup }} are thrown away; at least {{ blocks }} blocks each, in random order. A round is dispatch, an
expert that reads and writes every received row, and combine, with three routings in rotation; its time is
the last rank's end minus the first rank's start. A ratio is the median over paired blocks. Samples during
which others used the machine, the host took time, or the cores moved apart were repeated; figures marked
noisy had no quiet sample.</p>
</body></html>
"""


def write(
    path: Path,
    title: str,
    summaries: Sequence[Summary],
    base: str,
    skipped: Mapping[str, str],
    provenance: Mapping[str, Any],
    emulated: str = "",
) -> None:
    """The page, into one file that needs nothing else. Raises UbepError without jinja2."""
    try:
        import jinja2
    except ImportError:
        raise UbepError(INSTALL_HINT) from None
    page = jinja2.Environment(autoescape=True).from_string(PAGE)
    text = page.render(
        title=title,
        summaries=summaries,
        base=base,
        skipped=skipped,
        emulated=emulated,
        cpu=provenance["cpu"],
        cores=len(provenance["usable_cores"]),
        kernel=provenance["kernel"],
        versions=provenance["versions"],
        plots=_ablation(summaries, base) if emulated else _plots(summaries, base),
        rounds=ROUNDS,
        warmup=WARMUP,
        blocks=MIN_BLOCKS,
    )
    path.write_text(text)


def _plots(summaries: Sequence[Summary], base: str) -> list[str]:
    """Latency over tokens for each (ranks, hidden); ratio over ranks for each (tokens, hidden)."""
    latency: dict[tuple[int, int], dict[str, list[tuple[float, float]]]] = {}
    ratio: dict[tuple[int, int], dict[str, list[tuple[float, float]]]] = {}
    for summary in summaries:
        case = summary.case
        for figure in summary.figures:
            series = latency.setdefault((case.ranks, case.hidden), {})
            series.setdefault(figure.label, []).append((case.tokens, figure.median_us))
            if figure.ratio is not None:
                series = ratio.setdefault((case.tokens, case.hidden), {})
                series.setdefault(figure.label, []).append((case.ranks, figure.ratio.median))
    plots = [
        svg.lines(f"{ranks} ranks, hidden {hidden}", "tokens of a rank", "median µs", series)
        for (ranks, hidden), series in latency.items()
    ]
    plots += [
        svg.lines(f"{tokens} tokens, hidden {hidden}", "ranks", f"time over {base}", series)
        for (tokens, hidden), series in ratio.items()
    ]
    return plots


def _ablation(summaries: Sequence[Summary], base: str) -> list[str]:
    """How much faster than the base each variant is."""
    plots = []
    for summary in summaries:
        case = summary.case
        speedups = {f.label: 1 / f.ratio.median if f.ratio else 1.0 for f in summary.figures}
        title = f"emulated link: {case.ranks} ranks, {case.tokens} tokens, hidden {case.hidden}"
        plots.append(svg.bars(title, f"times faster than {base} (emulated)", speedups))
    return plots
