"""How this server treats every field of a completion request that OpenAI, llama-server or vLLM defines.

A field is *honoured*, *harmless* (the answer is the same with it and without it), *ignored* with a warning (a wish that
does not change what the answer means), or *refused* by name; fields that none of the three defines are ignored with a
warning. fields.json, from which docs/api.md is made, has the APIs, a sentence, and values that ask for nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from polarlm.engine.limits import MOST_DRAFTED, PENALTY_WINDOW
from polarlm.engine.params import OPTIONS
from polarlm.engine.sampling.sample import CHAIN, SHAPES
from polarlm.server.reading.values import Body, describe, is_empty, is_number, unquote

MODEL_FIELDS = ("model", "name", "verbose", "system", "template", "options")  # of a body that names a model
_MOST_UNKNOWN = 5  # unknown fields that are named
_LONGEST_NAME = 40
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Field:
    """A field, the APIs that define it, and its effect here, or why it has none."""

    name: str
    apis: str  # as "OpenAI, vLLM"; "here alone" for this server's own
    treatment: Literal["honoured", "harmless", "ignored", "refused"]
    sentence: str
    neutral: tuple[Any, ...] = ()  # values that ask for nothing, if RULES does not have the field


@dataclass(frozen=True)
class Rule:
    """The values of a field that ask for nothing, and how the documentation describes them."""

    text: str
    holds: Callable[[Any, Body], bool]


def requested_fields(body: Body) -> dict[str, Any]:
    """The fields that ask for something; null, empty and neutral values do not."""
    body = {name: value for name, value in body.items() if value is not None}
    return {name: value for name, value in body.items() if not _is_neutral(name, value, body)}


def _is_neutral(name: str, value: Any, body: Body) -> bool:
    if is_empty(value):
        return value not in _MEANINGFUL_EMPTY.get(name, ())
    if rule := RULES.get(name):
        return rule.holds(value, body)
    return name in FIELDS and any(_equal(unquote(value), one) for one in FIELDS[name].neutral)


def refusal_of(body: Body) -> tuple[str, str] | None:
    """The first refused field of a body of `requested_fields`, and a sentence that names it; else None."""
    refused_fields = (FIELDS[name] for name in body if name in FIELDS and FIELDS[name].treatment == "refused")
    return next(((field.name, f"{field.name}: {field.sentence}") for field in refused_fields), None)


def field_warnings(body: Body) -> list[tuple[str, str]]:
    """The fields, of `requested_fields`, that are not done as they ask, each with a sentence that names it."""
    ignored = [FIELDS[name] for name in body if name in FIELDS and FIELDS[name].treatment == "ignored"]
    sentences = [(field.name, f"{field.name} is ignored: {field.sentence}") for field in ignored]
    for name, most in CAPS.items():
        if name in body and cap(name, body[name]) != body[name]:
            sentences.append(
                (name, f"{name} is {describe(body[name])}, and the most that there is here, {most}, counts")
            )
    return sentences


def unknown_fields(body: Body, known: Collection[str], path: str = "") -> list[str]:
    """A sentence for each of the first unknown fields of `body`. path: the path of `body`, such as "options."."""
    unknown = [name for name, value in body.items() if name not in known and not is_empty(value)]
    sentences = [_unknown_warning(name, known, path) for name in unknown[:_MOST_UNKNOWN]]
    more = len(unknown) - _MOST_UNKNOWN
    return [*sentences, f"{more} more fields are unknown"] if more > 0 else sentences


def _unknown_warning(name: str, known: Collection[str], path: str) -> str:
    name = name[:_LONGEST_NAME]
    name = name if _PLAIN.fullmatch(name) else ascii(name)
    (guess,) = get_close_matches(name, known, n=1, cutoff=0.75) or ("",)
    return f"{path}{name} is unknown and ignored" + (f": did you mean {path}{guess}?" if guess else "")


def normalize_spellings(body: Body, warnings: list[tuple[str, str]]) -> dict[str, Any]:
    """`body` with one spelling of each field, the first of SPELLINGS that it has. warnings: gets a sentence for
    each other one that has another value."""
    normalized = dict(body)
    for names in SPELLINGS:
        first, *others = [name for name in names if name in body] or [""]
        warnings += [
            (other, duplicate_warning(first, other)) for other in others if normalized.pop(other) != body[first]
        ]
    return normalized


def duplicate_warning(first: str, other: str) -> str:
    """What is said of two spellings of one field."""
    return f"{other} is ignored: {first} is given as well"


def cap(name: str, value: Any) -> Any:
    """`value`, limited to the maximum of a field of CAPS; a negative number means the maximum too."""
    most = CAPS.get(name)
    return most if most is not None and is_number(value) and not 0 <= value <= most else value


def _equal(value: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where true and false are not numbers."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


_ALIASES = {"temp": "temperature", "nucleus": "top_p", **{name.replace("_", "-"): name for name in CHAIN}}
_INACTIVE_SAMPLERS = ("infill", "adaptive_p")


def _is_default_order(value: Any, body: Body) -> bool:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return False
    names = [_ALIASES.get(name, name) for name in value if name not in _INACTIVE_SAMPLERS]
    off = [name for name, (field, *_) in SHAPES.items() if _is_neutral(field, body.get(field), body)]
    return names == [name for name in CHAIN if name in names or name not in off]


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens"),
        Rule("0 with messages", lambda value, body: _equal(value, 0) and "messages" in body),
    ),
    "best_of": Rule(
        "0, 1, or `n`", lambda value, body: value in (0, 1, body.get("n", 1)) and not isinstance(value, bool)
    ),
    "top_n_sigma": Rule("0 or less", lambda value, _: is_number(value) and value <= 0),
    "adaptive_target": Rule("below 0", lambda value, _: is_number(value) and value < 0),
    "samplers": Rule("this server's own order", _is_default_order),
    "add_special_tokens": Rule(
        "`true` for a prompt, `false` for messages", lambda value, body: value is ("prompt" in body)
    ),
}
CAPS = {"repeat_last_n": PENALTY_WINDOW, "speculative.n_max": MOST_DRAFTED}
"""Fields with a maximum, which also replaces larger and negative numbers."""

SPELLINGS = (
    *(tuple(reversed(option["json"])) for option in OPTIONS.values() if option["json"]),
    ("n", "n_cmpl"),
    ("tools", "functions"),
    ("tool_choice", "function_call"),
)
"""Spellings of one field each; the first that a body has counts."""

_MEANINGFUL_EMPTY: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("messages", "prompt", "input", "content"), ("", [], {})),
    **dict.fromkeys(("json_schema", "guided_json", "format"), ({},)),  # any JSON
    "dry_sequence_breakers": ([],),  # none
}  # field → empty values that ask for something

FIELDS: Mapping[str, Field] = {
    name: Field(name, apis, standing, says.replace("CHAIN", ", ".join(CHAIN)), tuple(neutral))
    for standing, rows in json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8")).items()
    for name, (apis, says, *neutral) in rows.items()
}

ABSENT_SAMPLERS = tuple(name for name, field in FIELDS.items() if field.sentence == "this server has no such sampler")
"""Fields of samplers that other programs have; every API warns of them."""
