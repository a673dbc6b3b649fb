"""The pictures of a quality measurement; `python -m polarlm.bench.quality.pictures FILE` writes them as PNG."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from polarlm.bench.pictures import DASHES, Panels, Picture, Series, bars, colour_of, lines, points, write_png
from polarlm.bench.quality.scores import POSITIONS, TEXT
from polarlm.bench.quality.speeds import SPEED
from polarlm.bench.result import Result, read
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import command, note

_PLAIN = ":plain"
_BEYOND = 12.0  # bits/value above which a type is left out of pictures of what compression costs
_KL = "KL divergence, nats (mean)"


def pictures_of(result: Result) -> list[Picture]:
    """The pictures that there are figures for."""
    pictures = []
    if over_bits := divergence(result):
        draw = partial(points, over_bits, "bits per value", _KL)
        pictures.append(Picture("divergence", "Divergence from full precision against bits", draw))
    if over_positions := positions(result):
        subjects = [
            row.more for row in result.rows("kl_mean") if row.subject.startswith(POSITIONS) and row.more["start"]
        ]
        ticks = sorted({edge for more in subjects for edge in (more["start"], more["end"])})
        draw = partial(lines, over_positions, "position", _KL, ticks=ticks)
        pictures.append(Picture("positions", "Divergence by position in the text", draw))
    if rates := speed(result):
        pictures.append(Picture("speed", "Tokens a second", partial(bars, rates, "tokens/s")))
    return pictures


def divergence(result: Result) -> Panels:
    """KL over bits/value: a point for each type, hollow for types as published."""
    panels: dict[str, list[Series]] = {}
    for who, one in result["types"].items():
        bits, kl = (result.value(TEXT, who, name) or 0 for name in ("bits_per_value", "kl_mean"))
        if kl > 0 and bits < _BEYOND:
            point = Series(one["type"], [bits], [kl], colour_of(one["pair"]), is_hollow=one["type"].endswith(_PLAIN))
            panels.setdefault(one["scored_as"], []).append(point)
    return panels


def positions(result: Result) -> Panels:
    """KL over positions at which codes are read, which are not the first ones: a line for each type."""
    reached: dict[str, list[tuple[float, float]]] = {}
    for row in result.rows("kl_mean"):
        if row.subject.startswith(POSITIONS) and row.more["start"] and (row.value or 0) > 0:
            middle = math.sqrt(row.more["start"] * row.more["end"])
            reached.setdefault(row.contestant, []).append((middle, row.value or 0))
    panels: dict[str, list[Series]] = {}
    for who, one in result["types"].items():
        if len(reached.get(who, ())) > 1 and (result.value(TEXT, who, "bits_per_value") or 0) < _BEYOND:
            panel, colour = panels.setdefault(one["scored_as"], []), colour_of(one["pair"])
            dashes = DASHES[sum(other.colour == colour for other in panel) % len(DASHES)]
            places, kl = zip(*reached[who], strict=True)
            panel.append(Series(one["type"], places, kl, colour, dashes))
    return panels


def speed(result: Result) -> Panels:
    """Tokens a second: a bar for each type, for generation and for a prompt."""
    panels: dict[str, list[Series]] = {}
    pairs = {one["type"]: one["pair"] for one in result["types"].values()}
    for _, who, figures in result.parts(SPEED):
        for name in ("generation", "prompt"):
            if name in figures and figures[name].value:
                rate = figures[name].value or 0
                panels.setdefault(name, []).append(Series(who, [rate], [rate], colour_of(pairs[who])))
    return panels


@command
def main(argv: Sequence[str]) -> None:
    """Draw the pictures of a result as PNG files next to it."""
    flags = argparse.ArgumentParser("python -m polarlm.bench.quality.pictures", description="Draw a result's pictures.")
    flags.add_argument("file", metavar="FILE", type=Path, help="JSON of polarlm quality; pictures go next to it")
    file = flags.parse_args(argv).file
    try:
        pictures = pictures_of(read(file))
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"{file} cannot be read as the JSON of polarlm quality ({error})") from None
    for picture in write_png(pictures, file):
        note(f"Written to {picture}")


if __name__ == "__main__":
    sys.exit(main())
