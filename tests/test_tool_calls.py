"""Calls of tools in a program: a completion has them as messages take them, as the templates of several families write
them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from polarlm.engine import AsyncEngine, Completion, Engine, EngineError, PromptOptions
from polarlm.server.answers.call_grammar import Grammar, channel_grammar, functions_of
from tests.server.answers.test_http_tools import FAMILIES, MESSAGES, TOOLS
from tests.tool_model import tool_engine

OPTIONS = PromptOptions(tools=TOOLS, template_variables={"enable_thinking": False})


@pytest.fixture(params=["qwen3", "MISTRAL", "gpt-oss"], scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tool_engine(tmp_path_factory.mktemp("model"), FAMILIES[request.param]) as engine:
        yield engine


def calling(engine: Engine) -> dict[str, Any]:
    """Settings with which a model of random weights calls a tool."""
    template, control = engine.model.template, engine.model.tokenizer.control_tokens()
    functions = functions_of(TOOLS)
    if template.channels is not None:
        grammar = channel_grammar(template.channels, template.calls, functions, control, calls="must")
    else:
        grammar = Grammar(template.calls, functions, control, "must", several=False).text()
    return {"grammar": grammar, "temperature": 1, "max_tokens": 300, "seed": 1}


def assert_calls(answer: Completion) -> None:
    (call,) = answer.tool_calls
    assert (answer.text, answer.finish_reason, call["type"]) == ("", "tool_calls", "function")
    assert call["function"]["name"] in ("weather", "time")
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_a_completion_has_the_calls_and_messages_take_them(engine: Engine) -> None:
    answer = engine.chat(MESSAGES, options=OPTIONS, **calling(engine))
    assert_calls(answer)
    called = {"role": "assistant", "content": answer.text, "tool_calls": answer.tool_calls}
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0]["id"], "content": "rain"}
    before = [*engine.prompt_ids(MESSAGES, OPTIONS), *answer.token_ids]
    assert engine.prompt_ids([*MESSAGES, called, result], OPTIONS)[: len(before)] == before  # its ids are known


def test_so_has_each_of_several_and_of_an_async_engine(engine: Engine) -> None:
    settings = calling(engine)
    for answer in engine.generate([MESSAGES, MESSAGES], None, OPTIONS, **settings):
        assert_calls(answer)
    asynchronous = AsyncEngine(engine)
    assert_calls(asyncio.run(asynchronous.chat(MESSAGES, options=OPTIONS, **settings)))


def test_a_call_that_is_cut_off_is_its_beginning(engine: Engine) -> None:
    settings = calling(engine)
    whole = engine.chat(MESSAGES, options=OPTIONS, **settings)
    short = engine.chat(MESSAGES, options=OPTIONS, **settings | {"max_tokens": len(whole.token_ids) - 6})
    assert short.finish_reason == "length"
    arguments = [call["function"]["arguments"] for call in short.tool_calls]
    assert all(whole.tool_calls[0]["function"]["arguments"].startswith(begun) for begun in arguments)


def test_tools_of_another_form_are_a_sentence(engine: Engine) -> None:
    for tool in ({"name": "weather"}, {"type": "function", "function": {}}):
        with pytest.raises(EngineError, match=r'a function is {"type": "function"'):
            engine.chat(MESSAGES, options=replace(OPTIONS, tools=(tool,)))
