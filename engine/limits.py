"""Valid values of the fields of SamplingParams and PromptOptions, and valid roles of messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polarlm.engine.errors import EngineError, shown

PENALTY_WINDOW = 64  # most last tokens, prompt included, that the penalties look at
MOST_LOGPROBS = 20  # most tokens that log-probabilities can be requested for at each position
DRAFT_MODEL = "draft-simple"
DRAFTS = ("none", "ngram-simple", DRAFT_MODEL)  # kinds of drafts
# Rows of a request in a step with drafts. Each number needs a recorded step and kernels of its own. A few suffice: the
# neighbours of the fastest number are almost as fast.
DRAFT_ROWS = (2, 4, 8, 16)
POOLINGS = ("mean", "last", "cls")  # how the states of a text's tokens become its vector
RANK = "rank"  # in the place of a pooling: the vector is one number, how likely the answer is yes and not no
MOST_DRAFTED = 15  # tokens of a draft: one fewer than the most rows of a sequence in a step
_ROLES = ("system", "developer", "user", "assistant", "tool")  # roles that templates know
_MAX_BIAS = 1e6  # far below the overflow of float32 logits


def _whole(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """NaN is in no range."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_stop_list(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(text, str) and text for text in value)


def _is_bias(value: Any) -> bool:
    if not isinstance(value, Mapping) or not all(_whole(token, 0) for token in value):
        return False
    return all(bias == -math.inf or _number(bias, -_MAX_BIAS, _MAX_BIAS) for bias in value.values())


def _is_id_list(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(_whole(token, 0) for token in value)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(each, Mapping) for each in value)


Limits = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Field → (whether a value is valid, the valid values in words)."""

SAMPLING: Limits = {
    "temperature": (lambda value: value is None or _number(value, 0, 1e4), "a number from 0 (greedy) up"),
    "top_p": (lambda value: value is None or _number(value, 1e-9, 1), "a number above 0 and at most 1"),
    "min_p": (lambda value: value is None or _number(value, 0, 1), "a number from 0 to 1"),
    "repeat_penalty": (lambda value: value is None or _number(value, 1e-3, 1e3), "a positive number; 1 is off"),
    "presence_penalty": (lambda value: _number(value, -1e3, 1e3), "a number from -1000 to 1000"),
    "frequency_penalty": (lambda value: _number(value, -1e3, 1e3), "a number from -1000 to 1000"),
    "repeat_last_n": (lambda value: _whole(value, 0, PENALTY_WINDOW), f"a whole number from 0 to {PENALTY_WINDOW}"),
    "top_k": (lambda value: value is None or _whole(value, 0), "a whole number; 0 keeps all"),
    "max_tokens": (lambda value: _whole(value, -1), "a whole number; -1 is no limit"),
    "seed": (lambda value: _whole(value, -1), "a whole number from 0 up; -1 takes a different one each time"),
    "stop": (_is_stop_list, "a tuple of non-empty strings"),
    "dry_multiplier": (lambda value: value is None or _number(value, 0, 1e3), "a number from 0 (off) to 1000"),
    "dry_base": (lambda value: _number(value, 1, 1e3), "a number from 1 to 1000"),
    "dry_allowed_length": (lambda value: _whole(value, 0), "a whole number from 0 up"),
    "dry_penalty_last_n": (
        lambda value: value is None or _whole(value, -2),
        "a whole number; 0 is off, -1 the whole context, -2 the answer alone",
    ),
    "dry_sequence_breakers": (lambda value: value is None or _is_stop_list(value), "a tuple of non-empty strings"),
    "logit_bias": (_is_bias, "a number for each token id, or -inf, which bans the token"),
    "ignore_eos": (_is_flag, "True or False"),
    "stop_token_ids": (_is_id_list, "a tuple of token ids"),
    "shown_tokens": (_is_id_list, "a tuple of token ids"),
    "min_tokens": (lambda value: _whole(value, 0), "a whole number from 0 up"),
    "logprobs": (
        lambda value: value is None or _whole(value, 0, MOST_LOGPROBS),
        f"None, or a whole number from 0 to {MOST_LOGPROBS}",
    ),
    "prompt_logprobs": (
        lambda value: value is None or _whole(value, 0, MOST_LOGPROBS),
        f"None, or a whole number from 0 to {MOST_LOGPROBS}",
    ),
    "schema": (
        lambda value: value is None or isinstance(value, (dict, str)),
        "a JSON schema: a dict, or its text",
    ),
    "grammar": (lambda value: value is None or isinstance(value, str), "the text of a grammar"),
    "regex": (lambda value: value is None or isinstance(value, str), "a regular expression"),
    "spec_type": (lambda value: value is None or value in DRAFTS, f"None, or one of {', '.join(DRAFTS)}"),
    "draft_max": (
        lambda value: value is None or _whole(value, 0, MOST_DRAFTED),
        f"None, or a whole number from 0 to {MOST_DRAFTED}",
    ),
}

CONSTRAINTS = ("schema", "grammar", "regex")
"""Fields of SamplingParams; at most one of them is given."""


OPTIONS: Limits = {
    "parse_special": (_is_flag, "True or False"),
    "cache_prompt": (_is_flag, "True or False"),
    "lora": (lambda value: isinstance(value, str), "the name of an adapter, or an empty string"),
    "lora_scale": (lambda value: _number(value, -1e3, 1e3), "a number from -1000 to 1000"),
    "cache_salt": (lambda value: isinstance(value, str), "a string"),
    "continue_final_message": (_is_flag, "True or False"),
    "tools": (_is_list_of_objects, "a tuple of functions in OpenAI's form"),
    "template_variables": (lambda value: isinstance(value, Mapping), "a dict"),
    "pooling": (lambda value: value in (None, *POOLINGS, RANK), f"None, {', '.join(POOLINGS[:-1])} or {POOLINGS[-1]}"),
    "dimensions": (lambda value: value is None or _whole(value, 1), "None, or a whole number from 1 up"),
    "truncate": (_is_flag, "True or False"),
    "prompt_name": (lambda value: value is None or isinstance(value, str), "None or a text"),
}


def complaint(limits: Limits, name: str, value: Any) -> str | None:
    """What is wrong with a value of field `name`, as "is -1, but must be …"; None if it is valid."""
    holds, wanted = limits[name]
    return None if holds(value) else f"is {shown(value)}, but must be {wanted}"


def check(limits: Limits, values: Mapping[str, Any]) -> None:
    """Raises EngineError that names the first field with an invalid value."""
    for name in limits:
        if wrong := complaint(limits, name, values[name]):
            raise EngineError(f"{name} {wrong}")


def check_one(names: Iterable[str], values: Mapping[str, Any]) -> None:
    """Raises EngineError if more than one of the fields `names` is given."""
    given = [name for name in names if values[name] is not None]
    if len(given) > 1:
        raise EngineError(f"{given[0]} and {given[1]} both constrain the answer; leave one of them out")


def check_roles(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raises EngineError for a role that templates do not know: some render it, others silently drop the message.

    Messages that are not mappings, or have no role, are refused by `chat_ids`.
    """
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if isinstance(role, str) and role not in _ROLES:
            raise EngineError(f"messages[{index}].role is {shown(role)}, but must be one of {', '.join(_ROLES)}")
