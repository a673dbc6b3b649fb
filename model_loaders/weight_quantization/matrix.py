"""A matrix of safetensors that are quantized already: how it is decoded, and as which type of GGUF it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensors import StoredTensor

Parts = Mapping[str, StoredTensor]  # the tensors of a module, by what their names have after it
DAMAGED_SCALES = np.errstate(all="ignore")  # a damaged scale gives infinities; a warning would not help the user
_BLOCK = 32
# Types of GGUF, and NF4: the least and the greatest number that they have.
_RANGES = {"Q4_0": (-8, 7), "Q4_1": (0, 15), "Q5_0": (-16, 15), "Q8_0": (-128, 127), "NF4": (0, 15)}
_ITEMS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E8M0": "u1"}
_ITEMS |= {"U8": "u1", "I8": "i1", "I32": "<u4", "U32": "<u4", "I64": "<i8"}
# Of half precision, whose exponents are larger by 8; the largest code is NaN.
_BYTES = np.arange(256, dtype=np.uint16)
_E4M3 = ((_BYTES & 0x80) << 8 | (_BYTES & 0x7F) << 7).view(np.float16).astype(np.float32) * 256
_E4M3[[0x7F, 0xFF]] = np.nan


class Codes(NamedTuple):
    """Rows of a matrix: w = scale * number + offset, or scale * table[number]. numbers: (rows, in). scales, offsets:
    float32 (rows, groups), for groups of neighbours of equal size. table: float32 (16,)."""

    numbers: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None
    table: np.ndarray | None = None

    def values(self) -> np.ndarray:
        """(rows, in) float32."""
        rows, columns = self.numbers.shape
        numbers = self.numbers if self.table is None else self.table[self.numbers]
        values = numbers.reshape(*self.scales.shape, columns // self.scales.shape[1]) * self.scales[..., None]
        if self.offsets is not None:
            values += self.offsets[..., None]
        return values.astype(np.float32, copy=False).reshape(rows, columns)


@dataclass(frozen=True, kw_only=True)
class QuantizedMatrix(StoredTensor):
    """A matrix whose bytes are blocks of `dtype` if that is a type of GGUF or NF4, and values in float32 otherwise.
    decode: rows in the order of the file, first to stop → their codes."""

    decode: Callable[[int, int], Codes]

    @DAMAGED_SCALES
    def values(self, rows: slice) -> np.ndarray:
        return self._in_order(rows, lambda first, stop: self.decode(first, stop).values())

    @DAMAGED_SCALES
    def _file_bytes(self, start: int, stop: int) -> np.ndarray:
        """Blocks as in GGUF files: half-precision scales, then offsets, fifth bits, and byte j has codes j and j + 16.

        Raises LoadError for codes that the type does not have.
        """
        decoded = self.decode(start, stop)
        if self.dtype not in _RANGES:
            return decoded.values().view(np.uint8)
        numbers, scales, offsets, _ = decoded
        (rows, columns), (low, high) = numbers.shape, _RANGES[self.dtype]
        if numbers.size and not low <= numbers.min() <= numbers.max() <= high:
            raise LoadError(
                f"{self.source.path}: {self.label} has zero points, which its quantization_config (sym) says it lacks; "
                "configuration and weights belong to different models."
            )
        blocks = columns // _BLOCK
        halves = [part.astype("<f2") for part in (scales, offsets) if part is not None]
        fields = [np.repeat(part, blocks // part.shape[1], axis=1)[..., None].view(np.uint8) for part in halves]
        numbers = numbers if self.dtype == "Q8_0" else numbers - numbers.dtype.type(low)
        codes: np.ndarray = numbers.astype(np.uint8).reshape(rows, blocks, _BLOCK)
        if self.dtype == "Q5_0":
            fields.append(np.packbits(codes >> 4, axis=-1, bitorder="little"))
        if self.dtype != "Q8_0":
            codes = codes[..., :16] & 15 | codes[..., 16:] << 4
        return np.concatenate([*fields, codes], axis=-1).reshape(rows, self.row_bytes)


def quantized_matrix(
    packed: StoredTensor, shape: tuple[int, int], dtype: str, decode: Callable[[int, int], Codes]
) -> QuantizedMatrix:
    """The matrix whose codes are `packed`. dtype: its type; F32 if its rows are not whole blocks."""
    dtype = "F32" if shape[1] % _BLOCK else dtype
    return QuantizedMatrix(packed.source, packed.label, shape, dtype, packed.offset, decode=decode)


def integer_type(bits: int, group: int, symmetric: bool) -> str:
    """The type that has integers of 4 or 8 bits with a scale for each `group` neighbours, without any loss.

    symmetric: whether the zero point is in the middle. 0 to 15 minus any zero point has five bits. INT4 and INT8 are
    types that have values only. group: 0 if a group's members are not neighbours.
    """
    if not group or group % _BLOCK or (bits == 8 and not symmetric):
        return f"INT{bits}"
    return "Q8_0" if bits == 8 else "Q4_0" if symmetric else "Q5_0"


def numbers(tensor: StoredTensor, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Rows of a tensor, first to stop: float32, or integers as they are stored."""
    type, width = np.dtype(_ITEMS[tensor.dtype]), prod(tensor.shape[1:])
    count = (prod(tensor.shape[:1]) if stop is None else stop) - start
    data = tensor.source.view(tensor.offset + start * width * type.itemsize, count * width * type.itemsize)
    items = data.view(type).reshape(count, *tensor.shape[1:])
    if tensor.dtype == "BF16":  # the upper half of a float32
        return np.left_shift(items, 16, dtype=np.uint32).view(np.float32)
    if tensor.dtype == "F8_E8M0":
        return np.ldexp(np.float32(1), items.astype(np.int32) - 127)
    return _E4M3[items] if tensor.dtype == "F8_E4M3" else items.astype(np.float32) if "F" in tensor.dtype else items


def minus_zeros(codes: np.ndarray, zeros: np.ndarray, bits: int) -> np.ndarray:
    """codes (rows, in) uint8, zeros (rows, groups) uint8 → the codes minus their group's zero points, int8 or int16."""
    groups = codes.reshape(*zeros.shape, codes.shape[1] // zeros.shape[1])
    type = np.int16 if bits == 8 else np.int8
    return (groups.astype(type) - zeros[..., None].astype(type)).reshape(codes.shape)


def group_size(settings: Fields, columns: int) -> int:
    """Inputs that share a scale, of `columns`. Raises LoadError."""
    size = settings.integer("group_size", 128, minimum=-1)
    size = size if size > 0 else max(1, columns)  # one group
    if columns % size:
        raise settings.refuse("group_size", f"but a matrix has rows of {columns} values")
    return size


def group_order(parts: Parts, name: str, columns: int, groups: int) -> np.ndarray | None:
    """The group of each input, (columns,); None if groups are of neighbours. Raises LoadError."""
    if name not in parts:
        return None
    stored = part(parts, name, (columns,), ("I32",))
    order = numbers(stored)
    if (last := order.max(initial=0)) >= groups:
        raise LoadError(f"{stored.source.path}: {stored.label} names group {last} of {groups}; download it again.")
    return None if (order == np.arange(columns) // (columns // groups)).all() else order


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 2, 4 or 8 bits, the first in the lowest bits of a word (…, n) → uint8 (…, codes)."""
    data = np.ascontiguousarray(words).view(np.uint8)
    codes = np.empty((*data.shape, 8 // bits), np.uint8)
    for place in range(8 // bits):
        np.right_shift(data, np.uint8(bits * place), out=codes[..., place])
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(*data.shape[:-1], data.shape[-1] * (8 // bits))


def part(parts: Parts, name: str, shape: tuple[int, ...] | None, types: tuple[str, ...]) -> StoredTensor:
    """The tensor `name` of a module; it is a matrix if `shape` is None. Raises LoadError for any other."""
    tensor = parts.get(name)
    if tensor is None:
        first = next(iter(parts.values()))
        raise LoadError(f"{first.source.path}: the model lacks {name} beside {first.label}; download it completely.")
    if tensor.dtype not in types or (tensor.shape != shape if shape is not None else len(tensor.shape) != 2):
        raise LoadError(
            f"{tensor.source.path}: the tensor {tensor.label} is {tensor.dtype} {tensor.shape}, but the "
            f"quantization_config asks for {' or '.join(types)} {shape or '(a matrix)'}; configuration and weights "
            "belong to different models."
        )
    return tensor
