"""Reads the constraint of an answer from JSON into the fields of SamplingParams."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from polarlm.engine.schemas.preparation import STRICT
from polarlm.server.reading.values import BadRequest, array, check_at_most, flag, mapping, text, wrong_value

MAX_CHOICES = 1024

_JSON_OBJECT = {"type": "object"}
_FORMATS = "an object whose type is text, json_object or json_schema"


def read_constraint(body: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """(field, {"schema": …}, {"grammar": …} or {"regex": …}) of the constraint in a body; (None, {}) for an answer that
    nothing constrains. Raises BadRequest."""
    constraints: dict[str, dict[str, Any]] = {}
    for field, read in _FIELDS.items():
        if body.get(field) is not None and (constraint := read(field, body[field])):
            constraints[field] = constraint
    if len(constraints) > 1:  # a schema given too says more than 'any object'
        constraints = {field: one for field, one in constraints.items() if one.get("schema") is not _JSON_OBJECT}
    (first, constraint), *others = constraints.items() or [(None, {})]
    for second, other in others:
        if other != constraint:
            raise BadRequest(second, f"{first} and {second} both constrain the answer: leave one of them out")
    return first, constraint


def _response_format(field: str, value: Any) -> dict[str, Any]:
    kind = mapping(field, value, _FORMATS).get("type")
    if kind in ("text", "") or all(part is None for part in value.values()):
        return {}
    if kind == "json_object":  # llama-server takes a schema here as well
        return _schema(f"{field}.schema", value.get("schema"))
    if kind != "json_schema":
        raise wrong_value(f"{field}.type", "text, json_object or json_schema", kind)
    inner_field = f"{field}.json_schema"
    inner = value.get("json_schema")
    if inner is None and value.get("schema") is not None:  # as llama-server's documentation has it
        return _schema(f"{field}.schema", value["schema"])
    inner = mapping(inner_field, inner, "an object with a schema")
    schema = _schema(f"{inner_field}.schema", inner.get("schema"))
    strict = inner.get("strict")
    return _strict(schema) if strict is not None and flag(f"{inner_field}.strict", strict) else schema


def _strict(constraint: dict[str, Any]) -> dict[str, Any]:
    """The constraint of a schema whose keywords must all be supported."""
    schema = constraint["schema"]
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):  # compiling it fails with the reason
        return constraint
    return {"schema": {**schema, **STRICT}} if isinstance(schema, dict) else constraint


def _schema(field: str, value: Any) -> dict[str, Any]:
    value = _JSON_OBJECT if value is None else value
    if not isinstance(value, (dict, str)):
        raise wrong_value(field, "a JSON schema, which is an object, or its text", value)
    return {"schema": value}


def _text_of(name: str) -> Callable[[str, Any], dict[str, Any]]:
    return lambda field, value: {name: value} if text(field, value) else {}


def _choice(field: str, value: Any) -> dict[str, Any]:
    check_at_most(MAX_CHOICES, field, len(array(field, value, "an array of strings")), "strings")
    choices = [re.escape(text(f"{field}[{index}]", choice)) for index, choice in enumerate(value)]
    return {"regex": "|".join(choices)} if choices else {}


def _structured_outputs(field: str, value: Any) -> dict[str, Any]:
    """The constraint in vLLM's object, which has one field."""
    parts = {name: part for name, part in mapping(field, value).items() if part not in (None, False, "", [])}
    if not parts:
        return {}
    name, *others = parts
    if others or name not in _STRUCTURED:
        raise wrong_value(field, f"an object with one of {', '.join(_STRUCTURED)}", value)
    return _STRUCTURED[name](f"{field}.{name}", parts[name])


_STRUCTURED: Mapping[str, Callable[[str, Any], dict[str, Any]]] = {
    "json": _schema,
    "json_object": lambda field, value: {"schema": _JSON_OBJECT},
    "regex": _text_of("regex"),
    "choice": _choice,
    "grammar": _text_of("grammar"),
}

_FIELDS: Mapping[str, Callable[[str, Any], dict[str, Any]]] = {
    "response_format": _response_format,
    "json_schema": _schema,
    "grammar": _text_of("grammar"),
    "guided_json": _schema,
    "guided_regex": _text_of("regex"),
    "guided_choice": _choice,
    "guided_grammar": _text_of("grammar"),
    "structured_outputs": _structured_outputs,
}
