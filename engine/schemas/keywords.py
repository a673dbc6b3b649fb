"""The keywords of JSON Schema: which there are, where they have schemas, and one form of what drafts write otherwise.

JSON Schema 2020-12 (json-schema.org/draft/2020-12), with lists of `items` and Boolean limits as older drafts and
OpenAPI 3.0 have them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from polarlm.engine.errors import shown

KINDS = frozenset(("string", "number", "boolean", "null", "array", "object"))
CHOICES = ("anyOf", "oneOf")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # name → schema
PARTS = (
    *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "not", "if", "then", "else"),
)
VALUES = ("const", "default", "enum", "examples")  # keywords whose null is a value
LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
OF_ARRAYS, OF_OBJECTS = ("prefixItems", "items"), ("properties", "patternProperties", "additionalProperties")
KIND_OF_KEYWORD = {
    **dict.fromkeys((*LOWER[:2], *UPPER[:2], "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys((*OF_ARRAYS, "minItems", "maxItems", "uniqueItems", "unevaluatedItems"), "array"),
    **dict.fromkeys(("contains", "minContains", "maxContains"), "array"),
    **dict.fromkeys((*OF_OBJECTS, "required", "minProperties", "maxProperties", "propertyNames"), "object"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"), "object"),
}
_KEYWORDS = {*KIND_OF_KEYWORD, *CHOICES, "type", "enum", "not", "if", "then", "else"}  # that check something
_KIND_OF_VALUE = {
    **dict.fromkeys((*LOWER, *UPPER), "number"),
    **dict.fromkeys(("enum", *CHOICES, "prefixItems"), "array"),
    **dict.fromkeys(("properties", "patternProperties"), "object"),
}


def without_nulls(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a schema without keywords that are null, or empty where that has no meaning, as `"properties": []`."""
    root: dict[str, Any] = _copy(schema)
    for node in nodes_of(root):
        for name in [name for name, value in node.items() if _says_nothing(name, value)]:
            del node[name]
        for name in node.keys() & {*CHOICES, "allOf", "required"}:
            if isinstance(node[name], list) and None in node[name]:
                node[name] = [one for one in node[name] if one is not None]
        for name in node.keys() & {*BY_NAME}:  # a name without a schema has any value
            if isinstance(node[name], dict):
                node[name] = {key: True if one is None else one for key, one in node[name].items()}
        for name, default in {"prefixItems": True, "items": True, "type": "null"}.items():
            if isinstance(node.get(name), list):
                node[name] = [default if one is None else one for one in node[name]]
    return root


def _says_nothing(name: str, value: Any) -> bool:
    if name in VALUES:
        return name == "enum" and value is None
    if name in CHOICES:
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


def nodes_of(schema: Any) -> Iterator[dict[str, Any]]:
    """All schemas inside of a schema that are objects, and itself."""
    stack: list[Any] = [schema]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for name in BY_NAME:
            stack.extend(node[name].values() if isinstance(node.get(name), dict) else [])
        for name in (*CHOICES, "allOf", "prefixItems", "items"):
            stack.extend(node[name] if isinstance(node.get(name), list) else [])
        stack.extend(node.get(name) for name in PARTS)


def own_keywords(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a schema itself that check something, in the newest draft's form; `type` is a tuple. Raises
    ValueError for one whose value is of another type."""
    own = {key: value for key, value in schema.items() if key in _KEYWORDS}
    if isinstance(own.get("items"), list):
        own["prefixItems"] = own.pop("items")
        if "additionalItems" in schema:
            own["items"] = schema["additionalItems"]
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(own.get(key), bool):  # in OpenAPI 3.0 it tells what the limit beside it is
            is_exclusive, limit = own.pop(key), key.replace("exclusiveM", "m")
            own |= {key: own.pop(limit)} if is_exclusive and limit in own else {}
    for key, value in own.items():
        if (kind := _KIND_OF_VALUE.get(key, kind_of(value))) != kind_of(value):
            raise ValueError(f"{key} is {shown(value)}, but must be of type {kind}")
        if kind == "number" and not isinstance(value, int) and value.is_integer():
            own[key] = int(value)
    if "const" in schema:
        is_listed = "enum" not in own or identity(schema["const"]) in map(identity, own["enum"])
        own["enum"] = [schema["const"]] if is_listed else []
    if own.get("uniqueItems") is False:
        del own["uniqueItems"]
    if "required" in own:  # a Boolean of a property in drafts before the fourth
        names = own.pop("required")
        own |= {"required": [one for one in names if isinstance(one, str)]} if isinstance(names, list) else {}
    if "type" in own:
        types = own["type"] if isinstance(own["type"], (list, tuple)) else [own["type"]]
        for one in types:
            if not isinstance(one, str) or one not in {*KINDS, "integer"}:
                raise ValueError(f"the type {shown(one)} is none of JSON's")
        own["type"] = tuple(one for one in types if one != "integer" or "number" not in types)
    return own


def kind_of(value: Any) -> str:
    """The type of a JSON value, as schemas name it, but "number" for integers."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def identity(value: Any) -> str:
    """A text that two JSON values share if they are one."""
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, sort_keys=True)
