"""Tools with OpenAI's own client: calls that parse, as the templates of several families have them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests import call_templates
from tests.lazily import openai
from tests.pairs import in_turn
from tests.server.answers.test_call_arguments import FORMS, OBJECTS
from tests.server.apis import APIS
from tests.server.http_server import Serving, serving
from tests.tool_model import tool_engine

FAMILIES = {
    "qwen3": call_templates.QWEN3,
    **{name: getattr(call_templates, name) for name in (*FORMS, *OBJECTS)},
    "NO_TOOLS": call_templates.NO_TOOLS,
    "gpt-oss": call_templates.GPT_OSS,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo", "Bern"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "How is it?"}]


@pytest.fixture(params=["qwen3", "MISTRAL_IDS", "GEMMA", "PYTHON", "gpt-oss"], scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with (
        tool_engine(tmp_path_factory.mktemp("model"), FAMILIES[request.param]) as engine,
        serving(engine) as server,
    ):
        yield server


def ask(server: Serving, **more: Any) -> Any:
    fields = {"model": "any", "messages": MESSAGES, "tools": TOOLS, "temperature": 1, "max_tokens": 400, **more}
    return server.openai.chat.completions.create(**fields)


def at_once(server: Serving) -> Any:
    """Fields that make a model answer without reasoning, or with no word of it.

    Two templates do not say that the model must not reason: Gemma's calls begin at once, gpt-oss's reasoning ends.
    """
    control = server.engine.model.tokenizer.control_tokens()
    bias = {str(control[name]): 100 for name in ("<|tool_call>", "<|end|>") if name in control}
    return {"chat_template_kwargs": {"enable_thinking": False}, "logit_bias": bias}


def assert_valid(call: Any) -> None:
    assert call.type == "function"
    if call.function.name == "time":
        assert call.function.arguments == "{}"
    else:
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)


FORM = {
    "type": "object",
    "properties": {"rain": {"type": "boolean"}},
    "required": ["rain"],
    "additionalProperties": False,
}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


def assert_required_calls_parse(server: Serving, seeds: int) -> None:
    for seed in range(seeds):
        more: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        more["extra_body"] = at_once(server)
        if seed % 2:
            with server.openai.chat.completions.stream(
                model="any", messages=MESSAGES, tools=TOOLS, temperature=1, max_tokens=400, **more
            ) as events:
                answer = events.get_final_completion()
        else:
            answer = ask(server, **more)
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        assert len(call.id) == 9 or server.engine.model.template.calls.id_form
        assert_valid(call)


def test_required_calls_parse(family: Serving) -> None:
    assert_required_calls_parse(family, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_required_calls_parse_in_every_family(name: str, tmp_path: Path) -> None:
    """Slow: a model for each template."""
    with tool_engine(tmp_path, FAMILIES[name]) as engine, serving(engine) as server:
        assert_required_calls_parse(server, 3)
        assert_calls_or_text_of_a_schema(server, 3)


def test_some_of_the_tools_may_be_allowed_alone(hermes: Serving) -> None:
    for name in ("weather", "time"):
        tools = [{"type": "function", "function": {"name": name}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
        (call,) = ask(hermes, tool_choice=choice, parallel_tool_calls=False).choices[0].message.tool_calls
        assert call.function.name == name
        assert_valid(call)


def test_results_of_calls_are_read(family: Serving) -> None:
    """Through every template, and with calls and ids of another server's."""
    call = {
        "id": "call_of_another",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
    }
    turn = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    result = [{"role": "tool", "tool_call_id": "call_of_another", "content": "rain"}]
    answer = ask(family, messages=[*MESSAGES, *turn, *result], tool_choice="none", max_tokens=8)
    assert answer.usage.completion_tokens <= 8
    assert answer.choices[0].message.tool_calls is None
    longer = ask(family, messages=[*MESSAGES, *turn, *result, *turn, *result], tool_choice="none", max_tokens=8)
    assert longer.usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_model_that_wants_to_may_call(hermes: Serving) -> None:
    """Text before the calls is kept; there may be several."""
    seen = 0
    for seed in range(6):
        (choice,) = ask(hermes, seed=seed, logit_bias={"<tool_call>": 12, "<|im_end|>": 4}, max_tokens=400).choices
        if choice.finish_reason == "tool_calls":
            seen += len(choice.message.tool_calls)
            assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)
            for call in choice.message.tool_calls:
                assert_valid(call)
        else:
            assert choice.finish_reason == "length" or choice.message.tool_calls is None
    assert seen > 1
    form: Any = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}}
    called = [ask(hermes, seed=seed, logit_bias={"<tool_call>": 100}, response_format=form) for seed in range(3)]
    assert all(answer.choices[0].message.tool_calls for answer in called)


def assert_calls_or_text_of_a_schema(server: Serving, seeds: int) -> None:
    """Agents with tools and a type of their result send both."""
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}}
    for choice in ("auto", "required", "none"):
        for seed in range(seeds):
            reply = APIS["chat"].ask(
                server,
                "How is it?",
                stream=bool(seed % 2),
                temperature=1,
                seed=seed,
                max_tokens=400,
                tools=[tool["function"] for tool in TOOLS],
                tool_choice=choice,
                response_format=form,
                parallel_tool_calls=False,
                **at_once(server),
            )
            assert reply.calls or choice != "required" or reply.reason == "length"
            assert not reply.calls or choice != "none"
            if not reply.calls and reply.reason == "stop":
                jsonschema.validate(json.loads(reply.text), FORM)


def test_an_answer_is_calls_or_text_of_a_schema(family: Serving) -> None:
    assert_calls_or_text_of_a_schema(family, 2)


def test_no_call_where_none_is_wanted(hermes: Serving) -> None:
    for seed in range(3):
        (choice,) = ask(hermes, seed=seed, tool_choice="none", max_tokens=20, logit_bias={"<tool_call>": 100}).choices
        assert choice.message.tool_calls is None
        assert "<tool_call>" not in choice.message.content


# -- reasoning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_ignore_eos_holds_without_calls_and_is_else_said_not_to(family: Serving, choice: str) -> None:
    ends = dict.fromkeys(map(str, family.engine.model.tokenizer.eos_ids), 100)
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 9, "ignore_eos": True}
    answer = family.post("/v1/chat/completions", {**body, "logit_bias": ends}).json()
    told = [sentence for sentence in answer.get("warnings", ()) if "ignore_eos does not hold" in sentence]
    assert len(told) == (choice == "auto")
    assert choice == "auto" or answer["choices"][0]["finish_reason"] == "length"


def test_reasoning_may_stay_in_the_text_or_be_left_out(thinking: Serving) -> None:
    text = "<think>\nso\n</think>\n\nHello."
    for more, shown in (({"reasoning_format": "none"}, text), ({"include_reasoning": False}, "Hello.")):
        grammar = f"%llguidance {{}}\nstart: {json.dumps(text)}"
        message = thinking.chat(messages=MESSAGES, grammar=grammar, **more)["message"]
        assert (message["content"], "reasoning_content" in message) == (shown, False)


# -- what is refused ---------------------------------------------------------------------------------------------------


def schema(parameters: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


def deep(levels: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": deep(levels - 1)} if levels else {}}


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else []


NAMED_G = {"type": "function", "function": {"name": "g"}}


def allowed(what: Any) -> dict[str, Any]:
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": what}}


@in_turn(
    "wrong field sentence",
    [
        ({"tools": {"a": 1}}, "tools", "tools must be an array of functions"),
        ({"tools": [TOOLS[0]] * 129}, "tools", "has 129 functions, but at most 128 are taken"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "names a function twice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object with a name"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools[0].function.name", "letters, digits"),
        (schema([1]), "tools[0].function.parameters", "must be a JSON schema"),
        (schema({"type": "string"}), "tools[0].function.parameters.type", "arguments have names"),
        (schema(deep(60)), "tools[0].function", "nested more than 64 levels deep"),
        (schema({"description": "a" * 140_000}), "tools", "at most 131,072 are taken"),
        (schema({"properties": {"a": {"$ref": "#/nowhere"}}}), "tools", "the function f cannot be used: .*nowhere"),
        (
            schema({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
            "tools",
            "the function f .*nothing fulfils it",
        ),
        (
            schema({"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}}, "required": ["a"]}),
            "tools",
            "the function f cannot be used: .*unsatisfiable",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g', which is not one"),
        ({"tool_choice": 5}, "tool_choice", "must be auto, none, required, or an object such as .*, not 5"),
        ({"tool_choice": {"name": "f"}}, "tool_choice.type", "must be function, custom or allowed_tools, .*, not null"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "must be an object with a name.*, not null"),
        (allowed(None), "tool_choice.allowed_tools", "an object with a mode and tools, not null"),
        (allowed({"tools": []}), "tool_choice.allowed_tools.mode", "must be auto or required"),
        (allowed({"mode": "auto", "tools": []}), "tool_choice.allowed_tools.tools", "an array of objects"),
        (allowed({"mode": "auto", "tools": ["f"]}), "tool_choice.allowed_tools.tools[0]", "an object such as"),
        (allowed({"mode": "auto", "tools": [NAMED_G]}), "tool_choice.allowed_tools.tools[0]", "'g', which is not one"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"parallel_tool_calls": 5}, "parallel_tool_calls", "must be true or false"),
        (
            {"extra_body": {"grammar": 'root ::= "a"'}},
            "tools",
            "a grammar, or a regular expression, exclude each other",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": ENDLESS}}},
            "response_format",
            "cannot be",
        ),
        ({"extra_body": {"chat_template_kwargs": {"messages": 1}}}, "chat_template_kwargs.messages", "cannot be set"),
        ({"extra_body": {"chat_template_kwargs": [1]}}, "chat_template_kwargs", "must be an object"),
        ({"extra_body": {"chat_template_kwargs": {"a": nested(65)}}}, "chat_template_kwargs", "nested more than 64"),
        ({"extra_body": {"chat_template_kwargs": {"a": "b" * 5000}}}, "chat_template_kwargs", "at most 4,096"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_sentence(
    hermes: Serving, wrong: dict[str, Any], field: str | None, sentence: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence) as caught:
        ask(hermes, max_tokens=1, **wrong)
    assert caught.value.param == field
