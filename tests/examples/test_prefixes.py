"""Keys of prompts: turns of a conversation have the same one, in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from examples.ray_serve.prefixes import prefix_key

SYSTEM = {"role": "system", "content": "You are kind."}
FIRST = {"role": "user", "content": "What is a polar code?"}
ANSWER = {"role": "assistant", "content": "A code."}
NEXT = {"role": "user", "content": "And what else?"}
LONG = "Once upon a time there was a block. " * 10


def key(**body: Any) -> str:
    return prefix_key(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("first", "next"),
    [
        ({"messages": [FIRST]}, {"messages": [FIRST, ANSWER, NEXT]}),
        ({"messages": [SYSTEM, FIRST]}, {"messages": [SYSTEM, FIRST, ANSWER, NEXT]}),
        ({"system": "Be kind.", "messages": [FIRST]}, {"system": "Be kind.", "messages": [FIRST, ANSWER, NEXT]}),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ANSWER, NEXT]},
        ),
        (
            {"instructions": "Be kind.", "input": "Hi"},
            {"instructions": "Be kind.", "input": [{"role": "user", "content": "Hi"}, ANSWER, NEXT]},
        ),
        ({"prompt": LONG}, {"prompt": LONG + "It was full."}),
        ({"prompt": list(range(200))}, {"prompt": list(range(300))}),
        ({"input_prefix": LONG, "input_suffix": "a"}, {"input_prefix": LONG + "def", "input_suffix": "b"}),
    ],
    ids=["messages", "system message", "Anthropic", "parts", "Responses", "text", "ids", "infill"],
)
def test_turns_of_a_conversation_have_the_same_key(first: dict[str, Any], next: dict[str, Any]) -> None:
    assert key(**first) == key(**next) != ""


def test_questions_about_the_same_document_have_the_same_key() -> None:
    document = "word " * 1000
    asked = [[{"role": "user", "content": document + question}] for question in ("What?", "Why?")]
    assert key(messages=asked[0]) == key(messages=asked[1])


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [SYSTEM, NEXT]},
        {"messages": [{"role": "system", "content": "You are short."}, FIRST]},
        {"messages": [SYSTEM, FIRST], "cache_salt": "mine"},
    ],
    ids=["question", "system message", "salt"],
)
def test_conversations_have_keys_of_their_own(other: dict[str, Any]) -> None:
    assert key(**other) != key(messages=[SYSTEM, FIRST])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"prompt": "short"}',
        b'{"messages": []}',
        b'{"messages": [1]}',
        b'{"messages": 7, "prompt": {"a": 1}}',
        b'{"messages": [{"role": "system", "content": "alone"}]}',
        b'{"messages": [{"role": "user", "content": {"text": [1]}}], "prompt": null}',
        b"\xff\xfe",
    ],
)
def test_what_shares_nothing_or_is_wrong_has_none(body: bytes) -> None:
    assert prefix_key(body) in ("", prefix_key(b'{"messages": [{"role": "user", "content": ""}]}'))


def test_half_of_a_surrogate_pair_has_a_key() -> None:
    assert prefix_key(b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
