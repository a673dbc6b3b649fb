"""Constraints over HTTP: answers of their form, refusals with the reason, and hostile ones beside other requests."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine
from tests.sampling.test_hostile_grammars import HOSTILE
from tests.server.http_server import Serving, eventually, serving
from tests.tiny import assert_idle

WORD = "[a-f]{4,9}"


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Serving]:
    plain = {"cache_type": "f16", "calibration": False, "block_size": 8}
    with (
        Engine.load(tiny_path, device="cpu", parallel=4, **plain) as engine,
        serving(engine, max_body=1 << 20) as running,
    ):
        yield running
        assert_idle(engine)


def complete(server: Serving, **more: Any) -> Any:
    return server.post("/v1/completions", {"prompt": "the rain", "max_tokens": 40, "temperature": 1, **more})


@pytest.mark.parametrize(
    "more",
    [
        {"guided_regex": WORD},
        {"grammar": "root ::= [a-f]{4,9}"},
        {"guided_grammar": f"start: /{WORD}/"},
        {"structured_outputs": {"regex": WORD}},
        {"guided_choice": ["abab", "fade"]},
    ],
)
def test_several_answers_of_one_form(server: Serving, more: dict[str, Any]) -> None:
    answer = complete(server, n=3, seed=5, logprobs=2, **more).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(re.fullmatch(WORD, text) for text in texts), texts
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
    assert all("".join(choice["logprobs"]["tokens"]) == choice["text"] for choice in answer["choices"])
    again = complete(server, n=3, seed=5, **more).json()
    assert [choice["text"] for choice in again["choices"]] == texts


def test_a_conversation_and_a_stream_of_one_form(server: Serving) -> None:
    body = {"messages": [{"role": "user", "content": "on"}], "guided_regex": WORD, "max_tokens": 40, "seed": 3}
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    parts = server.openai.chat.completions.create(
        model="any", messages=body["messages"], max_tokens=40, seed=3, stream=True, extra_body={"guided_regex": WORD}
    )
    assert re.fullmatch(WORD, whole)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 1}}, "Unsatisfiable schema: minimum (3)"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "Unimplemented keys"),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"grammar": "root ::= <think>"}, "tokens in angle brackets are not taken"),
        ({"grammar": "root ::= word"}, "the rule root refers to word, which there is not"),
        ({"grammar": "start: word"}, "unknown name"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_impossible_constraint_is_refused_with_the_reason(
    server: Serving, more: dict[str, Any], reason: str, stream: bool
) -> None:
    response = complete(server, stream=stream, **more)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


def test_hostile_constraints_at_once_hold_up_nobody_else(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a 400. A request without a constraint, and one whose constraint is known, are answered meanwhile."""
    known = {"guided_regex": "[a-f]{5}", "max_tokens": 8}
    assert complete(server, **known).status_code == 200
    names = {"schema": "json_schema", "grammar": "grammar", "regex": "guided_regex"}
    bodies = [{names[field]: value for field, value in params.items()} for params, _ in list(HOSTILE.values())[:5]]
    prime = HOSTILE["multiples of a prime"][0]["schema"]
    bodies += [{"json_schema": prime | {"minimum": number}} for number in range(3)]  # 1.5 seconds of a core each
    worker = server.engine._grammars._worker
    ask, begun, goes_on = worker.ask, threading.Event(), threading.Event()

    def late(source: str) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return ask(source)

    monkeypatch.setattr(worker, "ask", late)
    with ThreadPoolExecutor(len(bodies)) as clients:
        attacks = [clients.submit(complete, server, **body) for body in bodies]
        try:
            assert begun.wait(60)
            eventually(lambda: server.driver.snapshot().active == len(bodies))
            for _ in range(3):
                assert complete(server, max_tokens=2).status_code == 200
                assert complete(server, **known).status_code == 200
        finally:
            goes_on.set()
        refused = [attack.result() for attack in attacks]
    assert [answer.status_code for answer in refused] == [400] * len(bodies), [answer.text for answer in refused]
