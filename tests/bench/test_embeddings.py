"""Encoders of random weights, and the measurement of their texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from polarlm.bench.gpu.shapes import SHAPES
from polarlm.bench.speed import embeddings
from polarlm.engine import Engine
from scripts.make_random_model import write


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("type", ["f16", "q8_0"])
def test_texts_are_measured_in_turn(
    type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "minilm.gguf", tmp_path / "found.json"
    write(path, "minilm-l6", SHAPES["minilm-l6"], type, None)
    monkeypatch.setattr(embeddings, "_PEER", "tests.bench.embedder")
    flags = ["--tokens", "256", "--rounds", "2", "--output", str(output)]
    assert embeddings.main(["--weights", str(path), *flags]) == 0
    fixed, mixed = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert fixed["tokens"] == 256
    assert fixed["theirs"] == {str(size): [256 / size] * 2 for size in (128, 256, 512, 1024)}
    assert len(fixed["ours"]) == len(mixed["ours"]) == 2
    assert 8 * 4 <= mixed["tokens"] <= 128 * 4
    assert abs(fixed["cosine"]) < 0.9  # of the stand-in's vector
    rows = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    assert rows[2][1:6] == [type.upper(), "32 tokens", f"{max(fixed['ours']):,.0f}", "0", "2 (128)"]
    with Engine.load(str(path), threads=1) as engine:
        alone, together = engine.embed([5, 6, 7]), engine.embed_each([[8, 9], [5, 6, 7]])
        np.testing.assert_array_equal(alone.vector, together[1].vector)


def test_what_cannot_be_measured_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert embeddings.main(["--output", str(tmp_path / "x.json")]) == 2
    assert "--weights names no .gguf file" in capsys.readouterr().err
    assert embeddings.main(["--rounds", "0"]) == 2
