"""What the time of a prompt goes to, by kind of kernel."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from polarlm.bench.lab.cores import Addition, elapsed
from polarlm.bench.lab.gpu.products import MATRICES, shape_of
from polarlm.bench.lab.parts import KINDS, REST, WHOLE, main
from polarlm.bench.result import read
from tests.random_model import TINY, random_model


def test_the_parts_of_a_prompt_are_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llvmlite")
    flags = ["--device", "cpu", "--threads", "1", "--prompt", "40,200", "--repeat", "1"]
    path = tmp_path / "result.json"
    assert main(["--weights", str(random_model(tmp_path)), "--output", str(path), *flags]) == 0
    result = read(path)
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
    output = capsys.readouterr().out
    assert "| products: q8_0 512 × 256 " in output
    assert "| step after 200 " in output
    for name, who, _ in result.parts(prefix="prompt of "):
        seconds, alone = (result.value(name, who, quantity) or 0 for quantity in ("seconds", "alone"))
        assert 0 < alone < seconds, name


def test_more_cores_shorten_launches_and_not_python() -> None:
    def seconds(cores: int, launch: float) -> tuple[float, float]:
        first, second = (
            Addition(1.0, [(8, 2 * launch), (4, launch)], waits=False),
            Addition(0.5, [(4, launch)], waits=True),
        )
        return elapsed([first, second, Addition(0.25, [], waits=False)], cores)

    assert seconds(1, 4.0) == (1 + 16 + 0.25, 1.25)
    assert seconds(8, 4.0) == (1 + 1 + 1 + 1 + 0.25, 1.25)  # 4 units occupy 4 cores
    assert seconds(8, 0.4) == pytest.approx((1.5 + 0.1 + 0.25, 1 + 0.3 + 0.25))
