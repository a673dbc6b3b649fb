"""`polarlm verify` computes an answer again, and says in what another one differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine
from polarlm.server import verify
from tests.server.http_server import serving

CHAT = {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 12, "temperature": 1.2, "n": 2}
RAW = {"prompt": "word " * 40, "max_tokens": 12, "temperature": 0, "logprobs": 2}


def run(model: Path, folder: Path, request: Any, response: Any, *flags: str) -> int:
    for name, value in (("request", request), ("response", response)):
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return verify.main([str(folder / "request"), str(folder / "response"), "-m", str(model), *flags])


@pytest.fixture(scope="module")
def answers(tiny_path: Path) -> dict[str, Any]:
    """Of a busy server, whose prompts are cached the second time."""
    with Engine.load(tiny_path, replayable=True) as engine, serving(engine) as server:
        for _ in range(2):
            found = {"chat": server.post("/v1/chat/completions", CHAT), "raw": server.post("/v1/completions", RAW)}
        streamed = server.post("/v1/chat/completions", {**CHAT, "n": 1, "stream": True}).text
    given = {name: response.json() for name, response in found.items()}
    assert given["raw"]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert given["chat"]["choices"][0]["replay_digest"] in streamed
    assert given["chat"]["system_fingerprint"] in streamed
    return given


@pytest.mark.parametrize(("name", "request_body"), [("chat", CHAT), ("raw", RAW)])
def test_an_answer_is_the_same_again(
    tiny_path: Path,
    tmp_path: Path,
    answers: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    name: str,
    request_body: dict[str, Any],
) -> None:
    assert run(tiny_path, tmp_path, {**request_body, "stream": True}, answers[name]) == 0
    assert capsys.readouterr().out == f"The same answer: {answers[name]['system_fingerprint']}\n"


def changed(answer: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(answer))
    change(copy)
    return copy


def test_what_differs_is_told(
    tiny_path: Path, tmp_path: Path, answers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    raw = answers["raw"]
    cut = raw["system_fingerprint"].split(":")[0]
    cases: list[tuple[Any, Any, tuple[str, ...], str]] = [
        (RAW, changed(raw, lambda one: one["choices"][0].update(text="Other")), (), "choice 0 was changed"),
        ({**RAW, "prompt": "Another"}, raw, (), "choice 0 is not the answer computed here"),
        (RAW, raw, ("--cache-type", "f16"), "another cache type, balanced and not f16: choose it by --cache-type"),
        (RAW, changed(raw, lambda one: one["choices"].clear()), (), "it has 0 choices, and here 1"),
        (RAW, changed(raw, lambda one: one["choices"][0].update(finish_reason="stop")), (), "its finish_reason is"),
        (RAW, changed(raw, lambda one: one["choices"][0].update(index=1)), (), "its index is 0"),
        (RAW, changed(raw, lambda one: one["usage"].update(completion_tokens=9)), (), "its usage was changed"),
        (RAW, changed(raw, lambda one: one.update(usage=None)), (), "its usage was changed"),
        (RAW, changed(raw, lambda one: one.update(system_fingerprint=cut)), (), "another model, none and not"),
        (RAW, changed(raw, lambda one: one.update(system_fingerprint=one["system_fingerprint"] + ":x")), (), "changed"),
        (CHAT, changed(answers["chat"], lambda one: one["choices"][1].update(message="x")), (), "its message is"),
        (CHAT, changed(answers["chat"], lambda one: one["choices"][1]["message"].update(tool_calls="x")), (), "its"),
    ]
    for request, response, flags, why in cases:
        assert run(tiny_path, tmp_path, request, response, *flags) == 1
        assert why in capsys.readouterr().out
    refused: list[tuple[Any, Any, str]] = [
        ({**RAW, "max_tokens": "many"}, raw, "max_tokens"),
        ("{", raw, "is not JSON"),
        ([], raw, "a JSON object is needed"),
        (RAW, {"object": "list"}, "no whole answer"),
        (RAW, changed(raw, lambda one: one.pop("system_fingerprint")), "it has no system_fingerprint"),
        (RAW, changed(raw, lambda one: one.pop("choices")), "its choices are no array of objects"),
        (RAW, changed(raw, lambda one: one.update(choices=["x"])), "its choices are no array of objects"),
        (RAW, "[" * 20_000 + "]" * 20_000, "is nested too deeply"),
    ]
    for request, response, why in refused:
        assert run(tiny_path, tmp_path, request, response) == 2
        assert why in capsys.readouterr().err
