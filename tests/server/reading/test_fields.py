"""Every field that other servers know is honoured, or changes nothing, or is refused by its name."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.version import Version

from polarlm.engine import PromptOptions, SamplingParams
from polarlm.engine.sampling.sample import CHAIN
from polarlm.server.reading import fields, parameters
from polarlm.server.reading.fields import FIELDS, RULES, SPELLINGS, Field
from polarlm.server.reading.values import BadRequest
from tests.lazily import openai

MESSAGES = [{"role": "user", "content": "Hi"}]
NEWEST_CLIENT = Version("3.52.0")  # the client of OpenAI whose fields are in the table; later ones may have more

ANYTHING = (True, False, 0, 1, -1, 5, 0.5, "x", "none", ["x"], {"x": 1})
# Fields whose values a rule tells apart: values that ask for something. All that ask for nothing are accepted:
# tests/server/http/test_present_is_not_given.py.
BY_RULE: dict[str, list[Any]] = {
    "best_of": [2, True],
    "adaptive_target": [0, 0.5],
    "add_special_tokens": [False],
}
REFUSED = [field for field in FIELDS.values() if field.treatment == "refused"]
SAME_NAME: dict[str, tuple[Any, ...]] = {  # as the parameter of sampling
    "temperature": (0, 1.5),
    **dict.fromkeys(("top_p", "min_p", "repeat_penalty", "dry_multiplier"), (0.5,)),
    **dict.fromkeys(("top_n_sigma", "xtc_probability", "xtc_threshold"), (0.5,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0.5, -2)),
    **dict.fromkeys(("min_tokens", "repeat_last_n", "dry_allowed_length"), (5,)),
    **dict.fromkeys(("max_tokens", "top_k"), (0, 5)),
    "seed": (0, 2**63 - 1),
    "dry_base": (2,),
    "dry_penalty_last_n": (5, -2),
    **dict.fromkeys(("ignore_eos", "stop_anywhere"), (True,)),
}
HONOURED: dict[str, tuple[Any, Any]] = {  # the other fields: a value, and what it becomes
    "parse_special": (False, PromptOptions(parse_special=False)),
    "chat_template_kwargs": ({"a": 1}, PromptOptions(parse_special=True, template_variables={"a": 1})),
    **{name: (7, SamplingParams(reasoning_budget=7)) for name in ("reasoning_budget_tokens", "thinking_token_budget")},
    "reasoning": ({"max_tokens": 7}, SamplingParams(reasoning_budget=7)),
    "reasoning_effort": (
        "low",
        PromptOptions(parse_special=True, template_variables={"enable_thinking": True, "reasoning_effort": "low"}),
    ),
    "cache_prompt": (False, PromptOptions(parse_special=True, cache_prompt=False)),
    "cache_salt": ("x", PromptOptions(parse_special=True, cache_salt="x")),
    "replayable": (True, PromptOptions(parse_special=True, replayable=True)),
    "priority": (-3, PromptOptions(parse_special=True, priority=-3)),
    **dict.fromkeys(("max_completion_tokens", "n_predict"), (5, SamplingParams(max_tokens=5))),
    "nsigma": (1.5, SamplingParams(top_n_sigma=1.5)),
    "repetition_penalty": (1.5, SamplingParams(repeat_penalty=1.5)),
    "dry_sequence_breakers": (["x"], SamplingParams(dry_sequence_breakers=("x",))),
    "logit_bias": ({"5": 1}, SamplingParams(logit_bias={5: 1})),
    "speculative.type": ("ngram-simple", SamplingParams(spec_type="ngram-simple")),
    "speculative.n_max": (5, SamplingParams(draft_max=5)),
    "stop": ("x", SamplingParams(stop=("x",))),
    "stop_token_ids": ([5], SamplingParams(stop_token_ids=(5,))),
    "response_format": ({"type": "json_object"}, SamplingParams(schema={"type": "object"})),
    **dict.fromkeys(("json_schema", "guided_json"), ({"type": "null"}, SamplingParams(schema={"type": "null"}))),
    **dict.fromkeys(("grammar", "guided_grammar"), ('root ::= "a"', SamplingParams(grammar='root ::= "a"'))),
    "guided_regex": ("a+", SamplingParams(regex="a+")),
    "guided_choice": (["a", "b."], SamplingParams(regex=r"a|b\.")),
    "structured_outputs": ({"regex": "a"}, SamplingParams(regex="a")),
    **dict.fromkeys(("logprobs", "n_probs"), (5, SamplingParams(logprobs=5))),
}
ELSEWHERE = {  # that have tests of their own
    *("messages", "prompt", "continue_final_message", "add_generation_prompt", "top_logprobs", "n", "n_cmpl"),
    *("stream", "stream_options", "return_progress", "sse_ping_interval", "include_reasoning", "reasoning_format"),
    *("tools", "tool_choice", "parallel_tool_calls", "model", "lora", "service_tier", "id_slot"),
}

ABOUT = parameters.ModelInfo(mock.Mock(), "any", parse_special=True, tells_cached=True, context=64)


def read(**body: Any) -> parameters.ParsedRequest:
    return parameters.read({"prompt": "a", **body}, ABOUT)


def asking(field: Field) -> list[Any]:
    """Values of a refused field that ask for something."""
    if field.name in RULES:
        return BY_RULE[field.name]
    neutral = [json.dumps(value) for value in field.neutral]  # where 1 is not true
    return [value for value in ANYTHING if json.dumps(value) not in neutral]


def refusal(**body: Any) -> BadRequest | None:
    try:
        read(**body)
    except BadRequest as error:
        return error
    return None


# -- the table is whole ----------------------------------------------------------------------------------------------


def test_a_field_stands_in_the_table_once() -> None:
    table = json.loads(
        Path(fields.__file__).with_name("fields.json").read_text(encoding="utf-8"), object_pairs_hook=list
    )
    assert [standing for standing, _ in table] == ["honoured", "harmless", "ignored", "refused"]
    names = [name for _, rows in table for name, _ in rows]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_every_field_of_openais_client_is_known() -> None:
    types = openai.types.chat, openai.types
    chat, text = (of.completion_create_params.CompletionCreateParamsBase.__annotations__ for of in types)
    unknown = {*chat, *text, "stream"} - set(FIELDS)
    if unknown and Version(openai.__version__) > NEWEST_CLIENT:
        pytest.skip(
            f"openai {openai.__version__} has fields that nobody has looked at yet: {', '.join(sorted(unknown))}"
        )
    assert unknown == set()
    assert all("OpenAI" in FIELDS[name].apis for name in {*chat, *text})


def test_every_field_has_its_example_here() -> None:
    assert set(BY_RULE) <= set(RULES) <= {*BY_RULE, *(name for name in FIELDS if FIELDS[name].treatment != "refused")}
    assert {*SAME_NAME, *HONOURED, *ELSEWHERE} == {
        name for name, field in FIELDS.items() if field.treatment == "honoured"
    }


# -- and says what is so ---------------------------------------------------------------------------------------------


def test_refused_fields_are_refused_by_name() -> None:
    for field in REFUSED:
        for value in asking(field):
            refused = refusal(**{field.name: value})
            assert refused is not None, (field.name, value)
            assert (refused.field, refused.message) == (field.name, f"{field.name}: {field.sentence}")
            assert len(refused.message) < 200


def test_add_special_tokens_is_refused_unless_it_is_the_default_of_the_prompt() -> None:
    assert read(add_special_tokens=True) == read()
    chat = {"messages": MESSAGES, "add_special_tokens": False}
    assert parameters.read(chat, ABOUT).params == SamplingParams()
    with pytest.raises(BadRequest, match="add_special_tokens"):
        parameters.read({**chat, "add_special_tokens": True}, ABOUT)


def test_harmless_fields_are_ignored() -> None:
    plain = read()
    for name in (name for name, field in FIELDS.items() if field.treatment in ("harmless", "ignored")):
        for value in (None, True, 7, "x", ["x"], {"x": 1}):
            asked = read(**{name: value})
            for part in ("prompt", "options", "params", "n"):
                assert getattr(asked, part) == getattr(plain, part), (name, value)
            told = (
                [(name, f"{name} is ignored: {FIELDS[name].sentence}")] if FIELDS[name].treatment == "ignored" else []
            )
            assert list(asked.warnings) == (told if value else []), (name, value)


def test_the_order_of_samplers_is_told_if_a_request_has_another_one() -> None:
    assert read(samplers=[*CHAIN]).warnings == ()
    off = {"top_n_sigma": -1, "xtc_probability": 0}
    older = [name for name in CHAIN if name != "top_n_sigma"]
    assert read(samplers=older, **off).warnings == ()
    ((_, told),) = read(samplers=older, top_n_sigma=1).warnings
    assert told == f"samplers is ignored: the order of samplers is {', '.join(CHAIN)} here"
    for absent in ("typ_p", "mirostat"):
        assert read(samplers=[*CHAIN[:4], absent, *CHAIN[4:]]).warnings == (("samplers", told),)


def test_of_several_spellings_the_first_counts_and_another_value_is_told() -> None:
    tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    values: dict[str, list[Any]] = {
        "tools": [[{"type": "function", "function": tool}], [tool]],
        "tool_choice": ["none", {"name": "look"}],
    }
    for first, *others in SPELLINGS:
        for other in others:
            one, another = values.get(first, [3, 4])
            base = {"messages": [{"role": "user", "content": "a"}], first: one}
            asked, alone = (parameters.read(body, ABOUT) for body in (base | {other: another}, base))
            assert asked.warnings == ((other, f"{other} is ignored: {first} is given as well"),)
            assert (asked.params, asked.tools, asked.n) == (alone.params, alone.tools, alone.n)
            assert first in values or parameters.read(base | {other: one}, ABOUT).warnings == ()
    (warning,) = parameters.read(base | {"prompt": "a"}, ABOUT, ("messages",)).warnings
    assert warning == ("prompt", "prompt is ignored: messages is given as well")


def test_a_constraint_may_be_spelt_several_times() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for more in ({"guided_json": schema}, {"json_schema": schema, "structured_outputs": {"json": schema}}):
        assert read(response_format=format, **more).params == read(response_format=format).params
    assert read(response_format={"type": "json_object"}, json_schema=schema).params == read(json_schema=schema).params
    for kind in ("json_object", "json_schema"):  # as llama-server's documentation has it
        assert read(response_format={"type": kind, "schema": schema}).params == read(json_schema=schema).params
    with pytest.raises(BadRequest, match="response_format and guided_json both constrain"):
        read(response_format=format, guided_json={"type": "integer"})


def test_the_most_that_there_is_stands_for_more() -> None:
    for name, most in fields.CAPS.items():
        for value in (-1, most + 1, 10**6):
            asked = read(**{name: value})
            assert asked.params == read(**{name: most}).params, (name, value)
            assert [field for field, _ in asked.warnings] == [name], (name, value)
        assert read(**{name: most}).warnings == ()


def test_honoured_fields_reach_the_engine() -> None:
    same = [(name, value, SamplingParams(**{name: value})) for name, values in SAME_NAME.items() for value in values]
    for name, value, meant in [*same, *((name, *row) for name, row in HONOURED.items())]:
        asked = read(**{name: value})
        assert meant in (asked.params, asked.options), (name, value)
        assert asked != read(), (name, value)
