"""The picture of a quality measurement, as SVG for its page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from html import escape

from polarlm.bench.quality.scores import TEXT
from polarlm.bench.result import Result

# Prefix of a codec's name → its colour, which is seen on a light page and on a dark one.
_COLOURS = {
    "ring": "#ea580c",
    "polarquant": "#3b82f6",
    "polarpair": "#14b8a6",
    "turbo": "#8b5cf6",
    "kivi": "#ca8a04",
    "q": "#7f8793",
    "": "#db2777",  # any other
}
# Outlines of points around (0, 0), since types of a codec have one colour.
_MARKS = (
    "M5 0A5 5 0 1 1 -5 0A5 5 0 1 1 5 0Z",
    "M-4.5 -4.5H4.5V4.5H-4.5Z",
    "M0 -6L6 0L0 6L-6 0Z",
    "M0 -6L5.5 4H-5.5Z",
    "M0 6L5.5 -4H-5.5Z",
    "M6 0L-4 5.5V-5.5Z",
    "M-6 0L4 5.5V-5.5Z",
    "M-2 -6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z",
)
_PLAIN = ":plain"
_BEYOND = 12.0  # bits/value above which a type is left out of the picture
_WIDTH, _HEIGHT = 340, 240  # of a panel
_LEFT, _TOP, _BOTTOM, _GAP, _LEGEND, _LINE = 70, 30, 45, 30, 200, 20


def pictures_of(result: Result) -> dict[str, str]:
    """Title → SVG: KL over bits/value, a panel for each way of scoring and a point for each type, hollow for types as
    published; nothing without figures."""
    panels: dict[str, dict[str, tuple[float, float]]] = {}
    pairs: dict[str, str] = {}
    for who, one in result["types"].items():
        bits, kl = (result.value(TEXT, who, name) or 0 for name in ("bits_per_value", "kl_mean"))
        if kl > 0 and bits < _BEYOND:
            panels.setdefault(one["scored_as"], {})[one["type"]] = bits, kl
            pairs[one["type"]] = one["pair"]
    if not panels:
        return {}
    marks = {label: _mark(label, pair, path) for (label, pair), path in zip(pairs.items(), itertools.cycle(_MARKS))}
    return {"Divergence from full precision against bits": "\n".join(_drawing(panels, marks))}


def _mark(label: str, pair: str, path: str) -> str:
    colour = next(colour for start, colour in _COLOURS.items() if pair.startswith(start))
    fill = "none" if label.endswith(_PLAIN) else colour
    return f'<path d="{path}" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'


def _drawing(panels: Mapping[str, Mapping[str, tuple[float, float]]], marks: Mapping[str, str]) -> Iterator[str]:
    """The elements of the picture. panels: title → type → bits and KL, which has a logarithmic axis."""
    across, up = zip(*(point for panel in panels.values() for point in panel.values()), strict=True)
    left, right = min(2.0, *across), max(6.0, *across) + 1
    low, high = math.log10(min(up) / 2), math.log10(max(up) * 2)
    ticks = [part * 10.0**power for power in range(math.floor(low), math.ceil(high)) for part in (1, 3)]

    def x(bits: float) -> float:
        return round(_WIDTH * (bits - left) / (right - left), 1)

    def y(kl: float) -> float:
        return round(_HEIGHT * (high - math.log10(kl)) / (high - low), 1)

    begin = _LEFT + len(panels) * (_WIDTH + _GAP)
    width, height = begin + _LEGEND, _TOP + max(_HEIGHT, _LINE * len(marks)) + _BOTTOM
    yield f'<svg width="{width}" viewBox="0 0 {width} {height}" font-size="12" fill="var(--ink)">'
    yield f'<text x="15" y="{_TOP + _HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 15 {_TOP + _HEIGHT / 2})">'
    yield "KL divergence, nats (mean)</text>"
    for number, (title, points) in enumerate(panels.items()):
        yield f'<g transform="translate({_LEFT + number * (_WIDTH + _GAP)} {_TOP})" text-anchor="middle">'
        for whole in range(math.ceil(left), math.floor(right) + 1):
            yield f'<path d="M{x(whole)} 0V{_HEIGHT}" stroke="var(--grid)"/>'
            yield f'<text x="{x(whole)}" y="{_HEIGHT + 16}" fill="var(--faint)">{whole}</text>'
        for tick in (tick for tick in ticks if low <= math.log10(tick) <= high):
            yield f'<path d="M0 {y(tick)}H{_WIDTH}" stroke="var(--grid)"/>'
            if not number:
                yield f'<text x="-6" y="{y(tick) + 4}" text-anchor="end" fill="var(--faint)">{tick:.4g}</text>'
        yield f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 36}">bits per value</text>'
        yield f'<text x="{_WIDTH / 2}" y="-10">{escape(title) if len(panels) > 1 else ""}</text>'
        for label, (bits, kl) in points.items():
            yield f'<g transform="translate({x(bits)} {y(kl)})">{marks[label]}</g>'
        yield "</g>"
    for number, (label, mark) in enumerate(marks.items()):
        yield f'<g transform="translate({begin} {_TOP + _LINE * number + 10})">{mark}'
        yield f'<text x="14" y="4">{escape(label)}</text></g>'
    yield "</svg>"
