"""What dialects share: the tables of their fields, parts of JSON, and arguments of calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from polarlm.server.http.generation import ModelInfo
from polarlm.server.reading.parameters import ParsedRequest, read
from polarlm.server.reading.values import BadRequest, array, mapping


class FieldPaths(dict[str, str]):
    """The client's paths, by our relative paths, in a part of a body such as a message, which has them as "paths"; ""
    is the whole part. JSON has no such class."""


class _FieldRow(NamedTuple):
    """A field of an API."""

    theirs: str  # its path in a body, such as "output_config.format"
    ours: str = ""  # our field that it sets, and whose errors name it; "" for one that is validated alone
    read: Callable[[str, Any], Any] = lambda path, value: value  # our value; None sets nothing. Raises BadRequest


class FieldTable:
    """The fields of an API that a request is read from. Of several rows for a field of ours the last names it."""

    def __init__(self, api: str, same_names: Iterable[str], *rows: tuple[Any, ...]) -> None:
        """rows: of what makes a `_FieldRow` each. same_names: fields with our own names, unless a row sets one."""
        self._api, self._rows = api, [_FieldRow(*row) for row in rows]
        ours = {row.ours for row in self._rows}
        self._rows[:0] = [_FieldRow(name, name) for name in same_names if name not in ours]
        self._names = {row.ours: row.theirs for row in self._rows if row.ours}
        self.known = known_fields(api, *(row.theirs.partition(".")[0] for row in self._rows))

    def refuse(self, body: Mapping[str, Any]) -> None:
        """Raises BadRequest for the first field that is set in `body`, and that is refused."""
        for name, reason in _FIELDS[self._api]["refused"].items():
            if body.get(name):
                raise BadRequest(name, f"{name}: {reason}")

    def translate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `body` in our own names: where several set one, arrays and objects are joined, and of other
        values the last counts. Raises BadRequest."""
        ours: dict[str, Any] = {}
        for row in self._rows:
            parent, _, name = row.theirs.rpartition(".")
            fields = members(parent, body.get(parent, {})) if parent else body
            value = row.read(row.theirs, fields[name]) if name in fields else None
            if value is None or not row.ours:
                continue
            earlier_value = ours.get(row.ours)
            if isinstance(earlier_value, list) and isinstance(value, list):
                value = earlier_value + value
            elif isinstance(earlier_value, dict) and isinstance(value, dict):
                value = earlier_value | value
            ours[row.ours] = value
        return ours

    def read(self, ours: Mapping[str, Any], info: ModelInfo, takes: Collection[str] = ("messages",)) -> ParsedRequest:
        """The request in a body with our own names. Raises BadRequest, with the client's names."""
        try:
            request = read(ours, info, takes)
        except BadRequest as error:
            raise _with_client_name(error, _client_paths(ours) | self._names) from None
        warnings_renamed = [_with_client_name(BadRequest(*warning), self._names) for warning in request.warnings]
        warnings = tuple((one.field or "", one.message) for one in warnings_renamed)
        constrained_by = request.constrained_by and self._names.get(request.constrained_by, request.constrained_by)
        return replace(request, constrained_by=constrained_by, warnings=warnings)


def _client_paths(ours: Mapping[str, Any]) -> dict[str, str]:
    """Our path → the client's path, for each part of a body that has "paths"; the longest path of a part first."""
    client_paths: dict[str, str] = {}
    for name, value in ours.items():
        parts = [(f"{name}[{i}]", one) for i, one in enumerate(value)] if isinstance(value, list) else [(name, value)]
        for at, part in parts:
            paths = part.get("paths") if isinstance(part, dict) else None
            if isinstance(paths, FieldPaths):
                client_paths |= {at + inner: paths[inner] for inner in sorted(paths, key=len, reverse=True)}
    return client_paths


def _with_client_name(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    for ours, theirs in names.items():
        rest = (error.field or "").removeprefix(ours)
        if rest != error.field and rest[:1] in ("", ".", "["):
            message = error.message
            return BadRequest(
                theirs + rest, theirs + message.removeprefix(ours) if message.startswith(ours) else message
            )
    return error


_FIELDS = json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8"))


def known_fields(api: str, *read: str) -> frozenset[str]:
    """The fields of an API: these, which are read, the refused ones, and the ones that have no effect by intent."""
    return frozenset((*read, *_FIELDS[api]["refused"], *_FIELDS[api]["harmless"]))


def members(field: str, value: Any) -> dict[str, Any]:
    """The members of a JSON object that are not null. Raises BadRequest."""
    return {name: member for name, member in mapping(field, value).items() if member is not None}


def message_of(field: str, role: str, content: Any) -> dict[str, Any]:
    """The message that is in a field of its own."""
    return {"paths": FieldPaths({"": field}), "role": role, "content": content}


def objects_with_paths(field: str, value: Any) -> list[dict[str, Any]]:
    """The objects in a JSON array, with their paths. Raises BadRequest."""
    parts = ((f"{field}[{index}]", one) for index, one in enumerate(array(field, value)))
    return [{**members(path, one), "paths": FieldPaths({"": path})} for path, one in parts]


def arguments_of(text: str) -> dict[str, Any] | None:
    """The arguments of a call; None for a call that is cut off. A number past every float, such as 1e999, becomes the
    largest: written as infinity, it would be no JSON."""
    most = sys.float_info.max
    try:
        arguments = json.loads(text, parse_float=lambda text: max(-most, min(float(text), most)))
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None
