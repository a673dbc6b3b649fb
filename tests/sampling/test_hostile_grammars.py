"""Grammars and schemas made to take all time, memory or stack: a sentence comes back, and the process goes on."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from polarlm.engine import EngineError, SamplingParams
from polarlm.engine.sampling.grammars import Grammars
from polarlm.model_loaders.tokenizers import load_for_gguf
from tests.model_loaders import vocabularies as vocab

SECONDS = 25.0  # for each, on a busy machine; without limits some take minutes

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the system has no such limits")


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    tokenizer = load_for_gguf(vocab.tiny_bpe())
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    yield grammars
    grammars.close()


def chain(count: int) -> str:
    """A schema whose definitions each refer to the next."""
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return json.dumps({"$defs": {**definitions, f"d{count}": {}}, "$ref": "#/$defs/d0"})


def rules(count: int, rule: str, last: str, start: str) -> str:
    return "\n".join([start, *(rule.format(i, i + 1) for i in range(count)), last.format(count)])


DEEP = "it is nested too deeply"
SLOW = "it needs too much (time|memory)"
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "chain of references": ({"schema": chain(2500)}, DEEP),
    "chain of rules": ({"grammar": rules(9000, "r{}: r{}", 'r{}: "a"', "start: r0")}, DEEP),
    "chain of terminals": ({"grammar": rules(9000, "R{}: R{}", 'R{}: "a"', "start: R0")}, DEEP),
    "chain in GBNF": ({"grammar": rules(6000, "r{} ::= r{}", 'r{} ::= "a"', "root ::= r0")}, DEEP),
    "doubled terminals": ({"grammar": rules(60, "R{0}: R{1} R{1}", 'R{}: "a"', "start: R0")}, "too big"),
    "nested parentheses": ({"grammar": "start: " + "(" * 60_000}, "too deeply nested"),
    "nested brackets in GBNF": ({"grammar": "root ::= " + "(" * 60_000}, "nested deeper than"),
    "nested expression": ({"regex": "(" * 60_000 + "a" + ")" * 60_000}, "nested parentheses"),
    "nested schema": ({"schema": '{"items":' * 9000 + "{}" + "}" * 9000}, "recursion"),
    "multiples of a prime": ({"schema": {"type": "integer", "multipleOf": 9999991}}, SLOW),
    "many conditions": (
        {"grammar": "start: R\nR: " + " & ".join(f"/(.*{c}){{20}}/" for c in "abc")},
        "fuel|complex|too",
    ),
    "refers to itself alone": ({"schema": {"$ref": "#"}}, "schema"),
    "refers to another host": ({"schema": {"$ref": "http://127.0.0.1:9/x"}}, "127.0.0.1"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused(grammars: Grammars, name: str) -> None:
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
    ask = grammars._worker.ask

    def slow(source: str) -> Any:
        begins.set()
        assert goes_on.wait(60)
        return ask(source)

    grammars._worker.ask = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=grammars.constraint, args=[SamplingParams(regex="new")])
    thread.start()
    try:
        assert begins.wait(60)
        assert grammars.constraint(known) is not None
        assert thread.is_alive()
    finally:
        goes_on.set()
        thread.join()
        del grammars._worker.ask


def test_a_constraint_that_took_long_to_compile_is_not_kept_for_ever(grammars: Grammars) -> None:
    """Its memory is as large as its time was long."""
    long = SamplingParams(schema={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20)}})
    grammars.constraint(long)
    for given in list(grammars._compiled):
        grammars._compiled[given] = type(grammars._compiled[given])(grammars._compiled[given].matcher, 1.5)
    grammars.constraint(SamplingParams(regex="short"))
    assert len(grammars._compiled) <= 2


def test_nothing_is_compiled_and_no_worker_is_left_when_the_engine_has_closed() -> None:
    tokenizer = load_for_gguf(vocab.tiny_bpe())
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    grammars.constraint(SamplingParams(regex="a"))
    worker = grammars._worker._worker
    assert worker is not None
    assert worker.poll() is None
    grammars.close()
    assert worker.poll() is not None
    with pytest.raises(EngineError) as caught:
        grammars.constraint(SamplingParams(regex="b"))
    assert caught.value.code == "closed"
