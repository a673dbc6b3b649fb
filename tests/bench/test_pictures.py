"""Pictures are drawn of measurements, or a message says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polarlm.bench.pictures import can_draw, write_png
from polarlm.bench.quality import pictures
from polarlm.bench.quality.scores import contestant
from polarlm.bench.result import Result

pytestmark = pytest.mark.skipif(not can_draw(), reason="needs matplotlib, which the extra `bench` has")


@pytest.fixture
def result() -> Result:
    types = [("f16", 16.0, 1e-7), ("polarquant", 4.0, 0.01), ("polarquant:plain", 3.875, 0.04), ("ring4", 4.125, 0.005)]
    made = Result({"model": "tiny", "types": {}})
    for type, bits, kl in types:
        for scoring, times in (("as served", 1), ("every token coded", 4)):
            who = contestant(type, scoring)
            made["types"][who] = {"type": type, "pair": type, "scored_as": scoring}
            made.add_all("text", who, {"bits_per_value": bits, "kl_mean": kl * times})
    return made


def test_types_as_published_are_hollow_and_every_type_is_named(result: Result) -> None:
    (picture,) = pictures.pictures_of(result)
    drawn: Any = picture.draw()
    assert [ax.get_title() for ax in drawn.axes] == ["as served", "every token coded"]
    for ax in drawn.axes:
        points = [(line.get_xdata()[0], line.get_markerfacecolor() == "none") for line in ax.lines]
        assert points == [(4.0, False), (3.875, True), (4.125, False)]
        assert len({(line.get_marker(), line.get_color()) for line in ax.lines}) == 3
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == ["polarquant", "polarquant:plain", "ring4"]


def test_a_picture_lies_next_to_its_result(result: Result, tmp_path: Path) -> None:
    (picture,) = pictures.pictures_of(result)
    assert write_png(picture, tmp_path / "a.json") == tmp_path / "a.png"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
