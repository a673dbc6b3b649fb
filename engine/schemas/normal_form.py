"""The normal form of JSON schemas, which all readers of schemas are given: of answers, of calls and of their arguments.

In it a schema is true, false, `{"$ref": "#/$defs/…"}`, one `anyOf` or `oneOf` alone, an `enum` of values that fulfil
the schema, or it has one `type` at most and the keywords of that type. References (JSON pointers, `$anchor`, `$id`) are
followed; what stands beside them, in `allOf`, and beside `anyOf` and `oneOf` is joined with them. Where keywords cannot
be joined, as two patterns, an `allOf` has the others. Annotations and unknown keywords, which check nothing, are left
out, and so is what no value fulfils. A `oneOf` has alternatives that may overlap; others are an `anyOf`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from polarlm.engine.errors import shown
from polarlm.engine.schemas.keywords import (
    BY_NAME,
    CHOICES,
    KIND_OF_KEYWORD,
    KINDS,
    LOWER,
    OF_ARRAYS,
    OF_OBJECTS,
    PARTS,
    REFERENCES,
    UPPER,
    VALUES,
    identity,
    kind_of,
    nodes_of,
    own_keywords,
    without_nulls,
)

_MOST_LOOKS = 50_000  # at a schema: choices beside choices multiply
_MOST_LEVELS = 8  # of properties that tell alternatives apart
_LIMITS = (*LOWER[:3], *UPPER[:3])  # keywords that `_fulfils` looks at
_NOTHING = "nothing fulfils it: it is false, or a value would hold another one of its kind, without end"


def normal_form(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema in normal form. Raises ValueError if nothing fulfils it, since it is false or a value would hold another
    one of its kind without end, if it refers to what it does not have, or is too large once it is joined."""
    try:
        return _NormalForm(without_nulls(schema)).form()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def kinds_of_property(root: Mapping[str, Any], name: str) -> frozenset[str]:
    """The types of JSON that a schema of objects, in normal form, allows for the property `name`; a "number" may be an
    integer."""
    parts = (
        one if isinstance(one, bool) else one.get("properties", {}).get(name, one.get("additionalProperties", True))
        for one in _alternatives(root, root)
    )
    return frozenset[str]().union(*(_kinds(root, part) for part in parts))


def _kinds(root: Any, node: Any) -> frozenset[str]:
    kinds = set[str]()
    for one in _alternatives(root, node):
        if isinstance(one, bool):
            kinds |= KINDS if one else set()
        else:
            kinds |= {*map(kind_of, one["enum"])} if "enum" in one else {one["type"]} if "type" in one else KINDS
    return frozenset(kind.replace("integer", "number") for kind in kinds)


def _alternatives(root: Any, node: Any) -> Iterator[Any]:
    """What a schema in normal form means, without references and choices."""
    references, stack = set[str](), [node]
    while stack:
        node = stack.pop()
        if not isinstance(node, Mapping):
            yield node is not False
        elif "$ref" in node:
            if node["$ref"] not in references:
                references.add(node["$ref"])
                stack.append(root["$defs"][_name(node)])
        elif (choices := _choices(node)) is not None:
            stack += choices
        else:
            yield node


def _choices(node: Mapping[str, Any]) -> list[Any] | None:
    return next((node[key] for key in CHOICES if key in node), None)


def _name(reference: Mapping[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


class _NormalForm:
    def __init__(self, schema: Mapping[str, Any]) -> None:
        """schema: without nulls; it is not changed, and its objects are told apart by their `id`."""
        self._schema = schema
        self._bases: dict[int, str] = {}  # id of an object in the schema → URI that its references are relative to
        self._targets: dict[str, Any] = {"": self._schema}  # URI, or URI#anchor → schema
        self._own: dict[int, dict[str, Any]] = {}  # id of a schema → its own keywords
        self._joined: dict[tuple[int, ...], Any] = {}  # ids of schemas → the schema of what fulfils all of them
        self._names: dict[tuple[int, ...], str] = {}  # ids of own keywords that are joined → name of the definition
        self._waiting: list[tuple[str, list[dict[str, Any]]]] = []
        self._definitions: dict[str, Any] = {}  # name → schema in normal form
        self._kept: list[Any] = []  # schemas that were made here, so that no other one gets their `id`
        self._looks = 0

    def form(self) -> dict[str, Any]:
        self._index()
        root = self._reference(self._conjuncts(self._schema))
        while self._waiting:
            name, conjuncts = self._waiting.pop()
            self._definitions[name] = self._join(conjuncts)
        self._drop_what_nothing_fulfils(root)
        if root is True:
            return {}
        whole = {"$defs": self._definitions}
        for node in [node for one in self._definitions.values() for node in nodes_of(one)]:
            if "oneOf" in node and all(self._excludes(whole, *two) for two in combinations(node["oneOf"], 2)):
                node["anyOf"] = node.pop("oneOf")
        used = {_name(node) for one in self._definitions.values() for node in nodes_of(one) if "$ref" in node}
        definitions = {name: self._definitions[name] for name in sorted(used, key=int)}
        return self._definitions["0"] | ({"$defs": definitions} if definitions else {})

    def _look(self) -> None:
        self._looks += 1
        if self._looks > _MOST_LOOKS:
            raise ValueError("it is too complex: its alternatives multiply")

    # -- references ----------------------------------------------------------------------------------------------------

    def _index(self) -> None:
        """Find all `$id` and `$anchor`. Pointers may lead into any keyword, so that all objects have a base."""
        stack: list[tuple[Any, str]] = [(self._schema, "")]
        while stack:
            value, base = stack.pop()
            if isinstance(value, dict):
                if isinstance(identifier := value.get("$id"), str):
                    base = urldefrag(urljoin(base, identifier))[0]
                    self._targets.setdefault(base, value)
                for key in ("$anchor", "$dynamicAnchor"):
                    if isinstance(value.get(key), str):
                        self._targets.setdefault(f"{base}#{value[key]}", value)
                self._bases[id(value)] = base
                stack += ((inner, base) for key, inner in value.items() if key not in VALUES)
            elif isinstance(value, list):
                stack += ((inner, base) for inner in value)

    def _target(self, node: Mapping[str, Any], reference: Any) -> Any:
        missing = ValueError(f"$ref has {shown(reference)}, which the schema does not have")
        if not isinstance(reference, str):
            raise missing
        uri, _, fragment = urljoin(self._bases.get(id(node), ""), reference).partition("#")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            uri, fragment = f"{uri}#{fragment}", ""
        if uri not in self._targets:
            raise missing
        target = self._targets[uri]
        for part in fragment.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(key)] if isinstance(target, list) else target[key]
            except (LookupError, TypeError, ValueError):
                raise missing from None
        return target

    def _conjuncts(self, schema: Any) -> list[dict[str, Any]] | None:
        """The own keywords of all schemas that a value of this one must fulfil: behind references and in `allOf`, too.
        None if one of them is false. Raises ValueError if one of them stands for itself."""
        found: dict[int, dict[str, Any]] = {}
        path: set[int] = set()
        stack: list[tuple[Any, bool]] = [(schema, False)]
        while stack:
            node, is_left = stack.pop()
            self._look()
            if is_left:
                path.discard(id(node))
                if own := self._own.setdefault(id(node), own_keywords(node)):
                    found[id(own)] = own
                continue
            if node is False or (isinstance(node, dict) and node.get("not") in (True, {})):  # zod's way to say false
                return None
            if not isinstance(node, dict):
                continue
            if id(node) in path:
                raise ValueError(_NOTHING)
            path.add(id(node))
            stack.append((node, True))
            stack += ((one, False) for one in reversed(_all_of(node)))
            stack += ((self._target(node, node[key]), False) for key in REFERENCES if key in node)
        return list(found.values())

    def _combine(self, *schemas: Any) -> Any:
        """The schema that a value fulfils which fulfils each of these."""
        schemas = tuple(one for one in schemas if one is not True)
        if any(one is False for one in schemas):
            return False
        if len(schemas) < 2:
            return schemas[0] if schemas else True
        return self._joined.setdefault(tuple(map(id, schemas)), {"allOf": list(schemas)})

    def _reference(self, conjuncts: list[dict[str, Any]] | None) -> Any:
        """A reference to the definition of what fulfils all of these."""
        if not conjuncts:
            return conjuncts is not None
        key = tuple(map(id, conjuncts))
        if key not in self._names:
            self._names[key] = str(len(self._names))
            self._waiting.append((self._names[key], conjuncts))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    # -- joining -------------------------------------------------------------------------------------------------------

    def _part(self, schema: Any) -> Any:
        """A schema inside of another one, in normal form."""
        if not isinstance(schema, dict):
            return schema
        conjuncts = self._conjuncts(schema)
        stands_alone = not _all_of(schema) and not schema.keys() & {*REFERENCES}
        return self._join(conjuncts) if conjuncts and stands_alone else self._reference(conjuncts)

    def _join(self, conjuncts: list[dict[str, Any]]) -> Any:
        node: dict[str, Any] = {}
        choices: list[dict[str, Any]] = []
        for one in conjuncts:
            choices += ({key: one[key]} for key in CHOICES if key in one)
            self._add(node, {key: value for key, value in one.items() if key not in CHOICES})
        if not choices:
            return self._split_types(node)
        ((key, alternatives),) = choices[0].items()
        alternatives = _exclude_each_other(alternatives) if key == "oneOf" else alternatives
        self._kept += (node, alternatives, choices)
        forms = [self._part(self._combine(node or True, one, *choices[1:])) for one in alternatives]
        return {key: forms}

    def _add(self, node: dict[str, Any], other: dict[str, Any]) -> None:
        """Join the keywords of another schema with those of `node`."""
        rest: dict[str, Any] = {}
        for keywords, join in ((OF_OBJECTS, self._join_objects), (OF_ARRAYS, self._join_arrays)):
            ours, theirs = ({key: one[key] for key in keywords if key in one} for one in (node, other))
            if ours and theirs and "patternProperties" in ours | theirs:
                rest |= theirs
            else:
                node |= join(ours, theirs) if ours and theirs else theirs
        for key in other.keys() - {*OF_OBJECTS, *OF_ARRAYS}:
            value = other[key]
            if key not in node or node[key] == value:
                node[key] = value
            elif key == "type":
                node[key] = tuple(filter(None, (_common_type(one, node[key]) for one in value)))
            elif key == "required":
                node[key] = [*dict.fromkeys((*node[key], *value))]
            elif key in (*LOWER, *UPPER):
                node[key] = (max if key in LOWER else min)(node[key], value)
            elif key == "enum":
                values = set(map(identity, value))
                node[key] = [one for one in node[key] if identity(one) in values]
            else:
                rest[key] = value
        if rest:
            node["allOf"] = [*node.get("allOf", []), rest]

    def _join_objects(self, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
        sides = [(one.get("properties", {}), one.get("additionalProperties", True)) for one in (ours, theirs)]
        names = dict.fromkeys(name for properties, _ in sides for name in properties)
        listed = {name: self._combine(*(properties.get(name, rest) for properties, rest in sides)) for name in names}
        joined = {"properties": listed, "additionalProperties": self._combine(*(rest for _, rest in sides))}
        return {key: value for key, value in joined.items() if key in ours | theirs}

    def _join_arrays(self, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
        sides = [(one.get("prefixItems", []), one.get("items", True)) for one in (ours, theirs)]
        length = max(len(first) for first, _ in sides)
        first = [self._combine(*(one[i] if i < len(one) else rest for one, rest in sides)) for i in range(length)]
        return ({"prefixItems": first} if first else {}) | {"items": self._combine(*(rest for _, rest in sides))}

    def _split_types(self, node: dict[str, Any]) -> Any:
        """A schema without choices in normal form: of one type, a choice of several, or of values."""
        types = node.pop("type", None)
        if "unevaluatedProperties" in node and "allOf" not in node:
            node.setdefault("additionalProperties", node.pop("unevaluatedProperties"))
        if "enum" in node:
            values = [one for one in node["enum"] if _fulfils(one, types, node)]
            kinds = {None, *map(kind_of, values)}
            checks = {k: v for k, v in node.items() if k not in _LIMITS and KIND_OF_KEYWORD.get(k) in kinds}
            return self._with_parts(checks | {"enum": values}) if values else False
        if types is None:
            return self._with_parts(node)
        forms = [
            self._with_parts({"type": one} | {k: v for k, v in node.items() if KIND_OF_KEYWORD.get(k, kind) == kind})
            for one in types
            for kind in [one.replace("integer", "number")]
        ]
        return forms[0] if len(forms) == 1 else {"anyOf": forms}

    def _with_parts(self, node: dict[str, Any]) -> dict[str, Any]:
        """A schema whose parts are in normal form."""
        for key, value in node.items():
            if key in BY_NAME and isinstance(value, dict):
                node[key] = {name: self._part(inner) for name, inner in value.items()}
            elif key == "prefixItems":
                node[key] = [self._part(inner) for inner in value]
            elif key == "allOf":
                node[key] = [self._with_parts(inner) for inner in value]
            elif key in PARTS:
                node[key] = self._part(value)
        return node

    # -- what can be fulfilled -----------------------------------------------------------------------------------------

    def _drop_what_nothing_fulfils(self, root: Any) -> None:
        """Leave out alternatives that nothing fulfils, and make other such schemas false. Raises ValueError if that is
        all of it."""
        known, order = set[str](), list(self._definitions)
        while len(known) < len(more := known | self._fulfilled(known, order)):
            known = more
            order.reverse()
        if not _is_fulfilled(root, known):
            raise ValueError(_NOTHING)
        self._definitions = {name: one if name in known else False for name, one in self._definitions.items()}
        for node in [node for one in self._definitions.values() for node in nodes_of(one)]:
            for key in CHOICES:
                if key in node:
                    node[key] = [one for one in node[key] if _is_fulfilled(one, known)]
            if "properties" in node:
                node["properties"] = {
                    name: _is_fulfilled(part, known) and part for name, part in node["properties"].items()
                }
            for key in ("items", "additionalProperties"):
                if key in node:
                    node[key] = _is_fulfilled(node[key], known) and node[key]

    def _fulfilled(self, known: set[str], order: list[str]) -> set[str]:
        found = set(known)
        for name in order:
            if _is_fulfilled(self._definitions[name], found):
                found.add(name)
        return found

    def _excludes(self, whole: Any, one: Any, other: Any, level: int = 0) -> bool:
        """Whether no value fulfils both of two schemas in normal form, as far as types, values and properties tell."""
        return level < _MOST_LEVELS and all(
            self._excludes_single(whole, a, b, level + 1)
            for a in _alternatives(whole, one)
            for b in _alternatives(whole, other)
        )

    def _excludes_single(self, whole: Any, one: Any, other: Any, level: int) -> bool:
        """The same of schemas that are no choices. Objects have no other properties than the listed ones."""
        self._look()
        if not _kinds(whole, one) & _kinds(whole, other):
            return True
        if isinstance(one, bool) or isinstance(other, bool):
            return False
        if "enum" in one and "enum" in other:
            return not {*map(identity, one["enum"])} & {*map(identity, other["enum"])}
        if one.get("type") != "object" or other.get("type") != "object":
            return False
        ours, theirs = ({*node.get("required", [])} for node in (one, other))
        for name in ours & theirs:
            if self._excludes(whole, _property(one, name), _property(other, name), level):
                return True
        ours_alone = any(_property(other, name) is False for name in ours)
        return ours_alone and any(_property(one, name) is False for name in theirs)


def _all_of(schema: Mapping[str, Any]) -> list[Any]:
    return schema["allOf"] if isinstance(schema.get("allOf"), list) else []


def _exclude_each_other(alternatives: list[Any]) -> list[Any]:
    """Alternatives of `oneOf` which each require one property: none has another one's."""
    own = [own_keywords(one) if isinstance(one, dict) else {} for one in alternatives]
    names = [one["required"][0] for one in own if set(one) == {"required"} and len(one["required"]) == 1]
    if len(set(names)) != len(alternatives):
        return alternatives
    return [{"required": [name], "properties": {one: False for one in names if one != name}} for name in names]


def _common_type(one: str, others: tuple[str, ...]) -> str:
    if one in others or (one == "integer" and "number" in others):
        return one
    return "integer" if one == "number" and "integer" in others else ""


def _fulfils(value: Any, types: tuple[str, ...] | None, limits: Mapping[str, Any]) -> bool:
    """Whether a value is of one of these types and within limits of its size."""
    kind = kind_of(value)
    is_integer = kind == "number" and (isinstance(value, int) or value.is_integer())
    if types is not None and kind not in types and not (is_integer and "integer" in types):
        return False
    if kind == "string":
        return bool(limits.get("minLength", 0) <= len(value) <= limits.get("maxLength", len(value)))
    return kind != "number" or bool(
        limits.get("minimum", value) <= value <= limits.get("maximum", value)
        and ("exclusiveMinimum" not in limits or limits["exclusiveMinimum"] < value)
        and ("exclusiveMaximum" not in limits or value < limits["exclusiveMaximum"])
    )


def _is_fulfilled(node: Any, known: Mapping[str, Any] | set[str]) -> bool:
    """Whether a value fulfils a schema, if values fulfil the definitions of these names and no others."""
    if not isinstance(node, dict):
        return node is not False
    if "$ref" in node:
        return _name(node) in known
    if (choices := _choices(node)) is not None:
        return any(_is_fulfilled(one, known) for one in choices)
    needed, least, first = _all_of(node), node.get("minItems", 0), node.get("prefixItems", [])
    if node.get("type") == "object" and "patternProperties" not in node:
        listed, others = node.get("properties", {}), node.get("additionalProperties", True)
        needed = [*needed, *(listed.get(name, others) for name in node.get("required", []))]
    if node.get("type") == "array" and least > 0:
        needed = [*needed, *first[:least], len(first) >= least or node.get("items", True)]
    return all(_is_fulfilled(one, known) for one in needed)


def _property(node: Mapping[str, Any], name: str) -> Any:
    others = node.get("additionalProperties", "properties" not in node or "patternProperties" in node)
    return node.get("properties", {}).get(name, others)
