"""Small plots as SVG text, without any library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 30, 44
COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#8d6a9f", "#555555", "#00798c")
Points = Sequence[tuple[float, float]]


def lines(title: str, x_name: str, y_name: str, series: Mapping[str, Points]) -> str:
    """Both axes logarithmic; one line with dots for each series."""
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points]
    if not xs:
        return ""
    low, high = _decades(min(ys), max(ys))
    shift = _scale(min(xs), max(xs), LEFT + 12, WIDTH - RIGHT - 12)
    drop = _scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_text(shift(x), HEIGHT - BOTTOM + 16, f"{x:g}", "middle") for x in xs]
    for tick in _ticks(low, high):
        parts.append(_rule(drop(tick)) + _text(LEFT - 6, drop(tick) + 4, f"{tick:g}", "end"))
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{shift(x):.1f},{drop(y):.1f}" for x, y in sorted(points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in points:
            parts.append(
                f'<circle cx="{shift(x):.1f}" cy="{drop(y):.1f}" r="3" fill="{colour}">'
                f"<title>{escape(name)}: {y:.4g} at {x:g}</title></circle>"
            )
        at = TOP + 10 + 18 * number
        parts.append(f'<rect x="{WIDTH - RIGHT + 10}" y="{at - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT + 26, at, name, "start"))
    return _frame(title, x_name, y_name, parts)


def bars(title: str, y_name: str, values: Mapping[str, float]) -> str:
    """Horizontal bars from 0, each with its value."""
    if not values:
        return ""
    room, tall = 210, 26
    height = TOP + tall * len(values) + 30
    scale = (WIDTH - room - 60) / max(values.values())
    parts = [_text(WIDTH / 2, 18, title, "middle", bold=True)]
    for number, (name, value) in enumerate(values.items()):
        at = TOP + tall * number
        colour = COLOURS[number % len(COLOURS)]
        parts.append(_text(room - 8, at + 15, name, "end"))
        parts.append(
            f'<rect x="{room}" y="{at + 3}" width="{value * scale:.1f}" height="{tall - 8}" fill="{colour}"/>'
        )
        parts.append(_text(room + value * scale + 6, at + 16, f"{value:.3g}", "start"))
    parts.append(_text(WIDTH / 2, height - 8, y_name, "middle"))
    return _svg(height, parts)


def _scale(low: float, high: float, begin: float, end: float) -> _Log:
    return _Log(low, high, begin, end)


class _Log:
    """From a value between low and high to a place between begin and end."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self._low, self._begin, self._end = math.log(low), begin, end
        self._span = math.log(high) - self._low

    def __call__(self, value: float) -> float:
        share = (math.log(value) - self._low) / self._span if self._span else 0.5
        return self._begin + share * (self._end - self._begin)


def _ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first < 4 else (1,)
    every = (10.0**power * step for power in range(first, last + 1) for step in steps)
    return [tick for tick in every if low * 0.999 <= tick <= high * 1.001]


def _decades(low: float, high: float) -> tuple[float, float]:
    """Widened to the next 1, 2 or 5."""
    steps = [10.0**power * step for power in range(-4, 10) for step in (1, 2, 5)]
    below = max((s for s in steps if s <= low), default=low)
    above = min((s for s in steps if s >= high), default=high)
    return below, above if above > below else below * 2


def _rule(y: float) -> str:
    return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _frame(title: str, x_name: str, y_name: str, parts: Sequence[str]) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    turned = (
        f'<text x="16" y="{HEIGHT / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {HEIGHT / 2})">{escape(y_name)}</text>'
    )
    heading = _text(middle, 18, title, "middle", bold=True)
    return _svg(HEIGHT, [heading, _text(middle, HEIGHT - 8, x_name, "middle"), turned, *parts])


def _svg(height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'font-family="sans-serif" font-size="12">{"".join(parts)}</svg>'
    )
