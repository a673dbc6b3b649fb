"""How this server treats every field of a completion request that OpenAI, llama-server or vLLM defines.

A field is *honoured*, *harmless* (the answer is the same with it and without it), or *refused* by name, unless its
value is the default. Fields that none of the three defines are ignored: clients send extra names, and expect no effect
of names without a definition. Over HTTP they get a warning. docs/http-fields.md is generated from this table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Neutral:
    """Values of a refused field that have no effect, and their text in the documentation."""

    text: str
    holds: Callable[[Any, Body], bool]


@dataclass(frozen=True)
class Field:
    """A field, the APIs that define it, and its effect here, or why it has none."""

    name: str
    apis: str  # O: OpenAI, L: llama-server, V: vLLM, P: this server alone
    standing: Literal["honoured", "harmless", "refused"]
    says: str
    neutral: Neutral | None = None


def complaint(body: Body) -> tuple[str, str] | None:
    """The first refused field of a request whose value has an effect, and a sentence that names it; else None."""
    for name, value in body.items():
        field = FIELDS.get(name)
        if field is None or field.standing != "refused" or value is None:
            continue
        if field.neutral is None or not field.neutral.holds(value, body):
            return name, f"{name}: {field.says}"
    return None


# -- values without effect ---------------------------------------------------------------------------------------


def _is(*values: Any) -> Neutral:
    """One of `values`; true and false are not numbers."""
    text = " or ".join(f"`{json.dumps(value)}`" for value in values)
    return Neutral(
        text, lambda given, _: any(given == value and _is_flag(given) == _is_flag(value) for value in values)
    )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _no_more_than_zero(value: Any, _: Body) -> bool:
    return isinstance(value, (int, float)) and not _is_flag(value) and value <= 0


def _below_zero(value: Any, body: Body) -> bool:
    return value != 0 and _no_more_than_zero(value, body)


def _is_where_bos_belongs(value: Any, body: Body) -> bool:
    return value is ("prompt" in body)


_SAMPLERS = ("penalties", "dry", "top_k", "top_p", "min_p", "temperature")
_ALIASES = {"temp": "temperature", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "nucleus": "top_p"}
_OFF = ("top_n_sigma", "top-n-sigma", "typ_p", "typ-p", "typical", "typical_p", "xtc", "infill", "adaptive_p")


def _is_usual_order(value: Any, _: Body) -> bool:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return False
    return tuple(_ALIASES.get(name, name) for name in value if name not in _OFF) == _SAMPLERS


# -- the table ---------------------------------------------------------------------------------------------------


def _honoured() -> Iterator[tuple[str, str, str]]:
    yield (
        "messages",
        "OLV",
        "strings and text parts of system, developer, user, assistant and tool; `tool_calls`, `tool_call_id` and "
        "`reasoning_content`; other fields of a message are ignored",
    )
    yield (
        "prompt",
        "OLV",
        'a string, by itself or as `{"prompt_string": …}`, or an array of token ids and strings; one to a request',
    )
    yield "parse_special", "P", "whether names of control tokens in a raw prompt become these tokens [true]"
    yield "max_tokens", "OLV", "tokens of the answer at most; -1 is what the context holds [-1]"
    yield "max_completion_tokens", "OLV", "another name of `max_tokens`; it counts if both are given"
    yield "n_predict", "L", "another name of `max_tokens`, which counts if both are given"
    yield "min_tokens", "V", "how many tokens come before one that ends the answer, at least [0]"
    yield "temperature", "OLV", "0 is greedy [the model's]"
    yield "top_p", "OLV", "0 takes the best token alone [the model's]"
    yield "top_k", "LV", "0 and -1 keep all [the model's]"
    yield "min_p", "LV", "[the model's]"
    yield "repeat_penalty", "L", "1 is off [the model's]"
    yield "repetition_penalty", "V", "another name of `repeat_penalty`, which counts if both are given"
    yield "repeat_last_n", "L", "how many of the last tokens the penalties look at, 0 to 64 [64]"
    yield "presence_penalty", "OLV", "[0]"
    yield "frequency_penalty", "OLV", "[0]"
    yield "dry_multiplier", "L", "0 is off [the model's, or else 0]"
    yield "dry_base", "L", "[1.75]"
    yield "dry_allowed_length", "L", "[2]"
    yield "dry_penalty_last_n", "L", "-1 is all of the context, -2 the answer alone [the model's, or else -1]"
    yield "dry_sequence_breakers", "L", "a string, or an array of at most 16"
    yield (
        "logit_bias",
        "OLV",
        (
            "an object or an array of pairs: token ids, or strings that stand for all of their tokens, and numbers, or "
            "false, which bans a token"
        ),
    )
    yield "seed", "OLV", "-1 takes a different one each time [-1]"
    yield "stop", "OLV", "a string, or an array of at most 16"
    yield "stop_token_ids", "V", "tokens that end the answer as the model's own ends do"
    yield "ignore_eos", "LV", "continues after the model's own ends"
    yield "logprobs", "OLV", "in chat true, else a number from 0 to 20"
    yield "top_logprobs", "OLV", "in chat, 0 to 20, with `logprobs`"
    yield (
        "n_probs",
        "L",
        "log-probabilities of this many tokens at each place; 0 leaves it to `logprobs` [0]",
    )
    yield "n", "OLV", "answers, 1 to 16 [1]"
    yield "n_cmpl", "L", "another name of `n`, which counts if both are given"
    yield "stream", "OLV", "[false]"
    yield "stream_options", "OLV", "`include_usage`; its other fields are ignored"
    yield "return_progress", "L", "in streamed chats, events with `prompt_progress` until the first token [false]"
    yield "speculative.type", "L", "`none` or `ngram-simple`: how tokens are drafted [`--spec-type`]"
    yield "speculative.n_max", "L", "tokens of a draft at most, 0 to 15 [`--draft-max`]"
    yield "speculative.n_min", "L", "tokens of a draft at least, 0 to 15 [`--draft-min`]"
    yield (
        "response_format",
        "OLV",
        "`text`, `json_object`, or `json_schema`: the answer is JSON of that schema, which may also be llama-server's "
        "`schema` with `json_object`",
    )
    yield "json_schema", "L", "the answer is JSON of this schema; an object or its text"
    yield "grammar", "L", "the answer is of this grammar, in GBNF or llguidance's form of Lark"
    yield "guided_json", "V", "as `json_schema`"
    yield "guided_regex", "V", "the answer matches this regular expression as a whole"
    yield "guided_choice", "V", "the answer is one of at most 1,024 strings"
    yield "guided_grammar", "V", "as `grammar`"
    yield "structured_outputs", "V", "an object with one of `json`, `json_object`, `regex`, `choice` and `grammar`"
    yield (
        "continue_final_message",
        "LV",
        "whether the answer continues with the last message [true if that is the assistant's]",
    )
    yield "add_generation_prompt", "LV", "the opposite of `continue_final_message`"
    yield "tools", "OLV", "at most 128 functions, which the model may call; needs the extra `json`"
    yield (
        "tool_choice",
        "OLV",
        "`auto`, `none`, `required`, or an object with a function's name or `allowed_tools` [`auto`]",
    )
    yield "parallel_tool_calls", "OLV", "whether an answer may have several calls [true]"
    yield "chat_template_kwargs", "LV", "variables of the model's chat template, such as `enable_thinking`"
    yield (
        "reasoning_effort",
        "OLV",
        "goes to the model's template; `none` asks for no reasoning; variables in `chat_template_kwargs` come first",
    )
    yield "reasoning_format", "L", "`none` leaves reasoning in the text; `auto` and `deepseek` give it apart [`auto`]"
    yield "include_reasoning", "V", "false leaves reasoning out [true]"
    yield "cache_prompt", "L", "false computes all of the prompt, whatever is in the cache [true]"
    yield "cache_salt", "V", "only requests with the same salt find the blocks that this one leaves in the cache"


_NO_REASONING = "the model reasons as long as it likes"
_ONLY_SPEED = "it concerns speed, not the answer"
_NO_SHIFT = "the answer ends where the context is full, and nothing is left out of it"
_NO_MEDIA = "this server takes text alone, and refuses other parts in messages"
_ABOUT = "it identifies the user or the request"


def _harmless() -> Iterator[tuple[str, str, str]]:
    yield "model", "OLV", "there is one model, and any name is taken"
    for name, apis in (
        ("user", "OV"),
        ("metadata", "O"),
        ("safety_identifier", "O"),
        ("request_id", "V"),
        ("session_id", "V"),
    ):
        yield name, apis, _ABOUT
    yield "store", "O", "nothing is stored for later retrieval"
    yield "service_tier", "O", "there is one tier"
    yield "priority", "V", "requests are served in the order in which they come"
    yield "prediction", "O", _ONLY_SPEED
    for name in ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"):
        yield name, "O", "the cache finds common beginnings of prompts by itself"
    for name in ("id_slot", "n_cache_reuse", "backend_sampling", "sse_ping_interval"):
        yield name, "L", _ONLY_SPEED
    yield "stream_interval", "V", "each piece is sent as it comes"
    for name in ("n_keep", "n_discard"):
        yield name, "L", _NO_SHIFT
    for name in ("mirostat_tau", "mirostat_eta"):
        yield name, "L", "it has an effect only with `mirostat`"
    yield "xtc_threshold", "L", "it has an effect only with `xtc_probability`"
    yield "dynatemp_exponent", "L", "it has an effect only with `dynatemp_range`"
    yield "adaptive_decay", "L", "it has an effect only with `adaptive_target`"
    yield "length_penalty", "V", "it has an effect only with `use_beam_search`"
    yield "truncation_side", "V", "it has an effect only with `truncate_prompt_tokens`"
    for name in ("grammar_triggers", "preserved_tokens"):
        yield name, "L", "it has an effect only with `grammar_lazy`"
    yield "grammar_type", "L", "`grammar` says by itself what it is"
    yield "guided_decoding_backend", "V", "llguidance constrains answers, and any name is taken"
    for name in (
        "reasoning_control",
        "reasoning_budget_start_tag",
        "reasoning_budget_end_tag",
        "reasoning_budget_end_tags",
        "reasoning_budget_message",
    ):
        yield name, "L", "it has an effect only with `reasoning_budget_tokens`"
    for name in ("media_io_kwargs", "mm_processor_kwargs", "return_mm_kwargs"):
        yield name, "V", _NO_MEDIA
    for name in ("kv_transfer_params", "ec_transfer_params", "routed_experts_prompt_start"):
        yield name, "V", "it concerns how vLLM's parts work together"
    yield "spaces_between_special_tokens", "V", "control tokens are not in the text of answers"
    yield "return_token_offsets", "V", "it has an effect only at other endpoints"
    yield "verbose", "L", "the extra output that it asks for is not sent"
    yield "timings_per_token", "L", "the extra output that it asks for is sent by `/completion` alone"
    yield "t_max_prompt_ms", "L", "llama-server ignores it as well"


def _refused() -> Iterator[tuple[str, str, Neutral | None, str]]:
    yield "functions", "O", _is([]), "functions are taken as `tools`"
    yield "function_call", "O", _is("none"), "functions are chosen by `tool_choice`"
    yield "parse_tool_calls", "L", _is(True), "calls of tools are always parsed; leave it out"
    yield "modalities", "O", _is(["text"]), "this server writes text alone; leave it out"
    yield "audio", "O", None, "this server writes text alone; leave it out"
    yield "moderation", "O", None, "this server moderates nothing; leave it out"
    yield "web_search_options", "O", None, "this server searches nothing; leave it out"
    yield "verbosity", "O", _is("medium"), "this server cannot tell a model how much to write; say it in a message"
    completions = "it is for /v1/completions alone"
    yield "suffix", "OV", _is(""), f"{completions}, and for models with tokens for it; leave it out"
    yield "echo", "OLV", _is(False), f"{completions}; leave it out"
    as_n = Neutral("1, or `n`", lambda value, body: value in (1, body.get("n", 1)) and not _is_flag(value))
    yield "best_of", "OV", as_n, "this server does not rank answers: it has to be n, or to be left out"
    yield "structural_tag", "V", None, "only whole answers are constrained here; leave it out"
    yield "grammar_lazy", "L", _is(False), "a grammar is that of the whole answer here; leave it out"
    yield (
        "guided_whitespace_pattern",
        "V",
        None,
        "the white space of JSON is a space, or a line end and what indents the next line; leave it out",
    )
    sampler = "this server has no such sampler; leave it out"
    yield "mirostat", "L", _is(0), sampler
    for name in ("typical_p", "typ_p"):
        yield name, "L", _is(1), sampler
    yield "tfs_z", "L", _is(1), sampler
    yield "top_n_sigma", "L", Neutral("0 or less", _no_more_than_zero), sampler
    yield "xtc_probability", "L", _is(0), sampler
    yield "dynatemp_range", "L", _is(0), sampler
    yield "adaptive_target", "L", Neutral("below 0", _below_zero), sampler
    yield "min_keep", "L", _is(0, 1), sampler
    yield "use_beam_search", "V", _is(False), sampler
    yield "logits_processors", "V", _is([]), sampler
    yield "penalize_nl", "L", _is(False), "the penalties make no exception of line ends"
    usual = Neutral("llama-server's own order", _is_usual_order)
    order = f"the order of samplers is {', '.join(_SAMPLERS)} here; leave it out"
    yield "samplers", "L", usual, order
    yield "n_indent", "L", _is(0), "this server keeps no indentation"
    yield "t_max_predict_ms", "L", _is(0, -1), "an answer has no limit of time of its own; hang up to end it"
    yield "watermarking", "V", _is(False), "this server marks nothing"
    yield "repetition_detection", "V", None, "this server ends no answer because it repeats itself"
    yield "allowed_token_ids", "V", None, "this server bans tokens by logit_bias alone"
    yield "bad_words", "V", _is([]), "this server bans tokens by logit_bias alone, not words"
    yield "include_stop_str_in_output", "V", _is(False), "a stop text is no part of an answer here"
    yield "skip_special_tokens", "V", _is(True), "control tokens are never in the text of an answer"
    yield "truncate_prompt_tokens", "V", None, "this server cuts no prompt; a shorter one has to be sent"
    bos = Neutral("`true` for a prompt, `false` for messages", _is_where_bos_belongs)
    yield "add_special_tokens", "V", bos, "the first token is added where the model wants it; send ids to leave it out"
    template = "this server uses the model's own chat template as it is; send a prompt to use another"
    yield "chat_template", "LV", None, template
    yield "generation_prompt", "L", _is(""), template
    yield "documents", "V", _is([]), template
    for name in ("chat_format", "chat_parser"):
        yield name, "L", None, "answers are not parsed here; leave it out"
    yield "reasoning_budget_tokens", "L", _is(-1), f"{_NO_REASONING}; leave it out"
    yield "thinking_token_budget", "V", None, f"{_NO_REASONING}; leave it out"
    yield "post_sampling_probs", "L", _is(False), "log-probabilities are the model's own, before sampling"
    yield "prompt_logprobs", "V", None, "there are log-probabilities of answers alone"
    yield "logprob_token_ids", "V", _is([]), "log-probabilities are of the most likely tokens"
    not_returned = "this server does not return it; leave it out"
    for name in ("return_token_ids", "return_tokens_as_token_ids", "return_prompt_text"):
        yield name, "V", _is(False), not_returned
    yield "return_tokens", "L", _is(False), "`/completion` alone returns them; leave it out"
    yield "response_fields", "L", _is([]), "answers have all of their fields"
    yield "lora", "L", _is([]), "this server has no adapters"
    yield "image_data", "L", _is([]), "this server takes text alone"
    yield "prompt_embeds", "V", None, "this server takes strings and token ids"
    yield "vllm_xargs", "V", _is({}), "this server has no such extensions"


FIELDS: Mapping[str, Field] = {
    **{name: Field(name, apis, "honoured", says) for name, apis, says in _honoured()},
    **{name: Field(name, apis, "harmless", says) for name, apis, says in _harmless()},
    **{name: Field(name, apis, "refused", says, neutral) for name, apis, neutral, says in _refused()},
}
