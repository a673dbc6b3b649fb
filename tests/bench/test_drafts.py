"""The benchmark of drafts, on a model of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polarlm.bench.speed import drafts
from polarlm.bench.speed.drafts import Offer, Replay, offers
from tests.random_model import random_model


def test_offers_are_what_prompt_lookup_finds() -> None:
    prompt, answer = [1, 2, 3, 4, 5, 6, 7], [9, 1, 2, 3, 4, 8]
    found = offers(prompt, answer, 2, 10)
    assert [offer.right for offer in found] == [0, 0, 0, 2, 1, 0]  # behind 1 2 come 3 and 4, and then 5 in place of 8
    assert [offer.tokens > 0 for offer in found] == [False, False, False, True, True, True]


def test_a_replay_is_right_where_it_was_offered() -> None:
    replay = Replay(2, [5, 6, 7, 8], [Offer(0, 0), Offer(3, 2), Offer(2, 0)], 10)
    assert replay.draft([1, 1], 3) == []
    assert replay.draft([1, 1, 5], 15) == [6, 7, 9]
    assert replay.draft([1, 1, 5], 1) == [6]
    assert replay.draft([1, 1, 5, 6], 15) == [8, 9]
    assert replay.draft([1, 1, 5, 6, 7], 15) == []


@pytest.mark.slow
def test_runs_of_both_kinds_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(drafts, "TASKS", {"copy": "the sea the sea the sea", "prose": "the end"})
    path, output = random_model(tmp_path), tmp_path / "drafts.json"
    flags = ["-m", str(path), "--tokens", "30", "--repeat", "2", "--output", str(output)]
    assert drafts.main(flags) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["task"] for row in rows] == ["copy", "prose"]
    for row in rows:
        assert row["accepted_tokens"] <= row["drafted_tokens"]
        assert len(row["plain"]) == len(row["drafted"]) == 2
        assert min(row["plain"] + row["drafted"] + [row["ratio"]]) > 0
    printed = capsys.readouterr()
    assert "copy" in printed.out
    assert "differs" not in printed.err
