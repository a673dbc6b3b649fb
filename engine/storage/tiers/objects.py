"""The objects that tiers keep: one block of K/V for all layers, or the token ids of an answer, as checked bytes.

An object has a header, whose SHA-256 covers header and payload, and a name, which the header repeats: what is found
under a name that another object was made for is damaged. Its payload is one of these:

    BLOCK   a quantized block: for every layer, its arrays in the order of `BlockParts`
    FULL    a block in full precision with 1 to N tokens: their ids, then for every layer keys and values
    IDS     token ids

A layer whose block has left the window has no arrays: the header says which groups of layers have them.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.state.shapes import ArraySpec, CacheShape

BLOCK, FULL, IDS = 1, 2, 3
NAME_BYTES = 16

# Magic, name, kind, representation and its version, tokens, groups as bits, bytes of the payload; the SHA-256 follows.
_FIELDS = struct.Struct("<8s16sBBHIQQ")
_MAGIC = b"polarkv1"
_CHECKSUM = 32  # bytes
HEADER_BYTES = _FIELDS.size + _CHECKSUM
_ALIGNED = 8  # bytes; every array starts at a multiple of it
_ID = np.dtype("<i4")
_MOST_IDS = 1 << 20  # bytes, of an answer of 262,144 tokens

# Of FULL, the representation is the size of a number in bytes.
_NUMBERS: dict[int, np.dtype] = {2: np.dtype("<f2"), 4: np.dtype("<f4")}


class DamagedObject(Exception):
    """The bytes are not the object of this name, or not all of them are there."""


@dataclass(frozen=True)
class Object:
    """An object whose checksum is right. payload: uint8 (bytes,). tokens: of a FULL block or of IDS."""

    kind: int
    representation: int
    version: int
    tokens: int
    groups: int
    payload: np.ndarray

    @property
    def stored_as(self) -> str | None:
        """How the arrays of a BLOCK are represented, see `Ops.stored_as`; None in a way that is not known here."""
        known = {representation_of(stored_as): stored_as for stored_as in transfer.REPRESENTATIONS}
        return known.get((self.representation, self.version)) if self.kind == BLOCK else None

    @property
    def number_type(self) -> np.dtype | None:
        """The type of the numbers of a FULL block; None if it is none."""
        return _NUMBERS.get(self.representation) if self.kind == FULL else None


def pack(
    name: bytes,
    kind: int,
    payload: np.ndarray,
    *,
    representation: int = 0,
    version: int = 0,
    tokens: int = 0,
    groups: int = 0,
) -> tuple[bytes, memoryview]:
    """The header and the payload of an object."""
    fields = _FIELDS.pack(_MAGIC, name, kind, representation, version, tokens, groups, payload.nbytes)
    content = np.ascontiguousarray(payload).view(np.uint8).reshape(-1).data
    digest = hashlib.sha256(fields)
    digest.update(content)
    return fields + digest.digest(), content


def unpack(name: bytes, content: bytes | bytearray | memoryview) -> Object:
    """The object of this name. Raises DamagedObject."""
    view = memoryview(content)
    if len(view) < HEADER_BYTES:
        raise DamagedObject("it is too short")
    magic, found, kind, representation, version, tokens, groups, size = _FIELDS.unpack_from(view)
    if magic != _MAGIC or found != name or len(view) != HEADER_BYTES + size:
        raise DamagedObject("its header is wrong")
    digest = hashlib.sha256(view[: _FIELDS.size])
    digest.update(view[HEADER_BYTES:])
    if digest.digest() != bytes(view[_FIELDS.size : HEADER_BYTES]):
        raise DamagedObject("its checksum is wrong")
    return Object(kind, representation, version, tokens, groups, np.frombuffer(view[HEADER_BYTES:], np.uint8))


def pack_ids(name: bytes, ids: Sequence[int]) -> tuple[bytes, memoryview]:
    """The object IDS of an answer's token ids."""
    return pack(name, IDS, np.asarray(ids, _ID), tokens=len(ids))


def ids_of(found: Object) -> tuple[int, ...]:
    """The token ids of IDS or of a FULL block. Raises DamagedObject for other objects."""
    if found.kind not in (IDS, FULL) or len(found.payload) < found.tokens * _ID.itemsize:
        raise DamagedObject("it has no token ids")
    return tuple(found.payload[: found.tokens * _ID.itemsize].view(_ID).tolist())


@dataclass(frozen=True)
class Part:
    """Where one array of a layer lies in a payload. shape: of one block, (K, …)."""

    layer: int
    name: str
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """This array of every payload in `rows` (B, bytes): a view (B, K, …)."""
        return rows[:, self.start : self.stop].view(self.dtype).reshape(len(rows), *self.shape)

    def of_payloads(self, payloads: Sequence[np.ndarray]) -> np.ndarray:
        """This array of B payloads, each uint8 (bytes,): a copy (B, K, …)."""
        part = slice(self.start, self.stop)
        joined = np.concatenate([payload[part] for payload in payloads])
        return joined.view(self.dtype).reshape(len(payloads), *self.shape)


class Payloads:
    """Where the arrays of all layers lie in payloads, for caches of one shape."""

    def __init__(self, shape: CacheShape):
        self.shape = shape
        self._made: dict[tuple[object, ...], tuple[list[Part], int]] = {}
        self._floats: dict[tuple[str, int], list[tuple[np.dtype, np.ndarray]]] = {}

    @cached_property
    def every_group(self) -> int:
        """The bits of all groups."""
        return (1 << len(self.shape.groups)) - 1

    def of_blocks(self, stored_as: str, groups: int) -> tuple[list[Part], int]:
        """The arrays of a BLOCK, and the bytes of its payload. Raises ValueError where layers do not have them."""
        key = stored_as, groups
        if key not in self._made:
            n, layers = self.shape.block_size, self.shape.layers
            found = [(i, spec) for i in self._layers(groups) for spec in layers[i].block_arrays(n, stored_as)]
            self._made[key] = _placed(found, 0)
        return self._made[key]

    def of_full(self, number_type: np.dtype, tokens: int, groups: int) -> tuple[list[Part], int]:
        """The arrays of a FULL block behind its ids, and the bytes of its payload."""
        key = number_type, tokens, groups
        if key not in self._made:
            layers = self.shape.layers
            found = [(i, spec) for i in self._layers(groups) for spec in layers[i].full_arrays(tokens, number_type)]
            self._made[key] = _placed(found, tokens * _ID.itemsize)
        return self._made[key]

    def _numbers(self, stored_as: str, groups: int) -> list[tuple[np.dtype, np.ndarray]]:
        """Where the floating-point numbers of a BLOCK lie in its payload, each as an index of all of a dtype."""
        key = stored_as, groups
        if key not in self._floats:
            places: dict[np.dtype, list[np.ndarray]] = {}
            for part in self.of_blocks(stored_as, groups)[0]:
                for dtype, own in self._numbers_of(part, stored_as):
                    places.setdefault(dtype, []).append(part.start // dtype.itemsize + own)
            self._floats[key] = [(dtype, np.concatenate(found)) for dtype, found in places.items()]
        return self._floats[key]

    def _numbers_of(self, part: Part, stored_as: str) -> list[tuple[np.dtype, np.ndarray]]:
        """The places of numbers in a part, by their dtype."""
        if part.layer in self.shape.kv_layers:
            return transfer.numbers(self.shape.format(part.layer), stored_as)[part.name]
        return [(part.dtype, np.arange(math.prod(part.shape)))] if part.dtype.kind == "f" else []

    def most_bytes(self) -> int:
        """Bytes of the largest object: a block in full precision, or quantized, or the ids of an answer."""
        sizes = [_MOST_IDS, self.of_full(_NUMBERS[4], self.shape.block_size, self.every_group)[1]]
        for stored_as in transfer.REPRESENTATIONS:
            with suppress(ValueError):  # the layers do not have it
                sizes.append(self.of_blocks(stored_as, self.every_group)[1])
        return HEADER_BYTES + max(sizes)

    def _layers(self, groups: int) -> list[int]:
        return [layer for index, (_, layers) in enumerate(self.shape.groups) if groups >> index & 1 for layer in layers]

    # -- checks ------------------------------------------------------------------------------------------------

    def check_block(self, found: Object) -> None:
        """Raises DamagedObject unless `found` is a BLOCK of this shape whose numbers are all finite."""
        stored_as = found.stored_as
        if stored_as is None or not 0 < found.groups <= self.every_group:
            raise DamagedObject("it is no block, or one of another version")
        try:
            _, size = self.of_blocks(stored_as, found.groups)
        except ValueError as error:
            raise DamagedObject(str(error)) from None
        if len(found.payload) != size:
            raise DamagedObject("it has another size")
        _check_finite(found.payload.view(dtype)[places] for dtype, places in self._numbers(stored_as, found.groups))

    def check_full(self, found: Object) -> tuple[int, ...]:
        """The token ids of a FULL block. Raises DamagedObject unless its numbers are all finite."""
        number_type = found.number_type
        if number_type is None or not 0 < found.groups <= self.every_group:
            raise DamagedObject("it is no block in full precision")
        if not 0 < found.tokens <= self.shape.block_size:
            raise DamagedObject("it has no tokens, or too many")
        parts, size = self.of_full(number_type, found.tokens, found.groups)
        if len(found.payload) != size:
            raise DamagedObject("it has another size")
        _check_finite(part.of_rows(found.payload[None]) for part in parts)
        return ids_of(found)


def representation_of(stored_as: str) -> tuple[int, int]:
    """(representation, version) of blocks that are represented in this way."""
    _, _, version = stored_as.partition(" ")
    return transfer.REPRESENTATIONS.index(stored_as), int(version or 0)


def _placed(found: Sequence[tuple[int, ArraySpec]], start: int) -> tuple[list[Part], int]:
    parts: list[Part] = []
    for layer, (name, shape, dtype) in found:
        part = Part(layer, name, -(-start // _ALIGNED) * _ALIGNED, shape, dtype)
        parts.append(part)
        start = part.stop
    return parts, -(-start // _ALIGNED) * _ALIGNED


def _check_finite(arrays: Iterable[np.ndarray]) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise DamagedObject("not all of its numbers are finite")
