"""An agent's session with servers: what they have of each turn's prompt, and who is left out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from polarlm.bench.result import read
from polarlm.bench.servers import SERVE
from polarlm.bench.shapes import llama
from polarlm.bench.speed import __main__ as speed
from polarlm.bench.speed import session
from scripts.make_random_model import write
from tests.random_model import tokenizer_file


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of a context for two turns, which are shorter than a user's: its tokens are bytes."""
    path = tmp_path / "small.gguf"
    write(path, "small", llama(2, 256, 512, 4, 2, 64, 262, 1024, 10_000.0), "q8_0", tokenizer_file(tmp_path))
    monkeypatch.setattr(session, "_SYSTEM", tmp_path / "system.txt")
    monkeypatch.setattr(session, "_RESULT", 100)
    (tmp_path / "system.txt").write_text("You have no tools.\n" * 10, encoding="utf-8")
    return path


def test_the_servers_have_what_was_said_before(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The peer is a server of ours under another name, and one is missing."""
    output, peers = model.with_name("out.json"), f"other={shlex.join(SERVE)} -np 2,none=/none/llama-server"
    flags = ["-m", str(model), "--session", "2", "--repeat", "1", "-t", "1", "--output", str(output)]
    assert speed.main([*flags, "--peer", peers]) == 0
    result = read(output)
    for who in ("polarlm", "other"):
        first, second = result.figures("turn 1", who), result.figures("turn 2", who)
        assert 0 == first["cached"].value < first["prompt"].value <= second["cached"].value
        assert second["prompt"].value > first["prompt"].value + 100
        assert 0 < second["first token"].value < second["turn"].value
        assert result.value("all", who, "turn") == first["turn"].value + second["turn"].value
    assert result.figures("times ours", "other").keys() == {"first token", "turn"}
    assert result["left_out"] == [
        "none is not compared: /none/llama-server cannot be started: No such file or directory"
    ]
    assert re.search(r"\| turn 2 +\| .*\n\| all .*\n\| times ours .*×", capsys.readouterr().out)


def test_a_session_that_does_not_fit_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-m", str(model), "--session", "9", "-t", "1", "--output", str(model.with_name("out.json"))]
    assert speed.main([*flags, "--peer", "llama-server"]) == 2
    assert "--peer llama-server: in a session, give NAME=PROGRAM of a server" in capsys.readouterr().err
    assert speed.main(flags) == 2
    assert "error: no whole answer in turn 4 (41 of 64 tokens); a full context" in capsys.readouterr().err
