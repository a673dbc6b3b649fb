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
_LISTED = ("properties", "patternProperties")
_IN_PLACE = ("allOf", "anyOf", "oneOf")  # schemas of the same value
_OF_PARTS = ("items", "additionalItems", "additionalProperties")
_BY_NAME = (*_LISTED, "$defs", "definitions")
_VALUES = ("const", "default", "enum", "examples")  # keywords whose null is a value
_CHOICES = ("anyOf", "oneOf")  # keywords of which an empty one allows nothing
KINDS = frozenset(("string", "number", "boolean", "null", "array", "object"))
_LOOKS_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")


def prepared_for_text(schema: Mapping[str, Any], warn: Callable[[str], None] = lambda why: None) -> dict[str, Any]:
    """`prepared` for an answer's text, with the white space of printed JSON. Raises ValueError."""
    return prepared(schema, {"whitespace_pattern": _SPACE}, warn)


def prepared(
    schema: Mapping[str, Any], options: Mapping[str, Any], warn: Callable[[str], None] = lambda why: None
) -> dict[str, Any]:
    """A closed copy of a schema with llguidance's options; the schema's options take precedence. warn: called with what
    does not hold. Raises ValueError if nothing fulfils it, since a value would have to contain another one of its kind,
    without end."""
    root = without_nulls(schema)
    _check_ends(root)
    asked = root.get(OPTIONS, {})
    root[OPTIONS] = {"lenient": True, **options, **asked} if isinstance(asked, dict) else asked
    nodes = list(_nodes(root))
    combined = _combined(root, nodes)
    for node in nodes:
        lists = id(node) not in combined and any(name in node for name in _LISTED)
        if lists and not any(name in one for one in _in_place(root, node) for name in _LISTED):
            _close(node)
        # Pydantic and zod write look-around for numbers and e-mail addresses; no token mask can look ahead.
        if isinstance(asked, dict) and asked.get("lenient", True) and _LOOKS_AROUND.search(str(node.get("pattern"))):
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
        for name, meant in {"prefixItems": True, "items": True, "type": "null"}.items():
            if isinstance(node.get(name), list):
                node[name] = [meant if one is None else one for one in node[name]]
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
    left: list[tuple[Any, Any, Any]] = [(value, top, 0)]
    while left:
        value, place, key = left.pop()
        if isinstance(value, Mapping):
            place[key] = dict.fromkeys(value)
            left.extend((inner, place[key], name) for name, inner in value.items())
        elif isinstance(value, list):
            place[key] = [None] * len(value)
            left.extend((inner, place[key], index) for index, inner in enumerate(value))
        else:
            place[key] = value
    return top[0]


def _nodes(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All schemas inside `root` that are objects, and `root` itself."""
    left: list[Any] = [root]
    while left:
        node = left.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for name in _BY_NAME:
            left.extend(node[name].values() if isinstance(node.get(name), dict) else [])
        for name in (*_IN_PLACE, "prefixItems", "items"):
            left.extend(node[name] if isinstance(node.get(name), list) else [])
        left.extend(node.get(name) for name in _OF_PARTS)


def _in_place(root: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that a node applies to the same value, by keywords or by references, directly or indirectly."""
    seen: set[int] = set()
    left: list[Any] = [node]
    while left:
        one = left.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        if one is not node:
            yield one
        for name in _IN_PLACE:
            left.extend(one[name] if isinstance(one.get(name), list) else [])
        left.append(_target(root, one.get("$ref")))


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
    for node in (root, *_in_place(root, root)):
        if isinstance(listed := node.get("properties"), Mapping) and name in listed:
            return _kinds(root, listed[name])
    return _kinds(root, root.get("additionalProperties"))


def _kinds(root: dict[str, Any], node: Any, levels: int = 32) -> frozenset[str]:
    if not isinstance(node, Mapping) or not levels:
        return KINDS
    kinds, named = KINDS, node.get("type")
    if isinstance(named, (str, list)):
        names = [named] if isinstance(named, str) else named
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


def _needed(root: dict[str, Any], node: dict[str, Any]) -> Iterator[Any]:
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
    begun, ended = {id(root)}, set()
    path = [(root, _needed(root, root))]
    while path:
        node, rest = path[-1]
        for inner in rest:
            if not isinstance(inner, dict) or id(inner) in ended:
                continue
            if id(inner) in begun:
                raise ValueError("nothing fulfils it: a value would hold another one of its kind, without end")
            begun.add(id(inner))
            path.append((inner, _needed(root, inner)))
            break
        else:
            ended.add(id(node))
            path.pop()


def _combined(root: dict[str, Any], nodes: list[dict[str, Any]]) -> set[int]:
    """The `id`s of schemas that others extend; closing them would forbid the inherited properties."""
    extended: set[int] = set()
    for node in nodes:
        several = len(node["allOf"]) > 1 if isinstance(node.get("allOf"), list) else False
        here = sum(name in node for name in (*_IN_PLACE, "$ref"))
        if several or here > 1 or (here and any(name in node for name in _LISTED)):
            extended.update(map(id, _in_place(root, node)))
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
