"""A long conversation with tools: every turn finds what the turns before have left in the cache.

The tests are slow: each conversation has twenty turns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import call_templates
from tests.server.answers.test_http_tools import FAMILIES, at_once
from tests.server.http_server import Serving, serving
from tests.tool_model import tool_engine

TURNS = 20
MESSAGES = [{"role": "user", "content": "How is the weather?"}]
DAYS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4}
CITY = {"enum": ["Rome", "Oslo"]}
PARAMETERS = {"type": "object", "properties": {"days": DAYS, "city": CITY}, "required": ["city", "days"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


# DeepSeek's first templates close results where an answer follows, and leave that out once it has come.
@pytest.fixture(params=[name for name in FAMILIES if name not in ("GEMMA_OF_APRIL", "gpt-oss", "DEEPSEEK")])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Serving]:
    with tool_engine(tmp_path, FAMILIES[request.param], block_size=16) as engine, serving(engine) as running:
        yield running


def respelled(message: dict[str, Any]) -> dict[str, Any]:
    """An answer as many clients send it back: without its reasoning, its arguments read and written anew."""
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=1, sort_keys=True),
            },
        }
        for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": message["content"], "tool_calls": calls}


def hit_rate(server: Serving, more: dict[str, Any]) -> tuple[float, int]:
    """Over a conversation, the share of the stored tokens that the next turn finds, and the answers with reasoning."""
    messages: list[Any] = [*MESSAGES]
    stored = hits = reasoned = 0
    for turn in range(TURNS):
        body = {"messages": messages, "tools": TOOLS, "temperature": 1, "seed": turn, "max_tokens": 300, **more}
        answer = server.post("/v1/chat/completions", body).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls", choice
        usage = answer["usage"]
        reasoned += "reasoning_content" in choice["message"]
        if turn:
            hits += usage["prompt_tokens_details"]["cached_tokens"]
        before = usage["prompt_tokens"] + usage["completion_tokens"] - 1  # the last token's K/V were not needed
        stored += before if turn < TURNS - 1 else 0
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"rain {turn}"}
            for call in choice["message"]["tool_calls"]
        ]
        messages += [respelled(choice["message"]), *results]
    return hits / stored, reasoned


@pytest.mark.slow
def test_a_conversation_with_tools_finds_its_stored_tokens(server: Serving) -> None:
    more = {"tool_choice": "required", "parallel_tool_calls": False}
    rate, reasoned = hit_rate(server, {**more, **at_once(server)})
    assert rate >= 0.97  # the end of a call that the form leaves no choice about is stored by the next turn alone
    assert not reasoned


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "bias"),
    [
        (call_templates.QWEN3, {"<think>": 50, "th": 100, "</think>": 100}),
        (call_templates.GPT_OSS, {"a": 50, "c": 50, "th": 100, "<|end|>": 100}),
        (call_templates.GEMMA, {"<|channel>": 50, "<|tool_call>": 50, "th": 100, "<channel|>": 100}),
    ],
    ids=["qwen3", "gpt-oss", "GEMMA"],
)
def test_reasoning_between_calls_is_found_as_well(template: str, bias: dict[str, int], tmp_path: Path) -> None:
    """Clients leave it out, and the template shows it behind the last question."""
    more = {"tool_choice": "required", "parallel_tool_calls": False}
    with tool_engine(tmp_path, template, block_size=16) as engine, serving(engine) as running:
        control = engine.model.tokenizer.control_tokens()
        rate, reasoned = hit_rate(
            running, {**more, "logit_bias": {control.get(name, name): n for name, n in bias.items()}}
        )
    assert rate >= 0.98
    assert 3 < reasoned < TURNS
