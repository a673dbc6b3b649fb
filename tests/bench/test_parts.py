"""What the time of a prompt goes to, by kind of kernel."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from polarlm.bench.lab.gpu.products import MATRICES, shape_of
from polarlm.bench.lab.parts import KINDS, REST, WHOLE, main
from polarlm.bench.result import read
from tests.random_model import TINY, random_model


def test_the_parts_of_a_prompt_are_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llvmlite")
    flags = ["--device", "cpu", "--threads", "1", "--prompt", "40,200", "--repeat", "1"]
    output = tmp_path / "result.json"
    assert main(["--weights", str(random_model(tmp_path)), "--output", str(output), *flags]) == 0
    result = read(output)
    shapes, layers = {name: math.prod(shape_of(TINY, name)) for name in MATRICES}, len(TINY.layers)
    for length in (40, 200):
        parts = {part: figures for part, who, figures in result.parts() if who == str(length)}
        seconds = {part: figures["seconds"].value for part, figures in parts.items()}
        assert min(taken for part, taken in seconds.items() if part != REST) > 0  # the rest is a difference of two runs
        assert sum(seconds.values()) == pytest.approx(2 * seconds[WHOLE])
        assert {part.partition(":")[0] for part in parts} <= {*KINDS, REST, WHOLE}
        work = sum(row["rate"].value * row["seconds"].value for row in parts.values() if "rate" in row)
        *others, head = [*shapes.values(), TINY.vocab_size * TINY.hidden_size]
        rows = length * (layers - 1) + 1  # of the last layer only the last row is needed behind keys and values
        assert work == pytest.approx(shapes["qkv"] * length * layers + sum(others[1:]) * rows + head)
    assert "| products: q8_0 512 × 256 " in capsys.readouterr().out
