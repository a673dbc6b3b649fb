"""Agents that come back find their conversations where the measurement says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polarlm.bench.serving import agents, pressure
from tests.random_model import random_model


@pytest.mark.slow
def test_each_turn_is_found_where_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "agents.json"
    flags = ["--agents", "2", "--opening", "24", "--turn", "4", "--max-tokens", "4", "--threads", "1"]
    assert agents.main(["--weights", str(random_model(tmp_path)), "--output", str(output), *flags]) == 0
    turns = json.loads(output.read_text(encoding="utf-8"))["turns"]
    found = {when: [set(turn["cached_from"]) for turn in own] for when, own in turns.items()}
    assert found["next turn"] == [{"store"}] * 2
    assert found["next turn, after a restart"] == [{"disk"}] * 2
    assert found["next turn, on another server"] == [{"remote"}] * 2
    for opened, again in zip(turns["new conversation"], turns["next turn, on another server"], strict=True):
        assert sum(again["cached_from"].values()) >= opened["prompt_tokens"] - 1 > 64
    assert "100 % disk" not in capsys.readouterr().out  # the new words are computed


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert agents.main(["--agents", "0"]) == 2
    assert "--agents" in capsys.readouterr().err


@pytest.mark.slow
def test_more_conversations_than_fit_are_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "pressure.json"
    flags = ["--opening", "40", "--turn", "4", "--max-tokens", "4", "--rounds", "2", "--threads", "1"]
    flags += ["--types", "f16", "--times", "0.05,1", "--kv-memory", "2M", "--output", str(output)]
    assert pressure.main(["--weights", str(random_model(tmp_path)), *flags]) == 0
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert [(row["times"], row["disk"]) for row in rows] == [(0.05, False), (0.05, True), (1, False), (1, True)]
    few, _, many, _ = ([sum(turn["cached_from"].values()) for turn in row["rounds"][1]] for row in rows)
    assert len(few) < len(many)  # conversations
    assert min(few) >= 64  # the complete blocks of each opening
    assert sum(found >= 64 for found in many) < len(many) / 2
    out = capsys.readouterr().out
    assert out.count("f16 and a disk") == 1
    assert f"{len(few)} conversations, 0.05×" in out
    assert f"{len(many)} conversations, 1×" in out


def test_multiples_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert pressure.main(["--times", "2,x"]) == 2
    assert "--times" in capsys.readouterr().err
