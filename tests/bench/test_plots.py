"""Pictures are drawn of measurements, or a message says why not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polarlm.bench.quality.angles import histograms

from polarlm.bench.plot_style import can_draw
from polarlm.bench.quality.__main__ import plots

pytestmark = pytest.mark.skipif(not can_draw(), reason="needs matplotlib, which the extra `bench` has")


def row(type: str, bits: float, kl: float, scored_as: str) -> dict[str, Any]:
    error = [kl, 2 * kl, kl / 2]
    stretches = [
        {"start": 0, "end": 128, "positions": 128, "kl_mean": 0.0},
        {"start": 128, "end": 256, "positions": 128, "kl_mean": kl},
        {"start": 256, "end": 512, "positions": 256, "kl_mean": 2 * kl},
    ]
    whole = {"type": type, "bits_per_value": bits, "kl_mean": kl, "scored_as": scored_as}
    return {**whole, "by_position": stretches, "attention_error": error}


@pytest.fixture
def result() -> dict[str, Any]:
    types = [("f16", 16.0, 1e-7), ("polarquant", 4.0, 0.01), ("polarquant:plain", 3.875, 0.04), ("ring4", 4.125, 0.005)]
    scorings = {"as served": 1, "every token coded": 4}
    cells = [
        {"type": type, "scored_as": scoring, "length": length, "depth": depth, "tokens": 5}
        | {"logprob": -bits * times / 9, "correct": bits > 4}
        for type, bits, _ in types
        for scoring, times in scorings.items()
        for length in (512, 1024)
        for depth in (0, 50, 100)
    ]
    keys = np.random.default_rng(0).normal(size=(50, 2, 16)).astype(np.float32)
    rows = [row(type, bits, kl * times, scoring) for type, bits, kl in types for scoring, times in scorings.items()]
    return {"model": "tiny", "rows": rows, "needle": cells, "angles": histograms([keys])}


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.slow
def test_a_measurement_has_five_pictures(result: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(result), encoding="utf-8")
    assert plots.main([str(tmp_path / "a.json")]) == 0
    pictures = ["a-angles.png", "a-attention.png", "a-divergence.png", "a-needle.png", "a-positions.png"]
    assert names(tmp_path) == [*pictures, "a.json"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_missing_measurements_have_no_picture(result: dict[str, Any], tmp_path: Path) -> None:
    rows = [one for one in result["rows"] if one["type"] == "f16"]
    rows += [{**one, "type": "ring4 without any"} for one in result["rows"] if one["type"] == "ring4"]
    said = plots.draw_all({"rows": rows, "needle": [], "angles": None}, "tiny", tmp_path / "a.json")
    assert names(tmp_path) == []
    assert said.startswith("No pictures: ")


def test_types_as_published_are_hollow_and_every_type_is_labelled(result: dict[str, Any]) -> None:
    figure = plots.divergence(result, "tiny")
    for ax in figure.axes:
        points = [line for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata())]
        assert [(line.get_xdata()[0], line.get_markerfacecolor() == "white") for line in points] == [
            (4.0, False),
            (3.875, True),
            (4.125, False),
        ]
        texts = [text for text in ax.texts if text.get_visible()]
        assert [text.get_text() for text in texts] == ["polarquant", "polarquant", "ring4"]
        boxes = [text.get_window_extent() for text in texts]
        assert not any(box.count_overlaps(boxes[:i]) for i, box in enumerate(boxes))


def test_lines_over_positions_begin_where_codes_are_read(result: dict[str, Any]) -> None:
    figure = plots.positions(result, "tiny")
    served, coded = figure.axes
    assert [list(line.get_ydata()) for line in served.lines] == [[0.01, 0.02], [0.005, 0.01]]
    assert [list(line.get_xdata()) for line in coded.lines] == [[(128 * 256) ** 0.5, (256 * 512) ** 0.5]] * 2


def test_an_older_measurement_has_no_picture_of_positions(result: dict[str, Any]) -> None:
    for one in result["rows"]:
        del one["by_position"]
    assert plots.positions(result, "tiny") is None


def test_the_frontier_lies_under_every_point(result: dict[str, Any]) -> None:
    figure = plots.divergence(result, "tiny")
    ax = figure.axes[0]
    (frontier,) = [line for line in ax.lines if line.get_linestyle() == "--"]
    bits, kl = frontier.get_data()
    np.testing.assert_allclose(np.diff(np.log2(kl)) / np.diff(bits), -2, rtol=1e-6)
    for line in ax.lines:
        if line.get_marker() == "o" and len(line.get_xdata()):
            (x,), (y,) = line.get_data()
            assert y >= np.exp(np.interp(x, bits, np.log(kl))) * (1 - 1e-6)


def test_without_matplotlib_a_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'polarlm[bench]'" in plots.draw_all({"rows": []}, "tiny", tmp_path / "a.json")


@pytest.mark.parametrize("content", ["no JSON", "{}", '{"model": "tiny"}'])
def test_another_file_is_refused_in_a_sentence(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text(content, encoding="utf-8")
    assert plots.main([str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file} cannot be read as the JSON of bench.quality")
