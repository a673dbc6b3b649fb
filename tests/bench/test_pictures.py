"""Pictures are drawn of measurements, or a message says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polarlm.bench.pictures import can_draw
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
            for start, end, more in ((0, 128, 0), (128, 256, 1), (256, 512, 2)):
                value = times * kl * more
                made.add(f"positions {start} to {end}", who, "kl_mean", value=value, start=start, end=end)
    return made


def figure(result: Result, name: str) -> Any:
    return next(picture for picture in pictures.pictures_of(result) if picture.name == name).draw()


def test_types_as_published_are_hollow_and_every_type_is_labelled(result: Result) -> None:
    drawn = figure(result, "divergence")
    assert [ax.get_title() for ax in drawn.axes] == ["as served", "every token coded"]
    for ax in drawn.axes:
        points = [(line.get_xdata()[0], line.get_markerfacecolor() == "none") for line in ax.lines]
        assert points == [(4.0, False), (3.875, True), (4.125, False)]
        texts = [text for text in ax.texts if text.get_visible()]
        assert [text.get_text() for text in texts] == ["polarquant", "polarquant:plain", "ring4"]
        boxes = [text.get_window_extent() for text in texts]
        assert not any(box.count_overlaps(boxes[:i]) for i, box in enumerate(boxes))


def test_lines_over_positions_begin_where_codes_are_read(result: Result) -> None:
    served, coded = figure(result, "positions").axes
    assert list(served.get_xticks()) == [128, 256, 512]
    assert [list(line.get_ydata()) for line in served.lines] == [[0.01, 0.02], [0.04, 0.08], [0.005, 0.01]]
    assert [list(line.get_xdata()) for line in coded.lines] == [[(128 * 256) ** 0.5, (256 * 512) ** 0.5]] * 3


def test_the_pictures_of_a_file_lie_next_to_it_and_another_file_is_refused(
    result: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(result.as_json()), encoding="utf-8")
    assert pictures.main([str(file)]) == 0
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"a.json", "a-divergence.png", "a-positions.png"}  # nothing was timed
    assert (tmp_path / "a-divergence.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    file.write_text("{}", encoding="utf-8")
    assert pictures.main([str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file} cannot be read as the JSON of polarlm quality")
