"""What a request may ask for: JSON in, an engine's prompt and sampling parameters out, every field looked at."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine import EngineError, SamplingParams
from engine.limits import MOST_LOGPROBS
from engine.request import Prompt
from server.unsupported import complaint

MAX_ANSWERS = 16  # n
MAX_STOPS, MAX_STOP_LENGTH = 16, 1000
MAX_BIASES = 1024
_LARGEST = 2**63 - 1

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The roles that clients may use, and what the templates call them."""


class BadRequest(Exception):
    """A request that cannot be understood, or asks for what is not there. The message is a sentence for the client.

    `field` is the path of the field that is wrong, such as "messages[2].content"; None for the request as a whole.
    """

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


@dataclass(frozen=True)
class Asked:
    """A request that has been looked at."""

    prompt: Prompt  # messages have "role" and "content" alone, both text
    params: SamplingParams
    stream: bool
    n: int  # answers
    include_usage: bool  # stream_options
    model: str | None


def read_json(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. Raises BadRequest where it is none."""
    try:
        value = json.loads(data.decode("utf-8"))  # NaN and Infinity, too: whoever reads a field refuses them by name
    except UnicodeDecodeError:
        raise BadRequest(None, "the request is not UTF-8 text") from None
    except RecursionError:
        raise BadRequest(None, "the request is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise BadRequest(None, f"the request is not JSON: {error.msg}, at character {error.pos}") from None
    except ValueError:  # Python's limit to the digits of a whole number
        raise BadRequest(None, "the request holds a number with too many digits") from None
    if not isinstance(value, dict):
        raise BadRequest(None, f"the request must be a JSON object, not {_kind(value)}")
    return value


def read(
    body: Mapping[str, Any], takes: Collection[str] = ("messages", "prompt"), *, switched_logprobs: bool = False
) -> Asked:
    """The request in a JSON object: a prompt under one of the names in `takes`, and parameters as OpenAI calls them.

    With `switched_logprobs`, log-probabilities are asked for as in OpenAI's chat, by `logprobs: true` and a count in
    `top_logprobs`; otherwise `logprobs` is the count. null stands for the default everywhere. Fields that are not known
    are passed over; those that would change the answer and are not supported are refused. Raises BadRequest.
    """
    body = {name: value for name, value in body.items() if value is not None}
    unsupported = complaint(body)
    if unsupported is not None:
        raise BadRequest(*unsupported)
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise _wrong("stream_options", "an object", options)
    usage = options.get("include_usage")
    return Asked(
        prompt=read_prompt(body, takes),
        params=replace(_sampling(body), logprobs=_logprobs(body, switched_logprobs)),
        stream=_flag("stream", body.get("stream", False)),
        n=_count("n", body.get("n", 1), 1, MAX_ANSWERS),
        include_usage=False if usage is None else _flag("stream_options.include_usage", usage),
        model=_text("model", body["model"]) if "model" in body else None,
    )


# -- prompts ---------------------------------------------------------------------------------------------------


def read_prompt(body: Mapping[str, Any], takes: Collection[str] = ("messages", "prompt")) -> Prompt:
    """What stands under one of the names in `takes`. Raises BadRequest."""
    given = [name for name in takes if body.get(name) is not None]
    if len(given) != 1:
        missing = f"{' or '.join(takes)} is missing"
        raise BadRequest(next(iter(takes)), "give either messages or prompt, not both" if given else missing)
    return _messages(body["messages"]) if given == ["messages"] else _raw_prompt(body["prompt"])


def _raw_prompt(value: Any) -> str | list[int]:
    """A text, or token ids; either may stand in a list of its own."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise BadRequest("prompt", "several prompts in one request are not supported: send one at a time")
        value = value[0]
    if isinstance(value, str):
        return _text("prompt", value)
    if not isinstance(value, list) or not value:
        raise _wrong("prompt", "a text or a list of token ids", value)
    return [_count(f"prompt[{index}]", token, 0, _LARGEST) for index, token in enumerate(value)]


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise _wrong("messages", "a list with at least one message", value)
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(field: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _wrong(field, "an object with a role and a content", message)
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise BadRequest(f"{field}.{name}", f"{name} in a message is not supported")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{field}.role", f"one of {', '.join(ROLES)}", role)
    field = f"{field}.content"
    if isinstance(content, list):
        content = "".join(_part(f"{field}[{index}]", part) for index, part in enumerate(content))
    if not isinstance(content, str):
        raise _wrong(field, "a text or a list of text parts", content)
    return {"role": ROLES[role], "content": _text(field, content)}


def _part(field: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise _wrong(field, 'an object such as {"type": "text", "text": "…"}', part)
    kind = part.get("type")
    if kind != "text":
        shown = f"{_shown(kind)} parts are" if isinstance(kind, str) else "a part without a type is"
        raise BadRequest(f"{field}.type", f"{shown} not supported: this server takes text alone")
    return _text(f"{field}.text", part.get("text"))


# -- sampling --------------------------------------------------------------------------------------------------

_PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base")
_NUMBERS = ("temperature", "top_p", "min_p", *_PENALTIES)
_WHOLE = ("top_k", "max_tokens", "seed", "dry_allowed_length", "dry_penalty_last_n")


def _sampling(body: Mapping[str, Any]) -> SamplingParams:
    chosen: dict[str, Any] = {name: _number(name, body[name]) for name in _NUMBERS if name in body}
    chosen |= {name: _count(name, body[name], -1, _LARGEST) for name in _WHOLE if name in body}
    for name, value in chosen.items():
        _as_sampling_takes(name, value)
    if "max_completion_tokens" in body:  # the newer name
        chosen["max_tokens"] = _count("max_completion_tokens", body["max_completion_tokens"], -1, _LARGEST)
    if "stop" in body:
        chosen["stop"] = _texts("stop", body["stop"])
    if "dry_sequence_breakers" in body:
        chosen["dry_sequence_breakers"] = _texts("dry_sequence_breakers", body["dry_sequence_breakers"])
    if "logit_bias" in body:
        chosen["logit_bias"] = _biases(body["logit_bias"])
        _as_sampling_takes("logit_bias", chosen["logit_bias"])
    if "ignore_eos" in body:
        chosen["ignore_eos"] = _flag("ignore_eos", body["ignore_eos"])
    return SamplingParams(**chosen)


def _logprobs(body: Mapping[str, Any], switched: bool) -> int | None:
    """`SamplingParams.logprobs`: how many of the most likely tokens to tell of; None for no log-probabilities."""
    given, top = body.get("logprobs", False), body.get("top_logprobs")
    if not switched:
        if top not in (None, 0):
            raise BadRequest("top_logprobs", "top_logprobs is not known here: logprobs itself is the number of tokens")
        return None if given is False else _count("logprobs", given, 0, MOST_LOGPROBS)
    if _flag("logprobs", given):
        return _count("top_logprobs", 0 if top is None else top, 0, MOST_LOGPROBS)
    if top is not None:
        raise BadRequest("top_logprobs", "top_logprobs needs logprobs, which must be true beside it")
    return None


def _as_sampling_takes(name: str, value: Any) -> None:
    """The limits of a sampling parameter are those of SamplingParams."""
    try:
        SamplingParams(**{name: value})
    except EngineError as error:
        raise BadRequest(name, str(error)) from None


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise _wrong(name, "a text or a list of texts", value)
    if len(texts) > MAX_STOPS:
        raise BadRequest(name, f"{name} has {len(texts)} texts, but at most {MAX_STOPS} are taken")
    for index, text in enumerate(texts):
        field = name if texts is not value else f"{name}[{index}]"
        if not 1 <= len(_text(field, text)) <= MAX_STOP_LENGTH:
            raise BadRequest(field, f"{field} must have 1 to {MAX_STOP_LENGTH} characters, not {len(text)}")
    return tuple(texts)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _wrong("logit_bias", "an object of token ids and numbers", value)
    if len(value) > MAX_BIASES:
        raise BadRequest("logit_bias", f"logit_bias has {len(value)} tokens, but at most {MAX_BIASES} are taken")
    biases = {}
    for token, bias in value.items():
        if re.fullmatch("[0-9]{1,18}", token) is None:
            raise BadRequest("logit_bias", f"logit_bias names {_shown(token)}, which is no token id")
        biases[int(token)] = _number(f"logit_bias.{token}", bias)
    return biases


# -- kinds of values -------------------------------------------------------------------------------------------


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(field, "true or false", value)
    return value


def _count(field: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(field, "a whole number", value)
    if not low <= value <= high:
        raise BadRequest(field, f"{field} must be from {low} to {high}, not {_shown(value)}")
    return value


def _number(field: str, value: Any) -> float:
    """A finite number: JSON has 1e999, too, which no float can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong(field, "a number", value)
    if not (-_LARGEST <= value <= _LARGEST and math.isfinite(value)):
        raise BadRequest(field, f"{field} is {_shown(value)}, which is out of range")
    return value


def _text(field: str, value: Any) -> str:
    """Text that has a UTF-8 form: JSON can spell half of a surrogate pair, which no tokenizer takes."""
    if not isinstance(value, str):
        raise _wrong(field, "a text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequest(field, f"{field} holds half of a surrogate pair, which is no character") from None
    return value


def _wrong(field: str, wanted: str, value: Any) -> BadRequest:
    return BadRequest(field, f"{field} must be {wanted}, not {_shown(value)}")


def _shown(value: Any) -> str:
    """A value in a sentence: as it is where that is short, otherwise only its kind."""
    if isinstance(value, (list, dict)) or value is None:
        return _kind(value)
    text = ascii(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"a {_kind(value).removeprefix('a ')} of {len(text)} characters"


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "nothing"}
    return kinds.get(type(value), "a number")
