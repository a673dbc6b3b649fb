"""Reads sampling parameters from JSON into SamplingParams, and validates every field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polarlm.engine import SamplingParams
from polarlm.engine.limits import MOST_LOGPROBS, Numbers, complaint
from polarlm.engine.params import OPTIONS, SAMPLING
from polarlm.server.reading.constraints import read_constraint
from polarlm.server.reading.fields import ABSENT_SAMPLERS, cap
from polarlm.server.reading.values import (
    LARGEST,
    BadRequest,
    array,
    check_at_most,
    count,
    describe,
    flag,
    number,
    text,
    wrong_value,
)

MAX_STOPS, MAX_STOP_LENGTH = 256, 1000
MAX_STOP_TEXT = 16_000  # characters, of all stops together
MAX_BIASES = 1024  # tokens
MAX_BIAS_TEXT = 4096  # characters, of all strings together

Tokenize = Callable[[str], list[int]]


def read_sampling(body: Mapping[str, Any], tokenize: Tokenize, *, switched_logprobs: bool) -> SamplingParams:
    """The sampling parameters of a request. See `server.reading.parameters.read`. Raises BadRequest."""
    settings: dict[str, Any] = {}
    for field, (name, read) in _FIELDS.items():
        if field in body:
            settings[name] = _within_limits(field, name, cap(field, read(field, body[field])))
    if "logit_bias" in body:
        biases = _biases(body["logit_bias"], tokenize)
        settings["logit_bias"] = _within_limits("logit_bias", "logit_bias", biases)
    return SamplingParams(**settings, **read_constraint(body)[1], logprobs=_logprobs(body, switched_logprobs))


def _within_limits(field: str, name: str, value: Any) -> Any:
    """`value` of a field that sets the parameter `name`. Raises BadRequest if it is out of the limits."""
    if wrong_value := complaint(SAMPLING, name, value):
        raise BadRequest(field, f"{field} {wrong_value}")
    return value


def _logprobs(body: Mapping[str, Any], is_switch: bool) -> int | None:
    """`SamplingParams.logprobs`: a number of most likely tokens; None for no log-probabilities."""
    value, top = body.get("logprobs"), count("top_logprobs", body.get("top_logprobs", 0), 0, MOST_LOGPROBS)
    if probabilities := count("n_probs", body.get("n_probs", 0), 0, MOST_LOGPROBS):
        return probabilities
    if not is_switch:
        if top:
            raise BadRequest("top_logprobs", "top_logprobs is not known here: logprobs itself is the number of tokens")
        return None if value is None or value is False else count("logprobs", value, 0, MOST_LOGPROBS)
    if flag("logprobs", False if value is None or value == 0 else value):
        return top
    if top:
        raise BadRequest("top_logprobs", "top_logprobs needs logprobs, which must be true with it")
    return None


def _ids(field: str, value: Any) -> tuple[int, ...]:
    check_at_most(MAX_BIASES, field, len(array(field, value, "an array of token ids")), "tokens")
    return tuple(count(f"{field}[{index}]", token, 0, LARGEST) for index, token in enumerate(value))


def _whole(field: str, value: Any) -> int:
    return count(field, value, -LARGEST, LARGEST)


def _at_least(low: int) -> Callable[[str, Any], int]:
    """Reads a whole number; `low` stands for what is below it, since other servers have more than one such number."""
    return lambda field, value: max(low, _whole(field, value))


def _seed(field: str, value: Any) -> int:
    """A seed, which other programs draw from more bits than ours has."""
    seed = count(field, value, -math.inf, math.inf)
    return -1 if seed < 0 else seed & LARGEST


def _texts(field: str, value: Any) -> tuple[str, ...]:
    """The strings in a string or an array, but for empty ones."""
    values = [value] if isinstance(value, str) else array(field, value, "a string or an array of strings")
    check_at_most(MAX_STOPS, field, len(values), "strings")
    for index, one in enumerate(values):
        text(field if values is not value else f"{field}[{index}]", one, MAX_STOP_LENGTH)
    check_at_most(MAX_STOP_TEXT, field, sum(map(len, values)), "characters")
    return tuple(one for one in values if one)


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "top_p": lambda field, value: number(field, value) or 1e-9,  # 0 stands for the best token alone
    "top_k": _at_least(0),
    "max_tokens": _at_least(-1),
    "min_tokens": _at_least(0),
    "reasoning_budget": _at_least(-1),
    "seed": _seed,
    "stop": _texts,
    "dry_sequence_breakers": _texts,
    "stop_token_ids": _ids,
    "spec_type": text,
    "stop_anywhere": flag,
    "ignore_eos": flag,
}
"""Parameter → how its value is read, if it is not a number that must be within the limits."""


def _reader(name: str) -> Callable[[str, Any], Any]:
    valid = SAMPLING[name][0]
    return _READERS.get(name) or (_whole if isinstance(valid, Numbers) and valid.whole else number)


_FIELDS: Mapping[str, tuple[str, Callable[[str, Any], Any]]] = {
    field: (name, _reader(name))
    for name, option in OPTIONS.items()
    for field in ((name,) if option["json"] is None else option["json"])
}
"""Field → (parameter, how a value is read). If several fields of a parameter are set, the last of them counts."""

EXTENSIONS = (
    *(field for field, (name, _) in _FIELDS.items() if field == name),
    *("reasoning_budget_tokens", "cache_prompt", "cache_salt", "pack", "priority", "replayable"),
    *ABSENT_SAMPLERS,
)
"""Fields that every API takes under these names, unless it has a name of its own for them."""


def _biases(value: Any, tokenize: Tokenize) -> dict[int, float]:
    """The biases in an object or an array of pairs. A string that is not an id stands for all of its tokens."""
    if isinstance(value, dict):
        pairs: Iterable[Any] = ((_id_or_text(token), bias) for token, bias in value.items())
    elif isinstance(value, list):
        pairs = (_pair(f"logit_bias[{index}]", pair) for index, pair in enumerate(value))
    else:
        raise wrong_value("logit_bias", "an object of token ids and numbers", value)
    check_at_most(MAX_BIASES, "logit_bias", len(value), "entries")
    biases: dict[int, float] = {}
    characters = 0
    for token, bias_value in pairs:
        if bias_value is None:
            continue
        bias = -math.inf if bias_value is False else number(f"logit_bias.{describe(token)}", bias_value)
        if isinstance(token, int):
            biases[token] = bias
            continue
        characters += len(text("logit_bias", token))
        if characters > MAX_BIAS_TEXT:
            raise BadRequest("logit_bias", f"logit_bias has strings of more than {MAX_BIAS_TEXT} characters")
        biases |= dict.fromkeys(tokenize(token), bias)
    check_at_most(MAX_BIASES, "logit_bias", len(biases), "tokens")
    return biases


def _id_or_text(token: str) -> int | str:
    """The id that the name of a member spells, else the name: in JSON, names are strings."""
    if re.fullmatch("-?[0-9]+", token) is None:
        return token
    if re.fullmatch("[0-9]{1,18}", token) is None:
        raise BadRequest("logit_bias", f"logit_bias names {describe(token)}, which is not a token id")
    return int(token)


def _pair(field: str, pair: Any) -> tuple[int | str, Any]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise wrong_value(field, "a pair of a token and a number", pair)
    token, bias = pair
    return (token if isinstance(token, str) else count(f"{field}[0]", token, 0, LARGEST)), bias
