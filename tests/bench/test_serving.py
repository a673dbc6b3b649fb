"""The benchmark of the server: arrivals, figures and tables."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest

from polarlm.bench.serving import load
from polarlm.bench.serving.__main__ import main
from polarlm.bench.serving.client import Answer
from polarlm.bench.serving.load import Plan, Seen, _ask, poisson, summary
from polarlm.bench.serving.process import own_server
from tests.random_model import random_model

# -- what is asked, and when ---------------------------------------------------------------------------------------


def test_arrivals_are_a_poisson_process() -> None:
    starts = poisson(50, 100, None, np.random.default_rng(1))
    assert starts == sorted(starts)
    assert 0 < starts[0] < starts[-1] < 100
    assert len(starts) == pytest.approx(5000, rel=0.05)
    gaps = np.diff(starts)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as in an exponential distribution
    assert poisson(50, 100, 7, np.random.default_rng(1)) == starts[:7]


# -- what a client sees --------------------------------------------------------------------------------------------


def asked(status: int, lines: Sequence[str]) -> Answer:
    """What the client makes of a response to a prompt of a plan."""

    def respond(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert (body["prompt"], body["max_tokens"], body["stream"]) == ([5, 6], 3, True)
        return httpx.Response(status, text="".join(f"{line}\n\n" for line in lines))

    async def run() -> Answer:
        async with httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://server") as http:
            return await _ask(http, Plan(1, [0.5], [[5, 6]], 3), 0, 0.0)

    return asyncio.run(run())


TEXT = 'data: {"choices": [{"text": "a"}], "usage": null}'
END = 'data: {"choices": [{"text": "", "finish_reason": "length"}], "usage": null}'
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
ERROR = 'data: {"error": {"message": "…", "type": "server_error", "param": null, "code": "internal"}}'


def test_an_answer() -> None:
    answer = asked(
        200, [":", TEXT, ":", TEXT, END, f'data: {{"choices": [], "usage": {json.dumps(USAGE)}}}', "data: [DONE]"]
    )
    assert answer.error is None
    assert len(answer.pieces) == 2
    assert 0.5 < answer.sent <= answer.pieces[0] <= answer.pieces[1] <= answer.ended
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (2, 1, 3)


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
    assert asked(status, lines).error == kind


# -- what is made of it --------------------------------------------------------------------------------------------


def test_figures_of_a_load() -> None:
    answers = [
        Answer(0.0, 0.0, [0.5, 0.6, 0.8], 0.8, prompt_tokens=10, cached_tokens=0, completion_tokens=3),
        Answer(0.5, 1.0, [1.1, 1.2, 1.5], 1.5, prompt_tokens=10, cached_tokens=8, completion_tokens=3),
        Answer(0.6, 1.0, [], 1.1, error="429 busy"),
        Answer(0.7, 1.5, [1.9], 2.0, error="cut off"),
    ]
    figures = summary(Seen(2.0, answers, 30, 12, 2))
    assert figures["errors"] == {"429 busy": 1, "cut off": 1}
    assert (figures["requests"], figures["requests_per_second"], figures["tokens_per_second"]) == (4, 1.0, 3.0)
    assert figures["prefix_hit_rate"] == 0.4
    assert (figures["blocks"], figures["peak_blocks"], figures["peak_running"]) == (30, 12, 2)
    waits = {
        name: (of["count"], of["percentiles"][0], of["percentiles"][100]) for name, of in figures["latencies"].items()
    }
    assert waits["first_token_seconds"] == pytest.approx((2, 0.1, 0.5))
    assert waits["between_tokens_seconds"] == pytest.approx((4, 0.1, 0.3))
    assert waits["request_seconds"] == pytest.approx((2, 0.5, 0.8))
    assert waits["behind_arrival_seconds"] == pytest.approx((4, 0.0, 0.8))


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_of_its_own_is_measured(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARLM_CACHE", str(tmp_path))
    flags = ["--clients", "3", "--rate", "40", "--seconds", "30", "--requests", "12", "--max-tokens", "9"]
    flags += ["--prompt-tokens", "10", "--shared-prefix", "70", "--output", str(tmp_path / "out.json")]
    with own_server(["--weights", str(tiny_path)]) as other:
        assert main(["--weights", str(tiny_path), "--peer", f"another={other}/v1", *flags]) == 0
    figures = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert figures["command"].startswith("python -m polarlm.bench.serving --weights ")
    assert (figures["requests"], figures["errors"], figures["prompt_tokens"]) == (12, {}, 12 * 80)
    assert figures["load"]["clients"] == 3
    assert 0 < figures["prefix_hit_rate"] < 1
    assert figures["latencies"]["first_token_seconds"]["count"] == 12
    assert figures["tokens_per_second"] * figures["seconds"] == pytest.approx(12 * 9)
    printed = capsys.readouterr().out
    assert "| until a client was free " in printed

    (peer,) = figures["peers"]
    assert (peer["name"], peer["requests"], peer["errors"], peer["prompt_tokens"]) == ("another", 12, {}, 12 * 80)
    assert re.search(r"\| polarlm .*\n\| another ", printed)


@pytest.mark.slow
def test_results_are_kept_when_the_command_is_stopped(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, monkeypatched = [], load._ask

    async def stopped_at_the_third(http, plan, number, begun):
        if len(answers) == 2:
            raise KeyboardInterrupt
        answers.append(await monkeypatched(http, plan, number, begun))
        return answers[-1]

    monkeypatch.setenv("POLARLM_CACHE", str(tmp_path))
    monkeypatch.setattr(load, "_ask", stopped_at_the_third)
    flags = ["--clients", "1", "--rate", "40", "--seconds", "30", "--requests", "5", "--max-tokens", "3"]
    flags += ["--prompt-tokens", "10", "--shared-prefix", "10", "--output", str(tmp_path / "out.json")]
    assert main(["--weights", str(tiny_path), *flags]) == 130
    figures = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (figures["requests"], figures["complete"]) == (2, False)
    printed = capsys.readouterr()
    assert "| first token " in printed.out
    assert "Requests arrive for 30 s" in printed.err


@pytest.mark.slow
def test_each_turn_is_found_where_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slow: it starts three servers."""
    output = tmp_path / "agents.json"
    flags = ["--agents", "2", "--opening", "24", "--turn", "4", "--max-tokens", "4", "--threads", "1"]
    flags += ["--weights", str(random_model(tmp_path)), "--output", str(output)]
    assert main(["--only", "agents", *flags]) == 0
    turns = json.loads(output.read_text(encoding="utf-8"))["turns"]
    tiers = {when: [set(turn["cached_from"]) for turn in visit] for when, visit in turns.items()}
    assert tiers["next turn"] == [{"store"}] * 2
    assert tiers["next turn, after a restart"] == [{"disk"}] * 2
    assert tiers["next turn, on another server"] == [{"remote"}] * 2
    for when in ("next turn, after a restart", "next turn, on another server"):
        for opened, again in zip(turns["new conversation"], turns[when], strict=True):
            assert sum(again["cached_from"].values()) >= opened["prompt_tokens"] - 1 > 64
    assert "100 % disk" not in capsys.readouterr().out  # the new words are computed


@pytest.mark.slow
def test_more_conversations_than_fit_are_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slow: it starts four servers."""
    output = tmp_path / "pressure.json"
    flags = ["--opening", "40", "--turn", "4", "--max-tokens", "4", "--rounds", "2", "--threads", "1"]
    flags += ["--types", "f16", "--times", "0.05,1", "--kv-memory", "2M", "--output", str(output)]
    assert main(["--only", "pressure", "--weights", str(random_model(tmp_path)), *flags]) == 0
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert [(row["times"], row["disk"]) for row in rows] == [(0.05, False), (0.05, True), (1, False), (1, True)]
    few, _, many, _ = ([sum(turn["cached_from"].values()) for turn in row["rounds"][1]] for row in rows)
    assert len(few) < len(many)  # conversations
    assert min(few) >= 64  # the complete blocks of each opening
    assert sum(cached >= 64 for cached in many) < len(many) / 2
    out = capsys.readouterr().out
    assert out.count("f16 and a disk") == 1
    assert f"{len(few)} conversations, 0.05×" in out
    assert f"{len(many)} conversations, 1×" in out
