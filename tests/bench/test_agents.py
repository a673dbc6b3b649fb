"""Agents that come back find their conversations where the measurement says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polarlm.bench.serving import agents
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
