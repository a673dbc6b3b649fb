"""Cache types by layer, found on a text of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polarlm.bench.command import CacheType, cache_types
from polarlm.bench.quality import allocation
from polarlm.engine import EngineConfig
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.state.cache_types import layer_codecs


def test_types_by_layer_and_auto_are_rows_of_a_table() -> None:
    by_layer, auto = cache_types("ring3,ring4@1/ring3.5,auto:3.5", by_layer=True)
    assert (by_layer.key, by_layer.value) == ("ring3,ring4@1", "ring3.5")
    assert auto.settings() == {"cache_type": "auto:3.5", "key_conditioning": True}
    assert auto.label == auto.pair == "auto:3.5"
    auto.check(64)
    with pytest.raises(FlagError, match="--types auto:few: give the bits"):
        CacheType.read("auto:few")


def test_the_command(tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("the rain in the north and the other inn on the hill\n" * 60, encoding="utf-8")
    flags = ["--text", str(text), "--weights", str(tiny_path), "--window", "256", "--output", str(output)]
    assert allocation.main([*flags, "--windows", "2", "--bits", "5"]) == 0
    found = json.loads(output.read_text(encoding="utf-8"))
    assert 4.5 < found["bits_per_value"] <= 5
    for window in found["costs"]:
        assert sum(map(sum, window)) == pytest.approx(2)  # shares, of both scorings
    assert f"--cache-type-k {found['cache_type_k']}" in capsys.readouterr().out
    config = EngineConfig(cache_type_k=found["cache_type_k"], cache_type_v=found["cache_type_v"])
    assert len(layer_codecs(config, [8, 8])) == 2
    assert allocation.main([*flags, "--windows", "99", "--bits", "5"]) == 2
    assert "is too short for 99 windows of 256" in capsys.readouterr().err
    assert allocation.main([*flags, "--bits", "1"]) == 2
    assert "trellis3 to ring5 take" in capsys.readouterr().err
