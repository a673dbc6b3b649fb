"""Answers of gpt-oss and of Gemma 4 over HTTP: reasoning in a channel, text, and Gemma's calls, whose strings have
quotes of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.chat.console import Console
from polarlm.engine.chat.session import ChatSession
from polarlm.engine.sampling.detokenizer import text_of
from tests.call_templates import GEMMA, GPT_OSS
from tests.server.http_server import Serving, serving
from tests.tool_model import tool_engine

MESSAGES: list[Any] = [{"role": "user", "content": "How is it?"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
ARGUMENTS = {"city": '"Rome", {Rom}', "days": [1, {"n": None}]}
CALL = '<|tool_call>call:weather{city:<|"|>"Rome", {Rom}<|"|>,days:[1,{n:null}]}<tool_call|>'
TEXT = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')  # which files may have as text


@dataclass(frozen=True)
class Family:
    template: str
    written: str  # an answer of reasoning and text
    shown: str  # the same as text
    kept: str  # what the template makes of it in the next turn
    text: tuple[str, ...] = ()


_CHANNEL = "<|channel|>analysis<|message|>hm<|end|>"
OF_GPT_OSS = Family(
    GPT_OSS,
    f"{_CHANNEL}<|start|>assistant<|channel|>final<|message|>So.",
    f"{_CHANNEL}\n\nSo.",
    "<|start|>assistant<|channel|>final<|message|>So.<|end|>",
)
_REASONED = "<|channel>thought\nhm\n<channel|>So."
OF_GEMMA = Family(GEMMA, _REASONED, _REASONED, "<|turn>model\nSo.<turn|>")
FAMILIES = {"gpt-oss": OF_GPT_OSS, "Gemma": OF_GEMMA, "Gemma as text": replace(OF_GEMMA, text=TEXT)}
EVERY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES, indirect=True)
GPT = pytest.mark.parametrize("family", [OF_GPT_OSS], ids=["gpt-oss"], indirect=True)
GEMMAS = pytest.mark.parametrize("family", [*FAMILIES.values()][1:], ids=[*FAMILIES][1:], indirect=True)


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="module")
def engine(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tool_engine(tmp_path_factory.mktemp("model"), family.template, family.text) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Serving]:
    with serving(engine) as server:
        yield server


def rule_of(engine: Engine, answer: str) -> str:
    ids = engine.model.tokenizer.tokenize(answer, control=True)
    return "%llguidance {}\nstart: " + " ".join(f"<[{token}]>" for token in ids)


def force(monkeypatch: pytest.MonkeyPatch, engine: Engine, written: str) -> Callable[[], Any]:
    """Let every request that is submitted have the answer `written`; returns what makes the constraint for that."""
    submit, form = engine.submit, SamplingParams(grammar=rule_of(engine, written))

    def forced(prompt: Any, params: SamplingParams, *more: Any, **named: Any) -> Any:
        constraint = engine.grammars.constraint(form)
        return submit(prompt, replace(params, grammar=None), *more, **named | {"constraint": constraint})

    monkeypatch.setattr(engine, "submit", forced)
    return lambda: engine.grammars.constraint(form)


@pytest.fixture
def answers(engine: Engine, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is the family's, with a call at its end if it is Gemma's."""
    force(monkeypatch, engine, family.written + (CALL if family.template is GEMMA else ""))


@EVERY
@pytest.mark.usefixtures("answers")
def test_reasoning_text_and_calls_are_told_apart_or_reasoning_stays_in_the_text(
    server: Serving, family: Family
) -> None:
    for form, expected in (("auto", ("So.", "hm")), ("none", (family.shown, None))):
        answer = server.openai.chat.completions.create(
            model="any", messages=MESSAGES, tools=TOOLS, extra_body={"reasoning_format": form}
        )
        (choice,) = answer.choices
        assert (choice.message.content, getattr(choice.message, "reasoning_content", None)) == expected
        calls = [(one.function.name, json.loads(one.function.arguments)) for one in choice.message.tool_calls or ()]
        assert calls == ([("weather", ARGUMENTS)] if family.template is GEMMA else [])
        assert choice.finish_reason == ("tool_calls" if calls else "stop")


@EVERY
@pytest.mark.usefixtures("answers")
def test_a_stop_string_is_one_of_the_text(server: Serving, family: Family) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "stop": ["hm", "final", "thought", "Rome", "."]}
    choice = server.chat(**body)
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("So", "hm")
    assert choice["finish_reason"] == "stop"
    assert not server.chat(**body, stop_anywhere=True)["message"]["content"]


@EVERY
def test_the_chat_shows_reasoning_and_the_template_leaves_it_out_later(
    engine: Engine, family: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    session = ChatSession(engine, SamplingParams(grammar=rule_of(engine, family.written)), Console())
    session.send("How is it?")
    assert capsys.readouterr().out.strip() == family.shown
    ids = engine.prompt_ids([*session.messages, {"role": "user", "content": "More?"}])
    assert family.kept in text_of(engine.model.tokenizer, ids, control=True)


@GPT
def test_the_text_of_an_answer_that_had_ended_at_once_gets_its_header(engine: Engine) -> None:
    tokenizer, begun = engine.model.tokenizer, {"role": "assistant", "content": ""}
    options = PromptOptions(continue_final_message=True)
    ended = begun | {"token_ids": [next(iter(tokenizer.eos_ids))]}
    assert engine.prompt_ids([*MESSAGES, ended], options) == engine.prompt_ids([*MESSAGES, begun], options)


@GPT
def test_a_constraint_is_one_of_the_text(server: Serving, engine: Engine) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": "any", "messages": MESSAGES}
    plain = server.post("/v1/chat/completions", body | {"max_tokens": 1}).json()
    answer = server.post("/v1/chat/completions", {**body, "response_format": form, "temperature": 1}).json()
    assert json.loads(answer["choices"][0]["message"]["content"])["n"] in (1, 2)
    header = engine.model.tokenizer.tokenize("<|channel|>final<|message|>", control=True)
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + len(header)


@GPT
def test_the_beginning_of_an_answer_is_continued(server: Serving) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    prompt = server.post("/apply-template", {"messages": begun}).json()["prompt"]
    assert prompt.endswith("<|start|>assistant<|channel|>final<|message|>It is")


@GPT
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_tools_leave_room_for_reasoning(server: Serving, choice: str) -> None:
    """The first letter of a channel is the model's to choose, and "a" begins the channel of reasoning."""
    (channel,) = server.engine.model.tokenizer.tokenize("<|channel|>", control=True)
    (letter,) = server.post("/tokenize", {"content": "a"}).json()["tokens"]
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 30, "temperature": 0}
    message = server.chat(**body, logit_bias={str(channel): 50, str(letter): 100})["message"]
    assert set(message["reasoning_content"]) == {"a"}
    assert not message["content"]


@GEMMAS
@pytest.mark.usefixtures("answers")
def test_a_stream_has_arguments_as_json_while_they_are_written(server: Serving) -> None:
    pieces = list(server.openai.chat.completions.create(model="any", messages=MESSAGES, tools=TOOLS, stream=True))
    deltas = [piece.choices[0].delta for piece in pieces if piece.choices]
    calls = [call.function for delta in deltas for call in delta.tool_calls or [] if call.function]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "So."
    assert [call.name for call in calls if call.name] == ["weather"]
    assert len(calls) > 20
    assert json.loads("".join(call.arguments or "" for call in calls)) == ARGUMENTS


@GEMMAS
@pytest.mark.usefixtures("answers")
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
