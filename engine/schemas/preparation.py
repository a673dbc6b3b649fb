"""Prepares JSON schemas of answers and tool calls for llguidance: closed, and lenient unless they are strict.

An object with listed properties gets no others unless its schema sets `additionalProperties`: small models would add
properties without end. A lenient schema may have keywords that llguidance does not know; they are ignored. A keyword
that is null says nothing: programs write so what a schema lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from polarlm.engine.errors import shown
from polarlm.engine.schemas.keywords import nodes_of
from polarlm.engine.schemas.normal_form import normal_form

OPTIONS = "x-guidance"  # llguidance's options, at the top of a schema
STRICT = {OPTIONS: {"lenient": False}}  # at the top of a schema whose keywords must all be known
_SPACE = r" |\n[ \t]{0,24}"  # between the parts of JSON; without this limit, some models write space without end
_LOOKS_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")


def prepare_for_text(schema: Mapping[str, Any], warn: Callable[[str], None] = lambda why: None) -> dict[str, Any]:
    """`prepared` for an answer's text, with the white space of printed JSON. Raises ValueError."""
    return prepare(schema, {"whitespace_pattern": _SPACE}, warn)


def prepare(
    schema: Mapping[str, Any], options: Mapping[str, Any], warn: Callable[[str], None] = lambda why: None
) -> dict[str, Any]:
    """A schema in normal form, closed, with llguidance's options; the schema's options take precedence. warn: called
    with what does not hold. Raises ValueError as `normal_form` does."""
    root = normal_form(schema)
    own_options = schema.get(OPTIONS) or {}
    root[OPTIONS] = {"lenient": True, **options, **own_options} if isinstance(own_options, dict) else own_options
    is_lenient = isinstance(own_options, dict) and own_options.get("lenient", True)
    for node in nodes_of(root):
        if "allOf" not in node:  # where keywords are not joined, others extend it
            _close(node)
        # Pydantic and zod write look-around for numbers and e-mail addresses; no token mask can look ahead.
        if is_lenient and _LOOKS_AROUND.search(str(node.get("pattern"))):
            warn(f"the pattern {shown(node.pop('pattern'))} looks around")
    return root


def _close(node: dict[str, Any]) -> None:
    """Forbid properties that a schema does not list, unless it says otherwise."""
    required, properties = node.get("required", []), node.get("properties", {})
    if "additionalProperties" in node or not (node.keys() & {"properties", "patternProperties"}):
        return
    if "patternProperties" not in node:
        node["properties"] = {**properties, **{name: True for name in required if name not in properties}}
    node["additionalProperties"] = False
