"""The measurement of tiers runs on a small model, and finds what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarlm.bench import tiers


def test_each_way_to_the_first_token_has_a_line(tiny_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiers.main(["--weights", str(tiny_path), "--tokens", "128", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "computed",
        "from the KV store",
        "from the disk, first request after a restart",
        "from the disk, a later request",
    ]
    assert "100.0 % of the time" in lines[1]


def test_a_prompt_that_is_too_short_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiers.main(["--tokens", "5"]) == 2
    assert "--tokens" in capsys.readouterr().err
