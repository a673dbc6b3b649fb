"""Every field that other servers know is honoured, or changes nothing, or is refused by its name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import openai
import pytest
from openai.types import completion_create_params as of_text
from openai.types.chat import completion_create_params as of_chat
from packaging.version import Version

from polarlm.engine import PromptOptions, SamplingParams
from polarlm.server.reading import fields, parameters
from polarlm.server.reading.fields import FIELDS
from polarlm.server.reading.values import BadRequest
from scripts.make_http_fields import DOCUMENT, document

MESSAGES = [{"role": "user", "content": "Hi"}]
NEWEST_CLIENT = Version("3.52.0")  # of OpenAI's, whose fields are in the table; later ones may have more

ASKING: dict[str, list[Any]] = {  # values of refused fields that ask for something
    "parse_tool_calls": [False],
    "functions": [[{}]],
    "function_call": [{"name": "f"}],
    "modalities": [["text", "audio"]],
    "audio": [{}],
    "moderation": [{"model": "x"}],
    "web_search_options": [{}],
    "verbosity": ["low"],
    "suffix": ["x"],
    "echo": [True],
    "best_of": [2, True],
    "structural_tag": ["x"],
    "grammar_lazy": [True],
    "guided_whitespace_pattern": [" "],
    "mirostat": [1, 2, False],
    "typical_p": [0.5],
    "typ_p": [0.5],
    "tfs_z": [0.5],
    "top_n_sigma": [1.5, False, "0"],
    "xtc_probability": [0.1],
    "dynatemp_range": [0.5],
    "adaptive_target": [0, 0.5],
    "min_keep": [2],
    "use_beam_search": [True, 0],
    "logits_processors": [["x"]],
    "penalize_nl": [True],
    "samplers": [["temperature", "top_k", "top_p", "min_p", "penalties", "dry"], ["top_k"], "kt", [1], []],
    "n_indent": [4],
    "t_max_predict_ms": [100],
    "watermarking": [True],
    "repetition_detection": [{}],
    "allowed_token_ids": [[5]],
    "bad_words": [["x"]],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "truncate_prompt_tokens": [5],
    "add_special_tokens": [False],
    "chat_template": ["{{ x }}"],
    "generation_prompt": ["x"],
    "documents": [[{"title": "x"}]],
    "chat_format": [1],
    "chat_parser": ["x"],
    "reasoning_budget_tokens": [0],
    "thinking_token_budget": [5],
    "post_sampling_probs": [True],
    "prompt_logprobs": [0],
    "logprob_token_ids": [[5]],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "return_prompt_text": [True],
    "return_tokens": [True],
    "response_fields": [["content"]],
    "lora": [[{"id": 0, "scale": 1}]],
    "image_data": [[{}]],
    "prompt_embeds": ["x"],
    "vllm_xargs": [{"x": 1}],
}
NOTHING: dict[str, list[Any]] = {  # and values that ask for nothing
    "best_of": [1],
    "echo": [False],
    "suffix": [""],
    "modalities": [["text"]],
    "mirostat": [0, 0.0],
    "typical_p": [1, 1.0],
    "top_n_sigma": [-1, 0],
    "adaptive_target": [-1.0],
    "xtc_probability": [0],
    "samplers": [
        ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        ["penalties", "dry", "top_k", "top_p", "min_p", "temperature"],
    ],
    "add_special_tokens": [True],
    "return_tokens": [False],
}
HONOURED: dict[str, tuple[Any, Any]] = {  # a value, and what it becomes
    "parse_special": (False, PromptOptions(parse_special=False)),
    "chat_template_kwargs": (
        {"a": 1},
        PromptOptions(parse_special=True, template_variables={"a": 1}),
    ),
    "reasoning_effort": (
        "low",
        PromptOptions(parse_special=True, template_variables={"enable_thinking": True, "reasoning_effort": "low"}),
    ),
    "cache_prompt": (False, PromptOptions(parse_special=True, cache_prompt=False)),
    "cache_salt": ("x", PromptOptions(parse_special=True, cache_salt="x")),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict"), (5, SamplingParams(max_tokens=5))),
    "min_tokens": (5, SamplingParams(min_tokens=5)),
    "temperature": (0.5, SamplingParams(temperature=0.5)),
    "top_p": (0.5, SamplingParams(top_p=0.5)),
    "top_k": (5, SamplingParams(top_k=5)),
    "min_p": (0.5, SamplingParams(min_p=0.5)),
    **dict.fromkeys(("repeat_penalty", "repetition_penalty"), (1.5, SamplingParams(repeat_penalty=1.5))),
    "repeat_last_n": (5, SamplingParams(repeat_last_n=5)),
    "presence_penalty": (0.5, SamplingParams(presence_penalty=0.5)),
    "frequency_penalty": (0.5, SamplingParams(frequency_penalty=0.5)),
    "dry_multiplier": (0.5, SamplingParams(dry_multiplier=0.5)),
    "dry_base": (1.5, SamplingParams(dry_base=1.5)),
    "dry_allowed_length": (5, SamplingParams(dry_allowed_length=5)),
    "dry_penalty_last_n": (5, SamplingParams(dry_penalty_last_n=5)),
    "dry_sequence_breakers": (["x"], SamplingParams(dry_sequence_breakers=("x",))),
    "logit_bias": ({"5": 1}, SamplingParams(logit_bias={5: 1})),
    "speculative.type": ("ngram-simple", SamplingParams(spec_type="ngram-simple")),
    "speculative.n_max": (5, SamplingParams(draft_max=5)),
    "speculative.n_min": (5, SamplingParams(draft_min=5)),
    "seed": (5, SamplingParams(seed=5)),
    "stop": ("x", SamplingParams(stop=("x",))),
    "stop_token_ids": ([5], SamplingParams(stop_token_ids=(5,))),
    "ignore_eos": (True, SamplingParams(ignore_eos=True)),
    "response_format": ({"type": "json_object"}, SamplingParams(schema={"type": "object"})),
    **dict.fromkeys(("json_schema", "guided_json"), ({"type": "null"}, SamplingParams(schema={"type": "null"}))),
    **dict.fromkeys(("grammar", "guided_grammar"), ('root ::= "a"', SamplingParams(grammar='root ::= "a"'))),
    "guided_regex": ("a+", SamplingParams(regex="a+")),
    "guided_choice": (["a", "b."], SamplingParams(regex=r"a|b\.")),
    "structured_outputs": ({"regex": "a"}, SamplingParams(regex="a")),
    **dict.fromkeys(("logprobs", "n_probs"), (5, SamplingParams(logprobs=5))),
}
ELSEWHERE = {
    "messages",
    "prompt",
    "continue_final_message",
    "add_generation_prompt",
    "top_logprobs",
    "n",
    "n_cmpl",
    "stream",
    "stream_options",
    "return_progress",
}  # in test_parameters
ELSEWHERE |= {"tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "reasoning_format"}  # test_http_tools


def read(**body: Any) -> parameters.ParsedRequest:
    return parameters.read({"prompt": "a", **body}, lambda text: [])


def of(standing: str) -> list[str]:
    return [name for name, field in FIELDS.items() if field.standing == standing]


def each(values: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, some in values.items() for value in some]


# -- the table is whole ----------------------------------------------------------------------------------------------


def test_a_field_stands_in_the_table_once() -> None:
    names = [row[0] for rows in (fields._honoured(), fields._harmless(), fields._refused()) for row in rows]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_every_field_of_openais_client_is_known() -> None:
    chat, text = (of.CompletionCreateParamsBase.__annotations__ for of in (of_chat, of_text))
    unknown = {*chat, *text, "stream"} - set(FIELDS)
    if unknown and Version(openai.__version__) > NEWEST_CLIENT:
        pytest.skip(
            f"openai {openai.__version__} has fields that nobody has looked at yet: {', '.join(sorted(unknown))}"
        )
    assert unknown == set()
    assert all("O" in FIELDS[name].apis for name in {*chat, *text})


def test_every_field_has_its_example_here() -> None:
    assert set(ASKING) == set(of("refused"))
    assert set(HONOURED) | ELSEWHERE == set(of("honoured"))


def test_the_document_is_current() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run python -m scripts.make_http_fields"


# -- and says what is so ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), each(ASKING))
def test_refused_fields_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**{name: value})
    assert caught.value.field == name
    assert caught.value.message.startswith(name)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(("name", "value"), [*each(NOTHING), *((name, None) for name in ASKING)])
def test_neutral_values_of_refused_fields_are_accepted(name: str, value: Any) -> None:
    assert read(**{name: value}) == read()


def test_add_special_tokens_is_refused_unless_it_is_the_default_of_the_prompt() -> None:
    chat = {"messages": MESSAGES, "add_special_tokens": False}
    assert parameters.read(chat, lambda text: []).params == SamplingParams()
    with pytest.raises(BadRequest, match="add_special_tokens"):
        parameters.read({**chat, "add_special_tokens": True}, lambda text: [])


@pytest.mark.parametrize("name", of("harmless"))
def test_harmless_fields_are_ignored(name: str) -> None:
    plain = read()
    for value in (None, True, 5, "x", ["x"], {"x": 1}):
        asked = read(**{name: "x" if name == "model" and value is not None else value})
        for part in ("prompt", "options", "params", "n"):
            assert getattr(asked, part) == getattr(plain, part), value


@pytest.mark.parametrize("name", HONOURED)
def test_honoured_fields_reach_the_engine(name: str) -> None:
    value, meant = HONOURED[name]
    asked = read(**{name: value})
    assert meant in (asked.params, asked.options)
    assert asked != read()
