"""Answers as Gemma 4 writes them: reasoning in its channel, text, and calls whose strings have quotes of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.chat.console import Console
from polarlm.engine.chat.session import ChatSession
from polarlm.engine.sampling.detokenizer import text_of
from tests.call_templates import GEMMA
from tests.server.http_server import Serving, serving
from tests.tool_model import tool_engine

MESSAGES: list[Any] = [{"role": "user", "content": "How is it?"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
REASONED = "<|channel>thought\nhm\n<channel|>So."
ANSWER = REASONED + '<|tool_call>call:weather{city:<|"|>"Rome", {Rom}<|"|>,days:[1,{n:null}]}<tool_call|>'
TEXT = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')  # which files may have as text
ARGUMENTS = {"city": '"Rome", {Rom}', "days": [1, {"n": None}]}


@pytest.fixture(scope="module", params=[(), TEXT], ids=["control tokens", "text"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tool_engine(tmp_path_factory.mktemp("model"), GEMMA, request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Serving]:
    with serving(engine) as server:
        yield server


def rule_of(engine: Engine, answer: str) -> str:
    ids = engine.model.tokenizer.tokenize(answer, control=True)
    return "%llguidance {}\nstart: " + " ".join(f"<[{token}]>" for token in ids)


@pytest.fixture(autouse=True)
def answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer that may have calls is ANSWER, unless the test sets its own."""
    submit = engine.submit

    def forced(prompt: Any, params: SamplingParams, *more: Any, **named: Any) -> Any:
        constraint = engine.grammars.constraint(SamplingParams(grammar=rule_of(engine, ANSWER)))
        return submit(prompt, replace(params, grammar=None), *more, constraint=constraint, **named)

    monkeypatch.setattr(engine, "submit", forced)


def test_openai(server: Serving) -> None:
    answer = server.openai.chat.completions.create(model="any", messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.reasoning_content) == ("So.", "hm")  # type: ignore[attr-defined]
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
    assert choice.finish_reason == "tool_calls"


def test_a_stream_has_arguments_as_json_while_they_are_written(server: Serving) -> None:
    pieces = list(server.openai.chat.completions.create(model="any", messages=MESSAGES, tools=TOOLS, stream=True))
    deltas = [piece.choices[0].delta for piece in pieces if piece.choices]
    calls = [call.function for delta in deltas for call in delta.tool_calls or [] if call.function]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "So."
    assert [call.name for call in calls if call.name] == ["weather"]
    assert len(calls) > 20
    assert json.loads("".join(call.arguments or "" for call in calls)) == ARGUMENTS


def test_reasoning_may_stay_in_the_text(server: Serving) -> None:
    message = server.chat(messages=MESSAGES, reasoning_format="none", tools=TOOLS)["message"]
    assert message["content"] == REASONED
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize("thinks", [False, True])
def test_an_answer_after_a_result_may_go_on_with_reasoning(server: Serving, thinks: bool) -> None:
    """If it reasons, its prompt has opened the channel."""
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "content": "rain"}
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    variables = {"enable_thinking": thinks}
    body = {"model": "any", "messages": messages, "tools": TOOLS, "chat_template_kwargs": variables}
    prompt = server.post("/apply-template", body).json()["prompt"]
    end = '<|tool_response>response:weather{value:<|"|>rain<|"|>}<tool_response|>'
    assert prompt.endswith(end + ("<|channel>thought\n" if thinks else ""))
    message = server.chat(**body)["message"]
    assert (message["content"], message["reasoning_content"].removeprefix("<|channel>thought\n")) == ("So.", "hm")


def test_the_chat_shows_reasoning_and_the_template_leaves_it_out_later(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    session = ChatSession(engine, SamplingParams(), Console())
    grammar = rule_of(engine, REASONED)
    session.params = replace(session.params, grammar=grammar)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(engine, "submit")  # the chat has no tools
        session.send("How is it?")
    assert capsys.readouterr().out.strip() == REASONED
    ids = engine.prompt_ids([*session.messages, {"role": "user", "content": "More?"}])
    assert "<|turn>model\nSo.<turn|>" in text_of(engine.model.tokenizer, ids, control=True)
