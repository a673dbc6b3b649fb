"""Answers of messages in channels over HTTP: reasoning and text go where each API has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.chat.console import Console
from polarlm.engine.chat.session import ChatSession
from tests.call_templates import GPT_OSS
from tests.server.http_server import Serving, serving
from tests.tool_model import tool_engine

MESSAGES: list[Any] = [{"role": "user", "content": "How is it?"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "time"}}]
ANSWER = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tool_engine(tmp_path_factory.mktemp("model"), GPT_OSS) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Serving]:
    with serving(engine) as server:
        yield server


def rule_of_the_answer(engine: Engine) -> str:
    ids = engine.model.tokenizer.tokenize(ANSWER, control=True)
    return "%llguidance {}\nstart: " + " ".join(f"<[{token}]>" for token in ids[:-1])


@pytest.fixture(autouse=True)
def answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rule_of_the_answer(engine)
    submit = engine.submit

    def forced(prompt: Any, params: SamplingParams, *more: Any, **named: Any) -> Any:
        return submit(prompt, params if params.is_constrained else replace(params, grammar=rule), *more, **named)

    monkeypatch.setattr(engine, "submit", forced)


def test_openai(server: Serving) -> None:
    answer = server.openai.chat.completions.create(model="any", messages=MESSAGES)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.reasoning_content) == ("So.", "hm")  # type: ignore[attr-defined]
    assert choice.finish_reason == "stop"


def test_reasoning_may_stay_in_the_text(server: Serving) -> None:
    message = server.chat(messages=MESSAGES, reasoning_format="none")["message"]
    assert message["content"] == "<|channel|>analysis<|message|>hm<|end|>\n\nSo."


def test_a_constraint_is_one_of_the_text(server: Serving, engine: Engine) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": "any", "messages": MESSAGES}
    plain = server.post("/v1/chat/completions", body).json()
    answer = server.post("/v1/chat/completions", {**body, "response_format": form, "temperature": 1}).json()
    assert json.loads(answer["choices"][0]["message"]["content"])["n"] in (1, 2)
    header = engine.model.tokenizer.tokenize("<|channel|>final<|message|>", control=True)
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + len(header)


def test_the_beginning_of_an_answer_is_continued(server: Serving) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    prompt = server.post("/apply-template", {"messages": begun}).json()["prompt"]
    assert prompt.endswith("<|start|>assistant<|channel|>final<|message|>It is")


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_tools_leave_room_for_reasoning(server: Serving, choice: str) -> None:
    """The first letter of a channel is the model's to choose, and "a" begins the channel of reasoning."""
    (channel,) = server.engine.model.tokenizer.tokenize("<|channel|>", control=True)
    (letter,) = server.post("/tokenize", {"content": "a"}).json()["tokens"]
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 30, "temperature": 0}
    message = server.chat(**body, logit_bias={str(channel): 50, str(letter): 100})["message"]
    assert set(message["reasoning_content"]) == {"a"}
    assert not message["content"]


def test_the_chat_keeps_the_text_without_the_reasoning(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    session = ChatSession(engine, SamplingParams(grammar=rule_of_the_answer(engine)), Console())
    session.send("How is it?")
    assert capsys.readouterr().out.strip() == "<|channel|>analysis<|message|>hm<|end|>\n\nSo."
    assert session.messages[-1] == {"role": "assistant", "content": "So."}
