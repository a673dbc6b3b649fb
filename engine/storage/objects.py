"""Checked objects: a header in JSON and a payload, with a SHA-256 of both. Everything that is kept outside of the KV
store consists of them: blocks of K/V, the ids of answers, sessions, calibrations.

    magic, name, sizes of the header and of the payload    8, 16, 4 and 8 bytes
    SHA-256 of all other bytes                             32 bytes
    header                                                 padded with spaces, so that the payload is aligned
    payload

An object contains its name. If it is found under another name, it counts as damaged.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

NAME_BYTES = 16
HEADER_LIMIT = 2 << 20  # bytes, of an object that is not trusted: enough for an answer of 262,144 tokens

_FIELDS = struct.Struct("<8s16sIQ")
_MAGIC = b"polarkv2"
NAME_END = 24  # bytes up to the end of the name
_START = _FIELDS.size + 32  # bytes before the header
_ALIGNMENT = 64  # bytes
_PIECE = 16 << 20  # bytes that are read at a time


class DamagedObject(Exception):
    """The bytes are not the object of this name, or are incomplete."""


@dataclass(frozen=True)
class Object:
    """header: any JSON values, among them "kind", which says what the object is. payload: uint8 (bytes,)."""

    header: Mapping[str, Any]
    payload: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))

    @property
    def is_full(self) -> bool:
        return self.header.get("kind") == "full"

    @property
    def is_finer(self) -> bool:
        """Whether it is a recent block of an earlier version, as linear8."""
        return self.header.get("kind") == "finer"

    @property
    def groups(self) -> int:
        """The groups of layers that a checked block has arrays of, as bits."""
        groups: int = self.header["groups"]
        return groups

    @property
    def ids(self) -> tuple[int, ...]:
        """Its token ids. Raises DamagedObject if it has none."""
        ids = self.header.get("ids")
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 63 for i in ids):
            raise DamagedObject("it has no token ids")
        return tuple(ids)

    def pack(self, name: bytes) -> tuple[bytes, memoryview]:
        """Return the bytes before the payload, and the payload. Raises TypeError, ValueError or RecursionError for a
        header that is not JSON."""
        header = json.dumps(self.header, separators=(",", ":")).encode()
        header += b" " * (-(_START + len(header)) % _ALIGNMENT)
        payload = np.ascontiguousarray(self.payload).reshape(-1).view(np.uint8).data
        fields = _FIELDS.pack(_MAGIC, name, len(header), len(payload))
        return fields + _digest(fields, header, payload) + header, payload


def join_arrays(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Object:
    """Return an object with float32 arrays by their names."""
    payload = np.concatenate([np.empty(0, np.float32), *(array.reshape(-1) for array in arrays.values())])
    shapes = [[name, array.shape] for name, array in arrays.items()]
    return Object({**header, "arrays": shapes}, payload.astype(np.float32, copy=False))


def split_arrays(stored: Object) -> dict[str, np.ndarray]:
    """Return the arrays of an object by their names. Raises KeyError, TypeError or ValueError for one without arrays,
    with other numbers, or with some that are not finite."""
    numbers = stored.payload.view(np.float32)
    arrays: dict[str, np.ndarray] = {}
    end = 0
    for name, shape in stored.header["arrays"]:
        start, end = end, end + math.prod(shape)
        arrays[name] = numbers[start:end].reshape(shape)
    if end != len(numbers) or not np.isfinite(numbers).all():
        raise ValueError("other numbers")
    return arrays


def unpack(name: bytes, content: bytes | bytearray | memoryview, limit: int = HEADER_LIMIT) -> Object:
    """Unpack `content`, an object of this name. Raises DamagedObject, also if its header exceeds `limit` bytes."""
    view = memoryview(content)
    size, end = _sizes(name, view)
    if len(view) != size or end - _START > limit:
        raise DamagedObject("it has another size")
    if _digest(view[: _FIELDS.size], view[_START:]) != view[_FIELDS.size : _START]:
        raise DamagedObject("its checksum is wrong")
    try:
        header = json.loads(bytes(view[_START:end]))
    except (ValueError, RecursionError) as error:
        raise DamagedObject(f"its header is wrong: {error}") from None
    if not isinstance(header, dict):
        raise DamagedObject("its header is wrong")
    return Object(header, np.frombuffer(view[end:], np.uint8))


def read(file: BinaryIO, name: bytes, progress: Callable[[int], None] = lambda done: None) -> Object:
    """Read the next object of a file, which must have this name. progress: called with the bytes read since its last
    call. Raises OSError or DamagedObject."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    start = file.read(_START)
    progress(len(start))
    size, _ = _sizes(name, start)
    if size > left:
        raise DamagedObject("it is cut short")
    content = np.empty(size, np.uint8).data
    content[:_START] = start
    end = _START
    while end < size and (count := file.readinto(content[end : end + _PIECE])):  # type: ignore[attr-defined]
        end += count
        progress(count)
    return unpack(name, content[:end], size)


def read_name(start: bytes) -> bytes:
    """Return the name of the object that begins with these bytes; empty if they do not begin an object."""
    return start[8:24] if start.startswith(_MAGIC) else b""


def _sizes(name: bytes, start: bytes | memoryview) -> tuple[int, int]:
    """Return the size of the object that begins with `start`, and the offset of its payload. Raises DamagedObject."""
    if len(start) < _START:
        raise DamagedObject("it is too short")
    magic, stored_name, header, payload = _FIELDS.unpack_from(start)
    if magic != _MAGIC or stored_name != name:
        raise DamagedObject("it is another object, or none")
    return _START + header + payload, _START + header


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
