"""A server under load: answers, their errors, and figures."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from polarlm.bench.lab import load
from polarlm.bench.lab.load import Plan, main
from polarlm.bench.result import Result, read
from polarlm.bench.servers import SERVE, Answer, connect, running_server

# -- what a client sees --------------------------------------------------------------------------------------------


def answer_of(status: int, lines: Sequence[str]) -> Answer:
    """What the client makes of a response to a prompt of a plan."""

    def respond(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert (body["prompt"], body["max_tokens"], body["stream"]) == ([5, 6], 3, True)
        return httpx.Response(status, text="".join(f"{line}\n\n" for line in lines))

    with connect("http://server", transport=httpx.MockTransport(respond)) as http:
        return load.request(http, Plan(1, [0.5], [[5, 6]], 3), 0, 0.0)


TEXT = 'data: {"choices": [{"text": "a"}], "usage": null}'
END = 'data: {"choices": [{"text": "", "finish_reason": "length"}], "usage": null}'
ERROR = 'data: {"error": {"message": "…", "type": "server_error", "param": null, "code": "internal"}}'


@pytest.mark.parametrize(
    ("status", "lines", "kind"),
    [
        (429, [ERROR.removeprefix("data: ").replace("internal", "busy")], "429 busy"),
        (502, ["Bad Gateway"], "502 no error of the API"),
        (200, [TEXT, ERROR], "internal"),
        (200, [TEXT, END], "cut off"),
        (200, ["<html>"], "JSONDecodeError"),
    ],
)
def test_errors_have_a_kind(status: int, lines: Sequence[str], kind: str) -> None:
    assert answer_of(status, lines).error == kind


# -- what is made of it --------------------------------------------------------------------------------------------


def test_figures_of_a_load() -> None:
    answers = [
        Answer(0.0, 0.0, [0.5, 0.6, 0.8], 0.8, prompt_tokens=10, completion_tokens=3),
        Answer(0.5, 1.0, [1.1, 1.2, 1.5], 1.5, prompt_tokens=10, cached_tokens=8, completion_tokens=3),
        Answer(0.6, 1.0, [], 1.1, error="429 busy"),
        Answer(0.7, 1.5, [1.9], 2.0, error="cut off"),
    ]
    result = Result({})
    load.add_load(result, "polarlm", answers)
    figures = result.figures("load", "polarlm")
    assert figures["errors"].more["kinds"] == {"429 busy": 1, "cut off": 1}
    value = {name: row.value for name, row in figures.items()}
    assert (value["requests"], value["requests/s"], value["tokens/s"], value["cached"]) == (4, 1.0, 3.0, 0.4)
    for name, expected in (
        ("first token", (2, 0.1, 0.5)),
        ("between two tokens", (4, 0.1, 0.3)),
        ("whole answer", (2, 0.5, 0.8)),
        ("until a client was free", (4, 0.0, 0.8)),
    ):
        row = figures[name]
        assert (row.more["count"], row.runs[0], row.runs[100]) == pytest.approx(expected), name


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_of_its_own_is_measured(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARLM_CACHE", str(tmp_path))
    flags = ["--clients", "3", "--rate", "40", "--seconds", "30", "--requests", "12", "--max-tokens", "9"]
    flags += ["--prompt-tokens", "10", "--shared-prefix", "70", "--output", str(tmp_path / "out.json")]
    with running_server([*SERVE, "--weights", str(tiny_path)]) as other:
        assert main(["--weights", str(tiny_path), "--peer", f"another={other}/v1", *flags]) == 0
    result = read(tmp_path / "out.json")
    assert "python -m polarlm.bench.lab.load --weights " in result["command"]
    assert result["load_options"]["clients"] == 3
    printed = capsys.readouterr().out
    for who in ("polarlm", "another"):
        value = {name: row.value for name, row in result.figures("load", who).items()}
        assert (value["requests"], value["errors"], value["prompt tokens"]) == (12, 0, 12 * 80)
        assert 0 < value["cached"] <= 1
        assert value["tokens/s"] * value["seconds"] == pytest.approx(12 * 9)
        assert result.figures("load", who)["first token"].more["count"] == 12
    assert re.search(r"\| polarlm .*\n\| another ", printed)
