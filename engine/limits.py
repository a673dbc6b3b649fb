"""Valid values of the fields of SamplingParams and PromptOptions, and valid roles of messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polarlm.engine.errors import EngineError, shown

PENALTY_WINDOW = 64  # most last tokens, prompt included, that the penalties look at
MOST_LOGPROBS = 20  # most tokens that log-probabilities can be requested for at each position
DRAFT_MODEL, MTP, EAGLE3, ASSISTANT = "draft-simple", "mtp", "eagle3", "assistant"
HEADS = (EAGLE3, ASSISTANT)  # those of files of their own
DRAFTS = ("none", "ngram-simple", DRAFT_MODEL, MTP, *HEADS)  # kinds of drafts
DRAFT_NAMES = {**dict(zip(DRAFTS, DRAFTS, strict=True)), "draft-mtp": MTP, "draft-eagle3": EAGLE3}  # with llama.cpp's
# Rows of a request in a step with drafts. Each number needs a recorded step and kernels of its own. A few suffice: the
# neighbours of the fastest number are almost as fast.
DRAFT_ROWS = (2, 4, 8, 16)
POOLINGS = ("mean", "last", "cls")  # how the states of a text's tokens become its vector
RANK = "rank"  # as a pooling: the vector is one number, how likely the answer is yes and not no
MOST_DRAFTED = 15  # tokens of a draft: one fewer than the most rows of a sequence in a step
_ROLES = ("system", "developer", "user", "assistant", "tool")  # roles that templates know
_MAX_BIAS = 1e6  # far below the overflow of float32 logits


@dataclass(frozen=True)
class Numbers:
    """Says whether a value is a number from `low` to `high`. NaN is in no range."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False  # only whole numbers
    optional: bool = False  # None, too

    def __call__(self, value: Any) -> bool:
        if value is None:
            return self.optional
        types = int if self.whole else (int, float)
        return isinstance(value, types) and not isinstance(value, bool) and self.low <= value <= self.high


_TOKEN = Numbers(0, whole=True)
_BIAS = Numbers(-_MAX_BIAS, _MAX_BIAS)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_stop_list(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(text, str) and text for text in value)


def is_bias(value: Any) -> bool:
    if not isinstance(value, Mapping) or not all(map(_TOKEN, value)):
        return False
    return all(bias == -math.inf or _BIAS(bias) for bias in value.values())


def is_id_list(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(map(_TOKEN, value))


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(each, Mapping) for each in value)


Valid = tuple[Callable[[Any], bool], str]  # whether a value is valid, and the valid values in words
Limits = Mapping[str, Valid]  # field → its valid values

CONSTRAINTS = ("schema", "grammar", "regex")  # fields of SamplingParams; at most one of them has a value

OPTIONS: Limits = {
    "parse_special": (is_flag, "True or False"),
    "cache_prompt": (is_flag, "True or False"),
    "keep_seconds": (Numbers(0, 2**31 - 1, whole=True), "a whole number from 0 up"),
    "lora": (lambda value: isinstance(value, str), "the name of an adapter, or an empty string"),
    "lora_scale": (Numbers(-1e3, 1e3), "a number from -1000 to 1000"),
    "cache_salt": (lambda value: isinstance(value, str), "a string"),
    "priority": (Numbers(-(2**31), 2**31 - 1, whole=True), "a whole number"),
    "replayable": (is_flag, "True or False"),
    "pack": (lambda value: isinstance(value, str), "the name of a pack, or an empty string"),
    "continue_final_message": (is_flag, "True or False"),
    "tools": (_is_list_of_objects, "a tuple of functions in OpenAI's form"),
    "template_variables": (lambda value: isinstance(value, Mapping), "a dict"),
    "pooling": (lambda value: value in (None, *POOLINGS, RANK), f"None, {', '.join(POOLINGS[:-1])} or {POOLINGS[-1]}"),
    "dimensions": (Numbers(1, whole=True, optional=True), "None, or a whole number from 1 up"),
    "truncate": (is_flag, "True or False"),
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


def check_one_constraint(values: Mapping[str, Any]) -> None:
    """Raises EngineError if more than one of the fields `CONSTRAINTS` has a value."""
    names = [name for name in CONSTRAINTS if values[name] is not None]
    if len(names) > 1:
        raise EngineError(f"{names[0]} and {names[1]} both constrain the answer; leave one of them out")


def check_roles(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raises EngineError for a role that templates do not know: some render it, others silently drop the message.
    `chat_ids` refuses malformed messages."""
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if isinstance(role, str) and role not in _ROLES:
            raise EngineError(f"messages[{index}].role is {shown(role)}, but must be one of {', '.join(_ROLES)}")
