"""Constraints over HTTP: answers of their form, refusals with the reason, and hostile ones beside other requests."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine
from polarlm.engine.sampling.compilations import MOST_WAITING, TURNS
from polarlm.model_loaders import limited_process
from tests.pairs import in_turn
from tests.server.http_server import Serving, serving
from tests.server.lines import PATIENCE, eventually
from tests.tiny import assert_idle

WORD = "[a-f]{4,9}"


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Serving]:
    plain = {"cache_type": "f16", "calibration": False, "block_size": 16}
    with (
        Engine.load(tiny_path, device="cpu", parallel=4, **plain) as engine,
        serving(engine, max_body=1 << 20) as running,
    ):
        yield running
        assert_idle(engine)


def complete(server: Serving, **more: Any) -> Any:
    return server.post("/v1/completions", {"prompt": "the rain", "max_tokens": 40, "temperature": 1, **more})


def test_several_answers_of_one_form(server: Serving) -> None:
    """The fields that ask for a form are in tests/server/reading/test_fields.py."""
    more = {"n": 3, "seed": 5, "structured_outputs": {"regex": WORD}}
    answer = complete(server, logprobs=2, **more).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(re.fullmatch(WORD, text) for text in texts), texts
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
    assert all("".join(choice["logprobs"]["tokens"]) == choice["text"] for choice in answer["choices"])
    again = complete(server, **more).json()
    assert [choice["text"] for choice in again["choices"]] == texts


def strict(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}}


@in_turn(
    "more reason",
    [
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 1}}, "Unsatisfiable schema: minimum (3)"),
        (strict({"not": {"const": 3}}), '"not"'),
        (strict('{"not": {"const": 3}}'), '"not"'),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"grammar": "root ::= word"}, "the rule root refers to word, which is not defined"),
    ],
)
def test_an_impossible_constraint_is_refused_with_the_reason(
    server: Serving, more: dict[str, Any], reason: str
) -> None:
    for stream in (False, True):
        error = server.refused("/v1/completions", {"prompt": "the rain", "stream": stream, **more})
        assert reason in error["message"], stream
        assert error["param"] == next(iter(more)), stream


@contextmanager
def held(server: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it holds, the first constraint that has begun to be compiled does not end; the event tells that it has."""
    worker = server.engine.grammars._workers[TURNS[0]]
    ask, begun, goes_on = worker.ask, threading.Event(), threading.Event()

    def late(request: Any) -> Any:
        begun.set()
        while not goes_on.wait(0.05):
            if limited_process._GONE.get()():
                raise limited_process.NobodyWaits
        return ask(request)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "ask", late)
        try:
            yield begun
        finally:
            goes_on.set()


def compilations(server: Serving) -> dict[str, float]:
    """What /metrics tells of constraints, by outcome, and of those that wait."""
    counts = re.findall(
        r'(?m)^polarlm_constraints(?:_total{outcome="|_)(\w+)(?:"})? (\S+)$', server.http.get("/metrics").text
    )
    return {name: float(count) for name, count in counts}


def test_of_too_many_new_constraints_the_last_are_to_come_again_and_those_of_clients_that_left_are_not_compiled(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without a constraint, or with one that is known, are answered meanwhile."""
    assert complete(server, guided_regex="[a-f]{5}").status_code == 200
    with ThreadPoolExecutor(1) as client, held(server, monkeypatch) as begun:
        first = client.submit(complete, server, guided_regex="a{5}first")
        assert begun.wait(PATIENCE)
        before = compilations(server)
        bodies = [{"prompt": "a", "guided_regex": f"[a-f]{{3}}{number}"} for number in range(MOST_WAITING)]
        connections = [server.send("/v1/completions", body) for body in bodies]
        eventually(lambda: compilations(server)["waiting"] == 1 + MOST_WAITING)
        refused = complete(server, guided_regex="[a-f]{3}, one more")
        assert complete(server, max_tokens=2).status_code == 200
        assert complete(server, guided_regex="[a-f]{5}").status_code == 200
        for connection in connections:
            connection.close()
        eventually(lambda: compilations(server)["waiting"] == 1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "busy")
    assert int(refused.headers["Retry-After"]) > 0
    assert first.result().status_code == 200
    assert complete(server, guided_regex="a{5}second").status_code == 200
    after = compilations(server)
    gained = {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
    assert gained.pop("seconds_sum") > 0
    counts = {"abandoned": MOST_WAITING, "compiled": 2, "seconds_count": 2, "too_many": 1, "waiting": -1}
    assert gained == counts


@pytest.mark.slow
def test_a_request_whose_time_ends_while_its_constraint_is_compiled_is_told_so(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Engine.load(tiny_path, device="cpu", cache_type="f16", calibration=False, block_size=16) as engine,
        serving(engine) as server,
    ):
        assert complete(server, guided_regex="known").status_code == 200  # the process has started
        object.__setattr__(server.driver.config, "request_seconds", 1)
        with held(server, monkeypatch):
            response = complete(server, guided_regex="[a-f]{3}, late")
    assert response.status_code == 504
