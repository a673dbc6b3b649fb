"""The header of a GGUF file: metadata and the table of tensors.

Layout as specified in ggml's docs/gguf.md, versions 2 and 3, little-endian. The package `gguf` has a reader, but it
makes several NumPy objects per vocabulary entry and needs over ten seconds for a vocabulary of 128K; here a whole
header takes a fraction of a second. Dequantization is still that package's.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from polarlm.model_loaders.errors import LoadError, close_on_error
from polarlm.model_loaders.fields import describe
from polarlm.model_loaders.files.file_bytes import FileBytes
from polarlm.model_loaders.files.ggml_types import TYPES
from polarlm.model_loaders.files.tensors import StoredTensor

_READ_AHEAD = 1 << 20  # bytes fetched at a time while the header is parsed
_MAX_KEY = 1 << 16  # bytes; the format's own limit on the length of a key
_MAX_DIMS = 4
_SMALLEST_ENTRY = 13  # least bytes of a metadata entry: empty key, type, one byte of value
_SMALLEST_TENSOR = 24  # least bytes of a tensor's entry: empty name, no dimensions, type, offset
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_ALIGNMENT = 32  # bytes; the alignment of tensors in files that do not name another
# The types of metadata values, by their numbers: two that are not numbers, and the dtypes of the others.
_STRING, _ARRAY = 8, 9
_NUMBERS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}


class Strings(Sequence[str]):
    """An array of strings that are decoded when they are read. As Python objects, the strings of a vocabulary take
    several times their bytes and fragment the memory."""

    def __init__(self, content: bytes, ends: np.ndarray) -> None:
        """content: the strings as the file has them, each after 8 bytes with its length; ends: where each ends."""
        self._content, self._ends = content, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, text: object) -> bool:
        raw = str(text).encode()
        return len(raw).to_bytes(8, "little") + raw in self._content

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]
        start = int(self._ends[number - 1]) if number else 0
        return self._content[start + 8 : int(self._ends[number])].decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self._ends.tolist():
            yield self._content[start + 8 : end].decode("utf-8", "replace")
            start = end


class GgufFile:
    """An open GGUF file, or one in parts (`model-00001-of-00003.gguf` and so on), opened by the path of the first.

    `metadata` maps each key to a str, int, float or bool, a list of int, float or bool, or `Strings`, such as
    `tokenizer.ggml.tokens`. Bytes in strings that are not UTF-8 become U+FFFD. Raises LoadError if the header is
    inconsistent or exceeds the file.
    """

    metadata: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]

    def __init__(self, path: str | Path, *, alone: bool = False) -> None:
        """alone: open no other parts."""
        self.path = Path(path)
        self.files = [FileBytes(self.path)]
        with close_on_error(self):
            self._parse(_Cursor(self.path, self.files[0].size, self.files[0].read))
            if not alone and (number := self._part()) is not None:
                self._join(number)

    def close(self) -> None:
        """Closes the file; arrays already read stay valid."""
        for file in self.files:
            file.close()

    def _part(self) -> int | None:
        """The index of this part; None for a whole file."""
        number, count = self.metadata.get("split.no", 0), self.metadata.get("split.count")
        return number if isinstance(number, int) and isinstance(count, int) and count > 1 else None

    def _join(self, number: int) -> None:
        count, name = self.metadata["split.count"], _PART_NAME.fullmatch(self.path.name)
        if name is None or int(name["count"]) != count or int(name["number"]) != number + 1:
            raise LoadError(
                f"{self.path} is part {number + 1} of {count}, but its name does not say so; give it the name that it "
                f"was published under, which ends with -{number + 1:05}-of-{count:05}.gguf."
            )
        if number:
            raise LoadError(
                f"{self.path} is part {number + 1} of {count}; give the first one, {part_paths(self.path)[0]}."
            )
        tensors = dict(self.tensors)
        for index, path in enumerate(part_paths(self.path)[1:], 1):
            if not path.is_file():
                raise LoadError(f"{path} is missing: {self.path.name} has {count} parts; download them all.")
            part = GgufFile(path, alone=True)
            self.files += part.files
            is_next = part._part() == index and part.metadata["split.count"] == count
            if not is_next or tensors.keys() & part.tensors.keys():
                raise LoadError(f"{path} does not belong to {self.path.name}; download both again.")
            tensors |= part.tensors
        self.tensors = MappingProxyType(tensors)

    def _parse(self, cursor: _Cursor) -> None:
        tensor_count, entry_count = _counts(cursor)
        metadata: dict[str, object] = {}
        for key, value in _entries(cursor, entry_count):
            if key in metadata:
                raise LoadError(f"{self.path} has the metadata key {key!r} twice; download it again.")
            metadata[key] = value
        self.metadata = MappingProxyType(metadata)
        self._place([_tensor(cursor, self.files[0]) for _ in range(tensor_count)], cursor.position)

    def _place(self, entries: list[StoredTensor], header_end: int) -> None:
        """Converts offsets into the data section to offsets into the file, and checks them."""
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise LoadError(f"{self.path} has the alignment {describe(alignment)}, which is not a power of two.")
        data_start = -(-header_end // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for tensor in entries:
            if tensor.label in tensors:
                raise LoadError(f"{self.path} has the tensor {tensor.label!r} twice; download it again.")
            end = data_start + tensor.offset + tensor.nbytes
            if end > self.files[0].size:
                raise LoadError(
                    f"{self.path} is truncated: the tensor {tensor.label!r} ends at byte {end:,}, the file at "
                    f"{self.files[0].size:,}; download it again."
                )
            tensors[tensor.label] = replace(tensor, offset=data_start + tensor.offset)
        self.tensors = MappingProxyType(tensors)


def part_paths(path: Path) -> list[Path]:
    """The paths of a model's parts, in order, given any of them; `path` alone if its name has no number of a part."""
    name = _PART_NAME.fullmatch(path.name)
    if name is None:
        return [path]
    count = name["count"]
    return [path.with_name(f"{name['stem']}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


class Beginning(NamedTuple):
    """What the beginning of a file says: its metadata, whether that is all of it, and the number of its tensors."""

    metadata: Mapping[str, object]
    is_whole: bool
    tensors: int


def beginning_of(content: bytes, where: str) -> Beginning:
    """What is complete in the first bytes of a file. Raises LoadError if they are not a GGUF file's.

    where: the file's name, for errors.
    """
    cursor = _Cursor(Path(where), len(content), lambda offset, count: content[offset : offset + count])
    metadata: dict[str, object] = {}
    tensor_count, entry_count = _counts(cursor)
    with suppress(LoadError):  # the end of `content`
        for key, value in _entries(cursor, entry_count):
            metadata[key] = value
    return Beginning(metadata, len(metadata) == entry_count, tensor_count)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """The numbers of tensors and of metadata entries. Raises LoadError for a file of another format."""
    if cursor.take(4) != b"GGUF":
        raise LoadError(
            f"{cursor.path} is not a GGUF file: it does not begin with the letters GGUF; give one, or the folder of a "
            "model with config.json and safetensors files."
        )
    version = cursor.number("<u4")
    if version not in (2, 3):
        raise LoadError(
            f"{cursor.path} is a GGUF file of a version that is not supported (version field {version:#x}); "
            "convert it to little-endian GGUF version 3."
        )
    return cursor.count(_SMALLEST_TENSOR), cursor.count(_SMALLEST_ENTRY)


def _entries(cursor: _Cursor, count: int) -> Iterator[tuple[str, object]]:
    for _ in range(count):
        yield cursor.string(_MAX_KEY), cursor.value(cursor.number("<u4"))


def _tensor(cursor: _Cursor, file: FileBytes) -> StoredTensor:
    """A tensor's entry in the header, whose offset counts from the start of the data."""
    name = cursor.string(_MAX_KEY)
    rank = cursor.number("<u4")
    if rank > _MAX_DIMS:
        raise LoadError(f"{cursor.path} gives the tensor {name!r} {rank} dimensions; at most {_MAX_DIMS} are allowed.")
    dims = tuple(cursor.number("<u8") for _ in range(rank)) or (1,)  # the fastest first; a number has none
    type_id, offset = cursor.number("<u4"), cursor.number("<u8")
    if type_id not in TYPES:
        raise LoadError(
            f"{cursor.path} stores the tensor {name!r} in type number {type_id}, which is unknown; use a file "
            "quantized to Q4_K, Q6_K, Q8_0 or F16."
        )
    dtype, block, _ = TYPES[type_id]
    if dims[0] % block:
        raise LoadError(
            f"{cursor.path}: rows of the tensor {name!r} have {dims[0]} values, not a multiple of the {block} in a "
            f"block of {dtype}."
        )
    return StoredTensor(file, name, dims[::-1], dtype, offset)


class _Cursor:
    """Reads the header from front to back; every length is checked against the file before memory is allocated."""

    def __init__(self, path: Path, size: int, read: Callable[[int, int], bytes]) -> None:
        """size: bytes of the file. read: returns some of them, given an offset and a count."""
        self.path, self._size, self._read = path, size, read
        self.position = 0
        self._buffer = bytearray()

    def _need(self, end: int) -> None:
        if end <= len(self._buffer):
            return
        if end <= self._size:
            have = len(self._buffer)
            self._buffer += self._read(have, max(end - have, _READ_AHEAD))
        if end > len(self._buffer):
            raise LoadError(
                f"{self.path} is truncated or damaged: its header extends beyond byte {self._size:,}, "
                "the end of the file; download it again."
            )

    def take(self, count: int) -> bytes:
        start = self.position
        self._need(start + count)
        self.position = start + count
        return bytes(self._buffer[start : self.position])

    def number(self, dtype: str) -> int:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype)[0].item()

    def count(self, item_bytes: int) -> int:
        """A 64-bit count of items that take at least `item_bytes` each. Raises LoadError if the file is too short."""
        count = self.number("<u8")
        if count * item_bytes > self._size - self.position:
            raise LoadError(
                f"{self.path} is truncated or damaged: its header counts {count:,} entries, more than the file can "
                "hold; download it again."
            )
        return count

    def string(self, limit: int | None = None) -> str:
        length = self.count(1)
        if limit is not None and length > limit:
            raise LoadError(
                f"{self.path} is damaged: a name in its header is {length:,} bytes long; download it again."
            )
        return self.take(length).decode("utf-8", "replace")

    def value(self, type_id: int) -> object:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array(self.number("<u4"))
        return self.number(self._number_type(type_id))

    def _array(self, type_id: int) -> Sequence[object]:
        if type_id == _STRING:
            return self._strings(self.count(8))
        dtype = np.dtype(self._number_type(type_id))
        return np.frombuffer(self.take(self.count(dtype.itemsize) * dtype.itemsize), dtype).tolist()

    def _number_type(self, type_id: int) -> str:
        try:
            return _NUMBERS[type_id]
        except KeyError:
            raise LoadError(
                f"{self.path} is damaged or too new: a metadata value has type number {type_id}; download it again."
            ) from None

    def _strings(self, count: int) -> Strings:
        """`count` strings, without a function call for each: a vocabulary has hundreds of thousands."""
        unpack, buffer, first = struct.Struct("<Q").unpack_from, self._buffer, self.position
        position, ends = first, array("q")
        for _ in range(count):
            if position + 8 > len(buffer):
                self._need(position + 8)
            position += 8 + unpack(buffer, position)[0]
            if position > len(buffer):
                self._need(position)
            ends.append(position - first)
        self.position = position
        return Strings(bytes(buffer[first:position]), np.array(ends))
