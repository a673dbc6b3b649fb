"""Tensors in files, and their conversion to float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from polarlm.model_loaders import elementary
from polarlm.model_loaders.files.file_bytes import FileBytes
from polarlm.model_loaders.files.ggml_types import BY_NAME, size_of

PLAIN = ("F32", "F16", "BF16")
_LATTICE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")
_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0")
_LATER = ("MXFP4", "NVFP4")  # older versions of `gguf` cannot dequantize these
READABLE = (*PLAIN, *_BLOCKS, *_LATTICE, *_LATER)
_SLAB = 1 << 18  # values converted at a time, so that temporaries stay in the cache


@dataclass(frozen=True)
class StoredTensor:
    """The place, shape and type of one tensor in a file."""

    source: FileBytes
    label: str  # the name in the file
    shape: tuple[int, ...]
    dtype: str
    offset: int  # from the start of the file
    file_rows: np.ndarray | None = None  # int64 (rows,): each row's number in the file; None: they are the same
    factor: float = 1.0  # a number to multiply every value by
    added: float = 0.0  # a number to add to every value afterwards
    negated_exp: bool = False  # every value x becomes −exp(x)
    transpose_of: StoredTensor | None = None  # whose rows are this tensor's columns
    columns_of: tuple[StoredTensor, int] | None = None  # the tensor that these are some columns of, and the first one

    @property
    def columns(self) -> int:
        """Values in a row; a vector has rows of one value, so that it is sliced and reordered like a matrix."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        return size_of(self.dtype, self.columns)

    @property
    def nbytes(self) -> int:
        return size_of(self.dtype, prod(self.shape))

    def with_rows(self, rows: np.ndarray) -> StoredTensor:
        """The tensor that has only these rows of this one, int64 (count,), in this order."""
        in_file = rows if self.file_rows is None else self.file_rows[rows]
        return replace(self, shape=(len(rows), *self.shape[1:]), file_rows=in_file)

    def with_columns(self, first: int, count: int) -> StoredTensor:
        """The tensor that has only so many columns of this one, a matrix, from `first` on: whole blocks of its type."""
        return replace(self, shape=(self.shape[0], count), columns_of=(self, first))

    def transpose(self) -> StoredTensor:
        """The tensor whose rows are the columns of this one, a matrix. Blocks of several values become halves."""
        dtype = self.dtype if self.dtype in PLAIN else "F16"
        place = self.source, self.label, self.shape[::-1], dtype, self.offset
        return StoredTensor(*place, None, self.factor, self.added, self.negated_exp, transpose_of=self)

    def raw(self, rows: slice) -> np.ndarray:
        """The bytes of existing rows, start to stop: uint8 (rows, bytes of a row), C-contiguous."""
        if self.transpose_of is not None:
            return self._columns(self.transpose_of)[rows]
        if self.columns_of is not None:
            whole, first = self.columns_of
            start = size_of(self.dtype, first)
            return np.ascontiguousarray(whole.raw(rows)[:, start : start + self.row_bytes])
        return self._in_order(rows, self._file_bytes)

    def values(self, rows: slice) -> np.ndarray:
        """The values of existing rows, (rows, columns): float16 if stored as F16, else float32."""
        return _values(self.raw(rows).reshape(-1), self.dtype).reshape(-1, self.columns)

    def _in_order(self, rows: slice, read: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """What `read` returns for rows of the file, first to stop, for these rows."""
        if self.file_rows is None:
            return read(rows.start, rows.stop)
        file_rows = self.file_rows[rows]
        first, stop = int(file_rows.min()), int(file_rows.max()) + 1
        if stop - first <= 2 * len(file_rows):
            return read(first, stop)[file_rows - first]
        runs = np.split(file_rows, np.flatnonzero(np.diff(file_rows) != 1) + 1)
        return np.concatenate([read(int(run[0]), int(run[-1]) + 1) for run in runs])

    def expect(self) -> None:
        """Lets the system read all rows into memory now, since they will be read soon."""
        if self.transpose_of is None:
            self.source.expect(self.offset, self.nbytes)
        else:
            self.transpose_of.expect()

    def _columns(self, other: StoredTensor) -> np.ndarray:
        """The bytes of all columns of a tensor, in this one's type: uint8 (columns, bytes of one), C-contiguous."""
        rows = slice(0, other.shape[0])
        if other.dtype in PLAIN:
            values = other.raw(rows).view("<u4" if other.dtype == "F32" else "<u2")
        else:
            values = other.values(rows).astype("<f2")
        return np.ascontiguousarray(values.T).view(np.uint8)

    def _file_bytes(self, start: int, stop: int) -> np.ndarray:
        """Bytes of rows start to stop in the order of the file, uint8 (rows, bytes of a row)."""
        count = (stop - start) * self.row_bytes
        return self.source.view(self.offset + start * self.row_bytes, count).reshape(stop - start, self.row_bytes)


class StoredWeights:
    """The WeightSource of every file format: a table of tensors by their Hugging Face names.

    where: the path that the user gave, a folder or a file. opened: the files to close.
    """

    def __init__(self, where: Path, tensors: Mapping[str, StoredTensor], open_files: Iterable[FileBytes]) -> None:
        self.where, self.tensors, self.open_files = where, tensors, tuple(open_files)

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def stored_dtype(self, name: str) -> str:
        return self.tensors[name].dtype

    def files(self) -> frozenset[Path]:
        return frozenset(tensor.source.path for tensor in self.tensors.values())

    def read_into(self, name: str, out: np.ndarray, rows: slice = slice(None)) -> None:
        tensor = self.tensors[name]
        shape = len(range(*rows.indices(tensor.shape[0]))), *tensor.shape[1:]
        if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(f"{name} needs a C-contiguous float32 array {shape}, got {out.dtype} {out.shape}")
        _convert(tensor, out, rows.indices(tensor.shape[0])[0])

    def read_raw(self, name: str, rows: slice) -> np.ndarray:
        tensor = self.tensors[name]
        if tensor.added or tensor.factor != 1 or tensor.negated_exp:
            change = f"{tensor.added:g} is added to" if tensor.added else f"{tensor.factor:g} multiplies"
            raise ValueError(f"{name} differs from the file: {change} its values")
        return tensor.raw(rows)

    def expect(self, name: str) -> None:
        self.tensors[name].expect()

    def close(self) -> None:
        for file in self.open_files:
            file.close()


def _convert(tensor: StoredTensor, out: np.ndarray, first: int) -> None:
    """Convert rows of the tensor, from `first` on, into `out`, slab by slab."""
    columns = tensor.columns
    values = out.reshape(out.size // max(1, columns), columns)
    step = max(1, _SLAB // max(1, columns))
    for start in range(0, len(values), step):
        part = values[start : start + step]
        rows = slice(first + start, first + start + len(part))
        part[...] = tensor.values(rows)
        if tensor.negated_exp:
            part[...] = -elementary.exp(part)
        if tensor.factor != 1:
            part *= np.float32(tensor.factor)
        if tensor.added:
            part += np.float32(tensor.added)


def can_dequantize(dtype: str) -> bool:
    """Whether the package `gguf` can dequantize this type of READABLE. Types that older versions lack are tried out."""
    if dtype not in _LATER:
        return True
    try:
        _values(np.zeros(BY_NAME[dtype].nbytes, np.uint8), dtype)
    except NotImplementedError:
        return False
    return True


def _values(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The values of stored bytes, uint8 (n,), as a flat array: float16 if stored as F16, else float32."""
    if dtype == "F32":
        return raw.view("<f4")
    if dtype == "F16":
        return raw.view("<f2")
    if dtype == "BF16":  # the upper half of a float32
        return np.left_shift(raw.view("<u2"), 16, dtype=np.uint32).view(np.float32)
    from gguf.constants import GGMLQuantizationType  # imported only where a file has such a type
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # a damaged scale gives infinities; a warning would not help the user
        return dequantize(raw.reshape(1, -1), GGMLQuantizationType[dtype])[0]
