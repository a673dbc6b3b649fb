"""Prepares JSON schemas of answers and tool calls for llguidance: closed, and lenient unless they are strict.

An object with listed properties gets no others unless its schema sets `additionalProperties`: small models would add
properties without end. A lenient schema may have keywords that llguidance does not know; they are ignored. A keyword
that is null says nothing: programs write so what a schema lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from polarlm.engine.errors import shown

OPTIONS = "x-guidance"  # llguidance's options, at the top of a schema
STRICT = {OPTIONS: {"lenient": False}}  # at the top of a schema whose keywords must all be known
_SPACE = r" |\n[ \t]{0,24}"  # between the parts of JSON; without this limit, some models write space without end
_PROPERTY_KEYWORDS = ("properties", "patternProperties")
_IN_PLACE = ("allOf", "anyOf", "oneOf")  # schemas of the same value
_OF_PARTS = ("items", "additionalItems", "additionalProperties")
_BY_NAME = (*_PROPERTY_KEYWORDS, "$defs", "definitions")
_VALUES = ("const", "default", "enum", "examples")  # keywords whose null is a value
_CHOICES = ("anyOf", "oneOf")  # keywords of which an empty one allows nothing
KINDS = frozenset(("string", "number", "boolean", "null", "array", "object"))
_LOOKS_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")


def prepare_for_text(schema: Mapping[str, Any], warn: Callable[[str], None] = lambda why: None) -> dict[str, Any]:
    """`prepared` for an answer's text, with the white space of printed JSON. Raises ValueError."""
    return prepare(schema, {"whitespace_pattern": _SPACE}, warn)


def prepare(
    schema: Mapping[str, Any], options: Mapping[str, Any], warn: Callable[[str], None] = lambda why: None
) -> dict[str, Any]:
    """A closed copy of a schema with llguidance's options; the schema's options take precedence. warn: called with what
    does not hold. Raises ValueError if nothing fulfils it, since a value would have to contain another one of its kind,
    without end."""
    root = without_nulls(schema)
    _check_ends(root)
    own_options = root.get(OPTIONS, {})
    root[OPTIONS] = {"lenient": True, **options, **own_options} if isinstance(own_options, dict) else own_options
    nodes = list(_nodes(root))
    combined = _combined_schemas(root, nodes)
    for node in nodes:
        lists = id(node) not in combined and any(name in node for name in _PROPERTY_KEYWORDS)
        if lists and not any(name in one for one in _same_value_schemas(root, node) for name in _PROPERTY_KEYWORDS):
            _close(node)
        # Pydantic and zod write look-around for numbers and e-mail addresses; no token mask can look ahead.
        if (
            isinstance(own_options, dict)
            and own_options.get("lenient", True)
            and _LOOKS_AROUND.search(str(node.get("pattern")))
        ):
            warn(f"the pattern {shown(node.pop('pattern'))} looks around")
    return root


def without_nulls(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a schema without keywords that are null, or empty where that has no meaning, as `"properties": []`."""
    root: dict[str, Any] = _copy(schema)
    for node in _nodes(root):
        for name in [name for name, value in node.items() if _says_nothing(name, value)]:
            del node[name]
        for name in node.keys() & {*_IN_PLACE, "required"}:
            if isinstance(node[name], list) and None in node[name]:
                node[name] = [one for one in node[name] if one is not None]
        for name in node.keys() & {*_BY_NAME}:  # a name without a schema has any value
            if isinstance(node[name], dict):
                node[name] = {key: True if one is None else one for key, one in node[name].items()}
        for name, default in {"prefixItems": True, "items": True, "type": "null"}.items():
            if isinstance(node.get(name), list):
                node[name] = [default if one is None else one for one in node[name]]
    return root


def _says_nothing(name: str, value: Any) -> bool:
    if name in _VALUES:
        return name == "enum" and value is None
    if name in _CHOICES:
        return value is None or (isinstance(value, list) and value != [] and all(one is None for one in value))
    return value is None or value in ("", [])


def _copy(value: Any) -> Any:
    """A copy of a JSON value of any depth."""
    top: list[Any] = [None]
    stack: list[tuple[Any, Any, Any]] = [(value, top, 0)]
    while stack:
        value, place, key = stack.pop()
        if isinstance(value, Mapping):
            place[key] = dict.fromkeys(value)
            stack.extend((inner, place[key], name) for name, inner in value.items())
        elif isinstance(value, list):
            place[key] = [None] * len(value)
            stack.extend((inner, place[key], index) for index, inner in enumerate(value))
        else:
            place[key] = value
    return top[0]


def _nodes(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All schemas inside `root` that are objects, and `root` itself."""
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for name in _BY_NAME:
            stack.extend(node[name].values() if isinstance(node.get(name), dict) else [])
        for name in (*_IN_PLACE, "prefixItems", "items"):
            stack.extend(node[name] if isinstance(node.get(name), list) else [])
        stack.extend(node.get(name) for name in _OF_PARTS)


def _same_value_schemas(root: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that a node applies to the same value, by keywords or by references, directly or indirectly."""
    visited: set[int] = set()
    stack: list[Any] = [node]
    while stack:
        one = stack.pop()
        if not isinstance(one, dict) or id(one) in visited:
            continue
        visited.add(id(one))
        if one is not node:
            yield one
        for name in _IN_PLACE:
            stack.extend(one[name] if isinstance(one.get(name), list) else [])
        stack.append(_target(root, one.get("$ref")))


def _target(root: Any, reference: Any) -> Any:
    """The node that a reference within `root` points to; None for other references."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else None
    return node


def kinds_of_property(schema: Any, name: str) -> frozenset[str]:
    """The types of JSON that a schema of objects allows for the property `name`; a "number" may be an integer. What is
    no schema allows all."""
    root = dict(schema) if isinstance(schema, Mapping) else {}
    for node in (root, *_same_value_schemas(root, root)):
        if isinstance(properties := node.get("properties"), Mapping) and name in properties:
            return _kinds(root, properties[name])
    return _kinds(root, root.get("additionalProperties"))


def _kinds(root: dict[str, Any], node: Any, levels: int = 32) -> frozenset[str]:
    if not isinstance(node, Mapping) or not levels:
        return KINDS
    kinds, type_names = KINDS, node.get("type")
    if isinstance(type_names, (str, list)):
        names = [type_names] if isinstance(type_names, str) else type_names
        kinds = frozenset("number" if one == "integer" else str(one) for one in names)
    values = [node["const"]] if "const" in node else node.get("enum")
    if isinstance(values, list):
        kinds &= {kind_of(value) for value in values}
    if "$ref" in node:
        kinds &= _kinds(root, _target(root, node["$ref"]), levels - 1)
    for name in _IN_PLACE:
        if isinstance(node.get(name), list) and node[name]:
            each = [_kinds(root, inner, levels - 1) for inner in node[name]]
            kinds &= frozenset.intersection(*each) if name == "allOf" else frozenset.union(*each)
    return kinds


def kind_of(value: Any) -> str:
    """The type of a JSON value, as schemas name it, but "number" for integers."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _needed_schemas(root: dict[str, Any], node: dict[str, Any]) -> Iterator[Any]:
    """The schemas that must be satisfiable for a node to be satisfiable."""
    yield _target(root, node.get("$ref"))
    yield from node["allOf"] if isinstance(node.get("allOf"), list) else []
    properties, required, least = node.get("properties"), node.get("required"), node.get("minItems")
    if node.get("type") == "object" and isinstance(properties, dict) and isinstance(required, list):
        yield from (properties.get(name) for name in required if isinstance(name, str))
    if node.get("type") == "array" and isinstance(least, int) and least > 0 and "prefixItems" not in node:
        yield node.get("items")


def _check_ends(root: dict[str, Any]) -> None:
    """Raises ValueError if a schema requires itself."""
    started_ids, ended_ids = {id(root)}, set()
    path = [(root, _needed_schemas(root, root))]
    while path:
        node, rest = path[-1]
        for inner in rest:
            if not isinstance(inner, dict) or id(inner) in ended_ids:
                continue
            if id(inner) in started_ids:
                raise ValueError("nothing fulfils it: a value would hold another one of its kind, without end")
            started_ids.add(id(inner))
            path.append((inner, _needed_schemas(root, inner)))
            break
        else:
            ended_ids.add(id(node))
            path.pop()


def _combined_schemas(root: dict[str, Any], nodes: list[dict[str, Any]]) -> set[int]:
    """The `id`s of schemas that others extend; closing them would forbid the inherited properties."""
    extended: set[int] = set()
    for node in nodes:
        several = len(node["allOf"]) > 1 if isinstance(node.get("allOf"), list) else False
        here = sum(name in node for name in (*_IN_PLACE, "$ref"))
        if several or here > 1 or (here and any(name in node for name in _PROPERTY_KEYWORDS)):
            extended.update(map(id, _same_value_schemas(root, node)))
    return extended


def _close(node: dict[str, Any]) -> None:
    """Forbid properties that a schema does not list, unless it says otherwise."""
    required, properties = node.get("required", []), node.get("properties", {})
    if "additionalProperties" in node or not isinstance(properties, dict) or not isinstance(required, list):
        return
    unlisted = [name for name in required if isinstance(name, str) and name not in properties]
    if "patternProperties" not in node:
        node["properties"] = {**properties, **dict.fromkeys(unlisted, True)}
    node["additionalProperties"] = False
