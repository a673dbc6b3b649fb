"""How this server treats every field of a completion request that OpenAI, llama-server or vLLM defines.

A field is *honoured*, *harmless* (the answer is the same with it and without it), or *refused* by name, unless its
value is the default. Fields that none of the three defines are ignored, since clients send extra names and expect no
effect; over HTTP they get a warning. fields.json lists the fields of each kind; a row has the APIs, a sentence, and for
a refused field the values that have no effect. docs/http-fields.md is generated from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Field:
    """A field, the APIs that define it, and its effect here, or why it has none."""

    name: str
    apis: str  # as "OpenAI, vLLM"; "here alone" for this server's own
    standing: Literal["honoured", "harmless", "refused"]
    says: str
    neutral: tuple[Any, ...] = ()  # values of a refused field that have no effect, if RULES does not have the field


@dataclass(frozen=True)
class Rule:
    """The values of a refused field that have no effect, and how the documentation describes them."""

    text: str
    holds: Callable[[Any, Body], bool]


def complaint(body: Body) -> tuple[str, str] | None:
    """The first refused field of a request whose value has an effect, and a sentence that names it; else None."""
    for name, value in body.items():
        field = FIELDS.get(name)
        if field is None or field.standing != "refused" or value is None:
            continue
        rule = RULES.get(name)
        if not (rule.holds(value, body) if rule else any(_equal(value, one) for one in field.neutral)):
            return name, f"{name}: {field.says}"
    return None


def _equal(value: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where true and false are not numbers."""
    return value == other and _is_flag(value) == _is_flag(other)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not _is_flag(value)


SAMPLERS = ("penalties", "dry", "top_k", "top_p", "min_p", "temperature")
"""The samplers in their order, under llama-server's names."""

_ALIASES = {"temp": "temperature", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "nucleus": "top_p"}
_OFF = ("top_n_sigma", "top-n-sigma", "typ_p", "typ-p", "typical", "typical_p", "xtc", "infill", "adaptive_p")


def _is_usual_order(value: Any, _: Body) -> bool:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return False
    return tuple(_ALIASES.get(name, name) for name in value if name not in _OFF) == SAMPLERS


RULES: Mapping[str, Rule] = {
    "best_of": Rule("1, or `n`", lambda value, body: value in (1, body.get("n", 1)) and not _is_flag(value)),
    "top_n_sigma": Rule("0 or less", lambda value, _: _is_number(value) and value <= 0),
    "adaptive_target": Rule("below 0", lambda value, _: _is_number(value) and value < 0),
    "samplers": Rule("llama-server's own order", _is_usual_order),
    "add_special_tokens": Rule(
        "`true` for a prompt, `false` for messages", lambda value, body: value is ("prompt" in body)
    ),
}
FIELDS: Mapping[str, Field] = {
    name: Field(name, apis, standing, says, tuple(neutral))
    for standing, rows in json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8")).items()
    for name, (apis, says, *neutral) in rows.items()
}
