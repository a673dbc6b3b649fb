"""The picture of a quality measurement."""

from __future__ import annotations

from functools import partial

from polarlm.bench.pictures import Picture, Series, colour_of, points
from polarlm.bench.quality.scores import TEXT
from polarlm.bench.result import Result

_PLAIN = ":plain"
_BEYOND = 12.0  # bits/value above which a type is left out of the picture


def pictures_of(result: Result) -> list[Picture]:
    """KL over bits/value: a point for each type, hollow for types as published; nothing without figures."""
    panels: dict[str, list[Series]] = {}
    for who, one in result["types"].items():
        bits, kl = (result.value(TEXT, who, name) or 0 for name in ("bits_per_value", "kl_mean"))
        if kl > 0 and bits < _BEYOND:
            point = Series(one["type"], [bits], [kl], colour_of(one["pair"]), is_hollow=one["type"].endswith(_PLAIN))
            panels.setdefault(one["scored_as"], []).append(point)
    draw = partial(points, panels, "bits per value", "KL divergence, nats (mean)")
    return [Picture("Divergence from full precision against bits", draw)] if panels else []
