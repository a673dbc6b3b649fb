"""Grammars and schemas made to take all time, memory or stack: a sentence comes back, and the process goes on."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from polarlm.engine import EngineError, SamplingParams
from polarlm.engine.sampling.compilations import TURNS
from polarlm.engine.sampling.grammars import Grammars
from polarlm.model_loaders.tokenizers import load_for_gguf
from tests.model_loaders import vocabularies as vocab
from tests.pairs import mostly_slow

SECONDS = 100.0  # for each, on a busy machine; without limits some take minutes

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the system has no such limits")


def chain(count: int) -> str:
    """A schema whose definitions each refer to the next."""
    definitions: dict[str, Any] = {
        f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}, "minItems": 1} for i in range(count)
    }
    return json.dumps({"$defs": {**definitions, f"d{count}": {}}, "$ref": "#/$defs/d0"})


def rules(count: int, rule: str, last: str, start: str) -> str:
    return "\n".join([start, *(rule.format(i, i + 1) for i in range(count)), last.format(count)])


DEEP = "it is nested too deeply"
SLOW = "it needs too much (time|memory)"
PRIME: dict[str, Any] = {"type": "integer", "multipleOf": 9999991}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "chain of references": ({"schema": chain(2000)}, DEEP),
    "choices beside choices": (
        {"schema": {"allOf": [{"anyOf": [{"minLength": i}, {"pattern": str(i)}]} for i in range(40)]}},
        "multiply",
    ),
    "chain of rules": ({"grammar": rules(9000, "r{}: r{}", 'r{}: "a"', "start: r0")}, DEEP),
    "chain of terminals": ({"grammar": rules(9000, "R{}: R{}", 'R{}: "a"', "start: R0")}, DEEP),
    "chain in GBNF": ({"grammar": rules(6000, "r{} ::= r{}", 'r{} ::= "a"', "root ::= r0")}, DEEP),
    "doubled terminals": ({"grammar": rules(60, "R{0}: R{1} R{1}", 'R{}: "a"', "start: R0")}, "too big"),
    "nested parentheses": ({"grammar": "start: " + "(" * 60_000}, "too deeply nested"),
    "nested brackets in GBNF": ({"grammar": "root ::= " + "(" * 60_000}, "nested deeper than"),
    "nested expression": ({"regex": "(" * 60_000 + "a" + ")" * 60_000}, "nested parentheses"),
    "nested schema": ({"schema": '{"items":' * 9000 + "{}" + "}" * 9000}, "recursion"),
    "multiples of a prime": ({"schema": PRIME}, SLOW),
    "many conditions": (
        {"grammar": "start: R\nR: " + " & ".join(f"/(.*{c}){{20}}/" for c in "abc")},
        "fuel|complex|too",
    ),
    "refers to itself alone": ({"schema": {"$ref": "#"}}, "schema"),
    "refers to another host": ({"schema": {"$ref": "http://127.0.0.1:9/x"}}, "127.0.0.1"),
}


# A chain of rules in GBNF takes a second, to be refused as one in Lark is.
@mostly_slow("name", HOSTILE, [name for name in HOSTILE if name != "chain in GBNF"])
def test_hostile_constraints_are_refused(grammars: Grammars, name: str) -> None:
    """Some compute for all the seconds that they may."""
    params, reason = HOSTILE[name]
    began = time.monotonic()
    with pytest.raises(EngineError, match=reason) as caught:
        grammars.constraint(SamplingParams(**params))
    assert time.monotonic() - began < SECONDS
    assert caught.value.code == "invalid_request"
    assert "cannot be used" in str(caught.value)
    assert grammars.constraint(SamplingParams(regex=f"after {len(name)}")) is not None  # the next one has its turn


def test_what_is_known_does_not_wait_for_what_is_compiled(grammars: Grammars) -> None:
    known = SamplingParams(regex="known")
    grammars.constraint(known)
    begins, goes_on = threading.Event(), threading.Event()
    worker = grammars._workers[TURNS[0]]
    ask = worker.ask

    def slow(*request: Any) -> Any:
        begins.set()
        assert goes_on.wait(60)
        return ask(*request)

    worker.ask = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=grammars.constraint, args=[SamplingParams(regex="new")])
    thread.start()
    try:
        assert begins.wait(60)
        assert grammars.constraint(known) is not None
        assert thread.is_alive()
    finally:
        goes_on.set()
        thread.join()
        del worker.ask


def test_a_constraint_that_took_long_to_compile_is_not_kept_for_ever(grammars: Grammars) -> None:
    """Its memory is as large as its time was long."""
    long = SamplingParams(schema={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20)}})
    grammars.constraint(long)
    for given, compiled in list(grammars._cache._values.items()):
        grammars._cache.put(given, replace(compiled, seconds=1.5))
    grammars.constraint(SamplingParams(regex="short"))
    assert len(grammars._cache) <= 2


@pytest.mark.slow
def test_a_limit_ends_the_compilation_and_not_the_worker_which_has_the_vocabulary(grammars: Grammars) -> None:
    """Two compilations last until their limit."""
    grammars.constraint(SamplingParams(regex="first"))
    workers = {seconds: worker._worker for seconds, worker in grammars._workers.items()}
    for number in range(2):
        with pytest.raises(EngineError, match=SLOW):
            grammars.constraint(SamplingParams(schema=PRIME | {"title": str(number)}))
    now = {seconds: worker._worker for seconds, worker in grammars._workers.items()}
    assert now[TURNS[0]] is workers[TURNS[0]]
    workers = now
    with pytest.raises(EngineError, match=DEEP):
        grammars.constraint(SamplingParams(schema=chain(2001)))
    assert {seconds: worker._worker for seconds, worker in grammars._workers.items()} == workers


@pytest.mark.slow
def test_a_compilation_ends_when_its_client_goes(grammars: Grammars) -> None:
    """Its process is ended, not waited for: what it would have said is not remembered. A first one lasts long."""
    long = TURNS[-1]
    begun = threading.Event()
    worker = grammars._workers[long]
    with pytest.raises(EngineError, match=SLOW):
        grammars.constraint(SamplingParams(schema=PRIME | {"title": "the worker starts"}))
    process, ask = worker._worker, worker.ask
    worker.ask = lambda request: (begun.set(), ask({**request, "seconds": 1000}))[1]  # type: ignore
    before = grammars.counts().outcomes["abandoned"]
    try:
        with pytest.raises(EngineError) as caught:
            grammars.constraint(SamplingParams(schema=PRIME | {"title": "gone"}), gone=begun.is_set)
        assert caught.value.code == "cancelled"
        assert process.wait(60) != 0
    finally:
        del worker.ask
    assert grammars.counts().outcomes["abandoned"] == before + 1


def test_nothing_is_compiled_and_no_worker_is_left_when_the_engine_has_closed() -> None:
    tokenizer = load_for_gguf(vocab.tiny_bpe())
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    grammars.constraint(SamplingParams(regex="a"))
    worker = grammars._workers[TURNS[0]]._worker
    assert worker.poll() is None
    grammars.close()
    assert worker.poll() is not None
    with pytest.raises(EngineError) as caught:
        grammars.constraint(SamplingParams(regex="b"))
    assert caught.value.code == "closed"
