"""What dialects share: requests in our own names, parts of JSON, and arguments of calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polarlm.server.http.generation import ModelInfo
from polarlm.server.reading.parameters import ParsedRequest, read
from polarlm.server.reading.values import BadRequest, array, mapping


class FieldPaths(dict[str, str]):
    """The client's paths, by our relative paths in a message or a tool; "" is the whole. JSON has no such class."""


def read_own(
    body: Mapping[str, Any], names: Mapping[str, str], info: ModelInfo, takes: Collection[str] = ("messages",)
) -> ParsedRequest:
    """The request in `body`, which has our own names. Raises BadRequest with the client's names: `names` maps ours to
    the client's, and so do the "paths" of messages and tools."""
    paths: dict[str, str] = {}
    for i, message in enumerate(body.get("messages", ())):
        paths |= _client_paths(f"messages[{i}]", message)
    for i, tool in enumerate(body.get("tools", ())):
        paths |= _client_paths(f"tools[{i}]", tool)
    try:
        request = read(body, info, takes)
    except BadRequest as error:
        raise _with_client_name(error, {**paths, **names}) from None
    warnings_renamed = [_with_client_name(BadRequest(*warning), names) for warning in request.warnings]
    by, warnings = request.constrained_by, tuple((one.field or "", one.message) for one in warnings_renamed)
    return replace(request, constrained_by=by and names.get(by, by), warnings=warnings)


def _client_paths(at: str, value: Any) -> dict[str, str]:
    """Our path → the client's path, for each part of `value` that has one; the longest path first."""
    paths = value.get("paths") if isinstance(value, dict) else None
    if not isinstance(paths, FieldPaths):
        return {}
    return {at + ours: paths[ours] for ours in sorted(paths, key=len, reverse=True)}


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


def refuse(body: Mapping[str, Any], api: str) -> None:
    """Raises BadRequest for the first field that is set in `body`, and that is refused."""
    for name, reason in _FIELDS[api]["refused"].items():
        if body.get(name):
            raise BadRequest(name, f"{name}: {reason}")


def members(field: str, value: Any) -> dict[str, Any]:
    """The members of a JSON object that are not null. Raises BadRequest."""
    return {name: member for name, member in mapping(field, value).items() if member is not None}


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
