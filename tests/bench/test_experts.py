"""Generation with fewer experts in memory than a model has, as the benchmark measures it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("llvmlite")

from polarlm.bench.experts import disk_rate, main
from tests.tiny import make_model


def test_each_size_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = make_model(tmp_path, "mixtral_window"), tmp_path / "result.json"
    given = ["--expert-cache", "all,50K", "--tokens", "5", "--repeat", "2", "-t", "1", "--output", str(output)]
    assert main(["-m", str(path), *given]) == 0
    every, some = json.loads(output.read_text())["rows"]
    assert every["rate"] > 0
    assert "hits" not in every
    assert 0 < some["hits"] < 1
    assert some["read"] > 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| all ")
    assert " tokens/s" in lines[3]


def test_a_size_for_less_than_a_token_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", str(make_model(tmp_path, "mixtral_window")), "--expert-cache", "1K"]) == 2
    assert "--expert-cache 1K has room for 0 of the 4 experts" in capsys.readouterr().err


def test_the_disk_reads_at_some_rate(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    rate = disk_rate(file, 1 << 12)
    assert rate is None or rate > 0
