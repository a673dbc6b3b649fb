"""What a request may ask for: every field is looked at, and an error names the one that is wrong."""

from __future__ import annotations

import json
import math
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine import SamplingParams
from polarlm.engine.sampling.sample import resolve
from polarlm.model_loaders.config import GenerationDefaults
from polarlm.server.reading import parameters
from polarlm.server.reading.constraints import MAX_CHOICES
from polarlm.server.reading.fields import FIELDS
from polarlm.server.reading.prompts import MOST_SALT
from polarlm.server.reading.sampling import MAX_BIAS_TEXT, MAX_BIASES, MAX_STOP_LENGTH, MAX_STOPS
from polarlm.server.reading.values import BadRequest, read_json
from tests.pairs import in_turn

USER = {"role": "user", "content": "Hi"}
TOKENIZER = mock.Mock(tokenize=lambda text: [ord(letter) for letter in text])
ABOUT = parameters.ModelInfo(mock.Mock(tokenizer=TOKENIZER), "any", parse_special=True, tells_cached=True, context=64)


def read(body: dict[str, Any], **how: Any) -> parameters.ParsedRequest:
    """A letter is a token."""
    return parameters.read(body, ABOUT, **how)


def params(**fields: Any) -> SamplingParams:
    return read({"prompt": "a", **fields}).params


def complaint(body: dict[str, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(body)
    return caught.value


# -- what is taken ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("with_null", "without"),
    [
        ({"messages": [{**USER, "content": [None, {"type": "text", "text": "Hi"}]}]}, {"messages": [USER]}),
        ({"messages": [{**USER, "content": [{"type": "text", "text": None}, "Hi"]}]}, {"messages": [USER]}),
        ({"messages": [{**USER, "tool_calls": None, "images": None, "name": None}]}, {"messages": [USER]}),
        ({"response_format": {"type": None, "json_schema": None}}, {}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": None, "strict": None}}},
            {"json_schema": {"type": "object"}},
        ),
        ({"chat_template_kwargs": {"enable_thinking": None}}, {}),
        ({"logit_bias": {"5": None, "6": 1}}, {"logit_bias": {"6": 1}}),
        ({"stream_options": {"include_usage": None}, "structured_outputs": {"json": None}}, {}),
    ],
)
def test_null_inside_of_a_field_is_as_good_as_absent(with_null: dict[str, Any], without: dict[str, Any]) -> None:
    asked, other = (read({"messages": [USER], **body}) for body in (with_null, without))
    assert (asked.prompt, asked.params, asked.options) == (other.prompt, other.params, other.options)
    assert asked.warnings == ()


def test_parameters_that_json_spells_differently() -> None:
    assert params(stop=["a", "b"]) == SamplingParams(stop=("a", "b"))
    assert params(dry_sequence_breakers=[]) == SamplingParams(dry_sequence_breakers=())
    assert params(max_tokens=5, max_completion_tokens=7, n_predict=9).max_tokens == 7
    assert params(max_tokens=5, n_predict=9).max_tokens == 5
    assert params(repetition_penalty=1.5) == params(repeat_penalty=1.5, repetition_penalty=1.1)
    assert params(n_probs=0) == SamplingParams()
    assert read({"prompt": "a", "n_probs": 3}, switched_logprobs=True).params == SamplingParams(logprobs=3)
    assert read({"prompt": "a", "n_cmpl": 3}).n == 3


@in_turn(
    "name value meant",
    [
        ("top_k", -1, 0),
        ("top_p", 0, 1e-9),
        ("max_tokens", 5.0, 5),
        ("n_predict", -1.0, -1),
        ("seed", 7.0, 7),
        ("logprobs", 5.0, 5),
        ("stop_token_ids", [7.0], [7]),
        ("max_tokens", -2, -1),
        ("min_tokens", -1, 0),
        ("temperature", "0.5", 0.5),
        ("max_tokens", "5", 5),
        ("logprobs", "2", 2),
        ("seed", -5, -1),
        ("seed", 2**63 + 7, 7),
        ("seed", float(2**80), 0),
        ("stop", ["", "a"], "a"),
    ],
)
def test_values_of_other_servers_are_accepted(name: str, value: Any, meant: Any) -> None:
    assert params(**{name: value}) == params(**{name: meant})
    assert isinstance(params(max_tokens=5.0).max_tokens, int)


@in_turn(
    "bias meant",
    [
        ([[42, 1.5], [43, False]], {42: 1.5, 43: -math.inf}),
        ({"42": False}, {42: -math.inf}),
        ({"ab": -2}, {ord("a"): -2, ord("b"): -2}),
        ([["ab", False], [ord("a"), 1]], {ord("a"): 1, ord("b"): -math.inf}),
        ([["42", 1]], {ord("4"): 1, ord("2"): 1}),
        ([], {}),
        ({"": 1}, {}),
    ],
)
def test_a_bias_is_for_ids_or_strings(bias: Any, meant: dict[int, float]) -> None:
    assert params(logit_bias=bias) == SamplingParams(logit_bias=meant)


@in_turn(
    "fields count",
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_log_probabilities_are_requested_by_a_switch_with_a_number_beside_it(
    fields: dict[str, Any], count: int | None
) -> None:
    assert read({"prompt": "a", **fields}, switched_logprobs=True).params == SamplingParams(logprobs=count)


@in_turn(
    "fields field",
    [
        *(({"logprobs": bad}, "logprobs") for bad in (1, "true", [1])),
        *(({"logprobs": True, "top_logprobs": bad}, "top_logprobs") for bad in (-1, 21, 1.5, True, "x", {"x": 1})),
        *(({"top_logprobs": count}, "top_logprobs") for count in (5,)),
        ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
    ],
)
def test_a_wrong_switch_or_number_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read({"prompt": "a", **fields}, switched_logprobs=True)
    assert caught.value.field == field
    assert field in caught.value.message


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"stop": 7}, "stop must be a string or an array of strings, not 7"),
        ({"stop": ["a", {}]}, "stop[1] must be a string, not an object"),
        ({"prompt": None, "messages": [None]}, "messages[0] must be an object with a role and a content, not null"),
        ({"temperature": [[]]}, "temperature must be a number, not an array"),
        ({"stop_token_ids": "x" * 99}, "stop_token_ids must be an array of token ids, not a string of 101 characters"),
    ],
)
def test_types_are_called_by_their_names_in_json(fields: dict[str, Any], sentence: str) -> None:
    assert str(complaint({"prompt": "a", **fields})) == sentence


@in_turn(
    "name value",
    [
        *((name, bad) for name in ("temperature", "top_p", "min_p") for bad in (math.nan, math.inf, True, "x", -1)),
        *(("presence_penalty", bad) for bad in (math.nan, False, {"x": 1}, 1e9)),
        *((name, bad) for name in ("max_tokens", "top_k", "seed") for bad in (1.5, True, "x", "1.5", "true", "[1]")),
        *((name, 10**30) for name in ("max_tokens", "top_k")),
        ("max_completion_tokens", 0.5),
        ("repetition_penalty", -1),
        ("n_probs", 21),
        ("n_cmpl", -1),
        ("stop_token_ids", 5),
        ("stop_token_ids", [5] * (MAX_BIASES + 1)),
        ("parse_special", 1),
        ("cache_prompt", "no"),
        *(("cache_salt", bad) for bad in (5, "x" * (MOST_SALT + 1))),
        ("temperature", 10**4000),
        ("n", 1000),
        ("stream", 1),
        ("ignore_eos", 0),
        ("dry_allowed_length", 1.5),
        ("dry_sequence_breakers", 3),
        ("stop", 3),
        ("stop", ["a"] * (MAX_STOPS + 1)),
        ("stop", "x" * (MAX_STOP_LENGTH + 1)),
        ("stop", ["x" * MAX_STOP_LENGTH] * 17),
        ("logit_bias", 5),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"9" * 19: 1}),
        ("logit_bias", {"x" * (MAX_BIAS_TEXT + 1): 1}),
        ("logit_bias", [["x" * MAX_BIAS_TEXT, 1], ["x", 1]]),
        ("logit_bias", {"".join(map(chr, range(256, 256 + MAX_BIASES + 1))): 1}),
        ("logit_bias", {str(i): 1 for i in range(1000)} | {"7": 1e7}),
        ("logit_bias", {str(i): 1 for i in range(MAX_BIASES + 1)}),
        ("model", 3),
        ("stream_options", [1]),
        ("tools", 0),
        ("tool_choice", "sometimes"),
        ("response_format", "json"),
        ("json_schema", [3]),
        ("grammar", 3),
        ("guided_regex", ["a"]),
        ("guided_choice", "a"),
        ("guided_choice", ["a"] * (MAX_CHOICES + 1)),
        ("structured_outputs", {"json": {}, "regex": "a"}),
        ("structured_outputs", {"structural_tag": "a"}),
        *(("logprobs", bad) for bad in (True, -1, 21, 2.5, "x", [1], 10**30)),
        *(("top_logprobs", bad) for bad in (1, True, [1])),
    ],
)
def test_a_wrong_field_is_named(name: str, value: Any) -> None:
    error = complaint({"prompt": "a", name: value})
    assert error.field == name
    assert name in error.message
    assert len(error.message) < 200


def test_as_many_values_as_are_allowed_are_taken() -> None:
    taken = params(
        logit_bias={str(token): 1 for token in range(MAX_BIASES)},
        stop_token_ids=[5] * MAX_BIASES,
        stop=["x" * MAX_STOP_LENGTH] * 16 + [""] * (MAX_STOPS - 16),
    )
    assert len(taken.logit_bias) == MAX_BIASES
    assert len(taken.stop) == 16
    assert len(params(stop=["x"] * MAX_STOPS).stop) == MAX_STOPS


@in_turn(
    "body field",
    [
        ({}, "messages"),
        ({"prompt": "a", "messages": [USER]}, "messages"),
        ({"prompt": "a", "response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        *(
            ({"prompt": "a", "response_format": {"type": kind, "schema": 3}}, "response_format.schema")
            for kind in ("json_object", "json_schema")
        ),
        ({"prompt": "a", "guided_choice": ["a", 3]}, "guided_choice[1]"),
        ({"prompt": "a", "structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"prompt": "a", "guided_regex": "a", "grammar": 'root ::= "a"'}, "guided_regex"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt.prompt_string"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [10**40]}, "prompt[0]"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [USER, "Hi"]}, "messages[1]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        ({"prompt": "a", "logit_bias": {"7": math.nan}}, "logit_bias.7"),
        ({"prompt": "a", "logit_bias": {"7": True}}, "logit_bias.7"),
        ({"prompt": "a", "logit_bias": [5]}, "logit_bias[0]"),
        ({"prompt": "a", "logit_bias": [[7, 1], [-1, 1]]}, "logit_bias[1][0]"),
        ({"prompt": "a", "stop_token_ids": [7, -1]}, "stop_token_ids[1]"),
        ({"prompt": "a", "stop": ["a", 3]}, "stop[1]"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_the_path_of_a_wrong_field(body: dict[str, Any], field: str) -> None:
    assert complaint(body).field == field


@in_turn(
    "data",
    [
        b"",
        b"garbage",
        b"[1]",
        b"null",
        b'{"a": 1} 2',
        b"\xff\xfe",
        b'{"a": "\xc3"}',
        b'{"a":' * 100_000,
        b'{"a": ' + b"1" * 10_000 + b"}",
    ],
)
def test_input_that_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        read_json(data)
    assert caught.value.field is None
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"log \ud83d", "log \ufffd"),
        (r"\uDE00 log", "\ufffd log"),
        (r"\ud83d\ude00", "\N{GRINNING FACE}"),
        (r"\ud83d\ud83d\ude00\ude00", "\ufffd\N{GRINNING FACE}\ufffd"),
        (r"\\ud83d \"\ud83d\" \n\u0000", '\\ud83d "\ufffd" \n\0'),
    ],
)
def test_half_of_a_character_is_one_that_cannot_be_shown(written: str, read: str) -> None:
    """Names of members, too; an escaped backslash before the same letters is none."""
    assert read_json(f'{{"{written}": ["{written}", "{written}"]}}'.encode()) == {read: [read, read]}


NAMES = [*FIELDS, "role", "content", *SamplingParams.__dataclass_fields__]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=5))
def test_anything_is_either_understood_or_refused_in_a_sentence(body: dict[str, Any]) -> None:
    error, asked = None, None
    try:
        asked = read(read_json(json.dumps(body).encode()))
    except BadRequest as refusal:
        error = refusal
    if asked is not None:
        resolve(asked.params, GenerationDefaults())
    else:
        assert 0 < len(error.message.encode()) < 300
