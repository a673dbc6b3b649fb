"""Tensors in files, and their conversion to float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

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

    @property
    def columns(self) -> int:
        """Values in a row; a vector has rows of one value, so that it is sliced and reordered like a matrix."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        return size_of(self.dtype, self.columns)

    def taking(self, rows: np.ndarray) -> StoredTensor:
        """The tensor that has only these rows of this one, int64 (count,), in this order."""
        in_file = rows if self.file_rows is None else self.file_rows[rows]
        return replace(self, shape=(len(rows), *self.shape[1:]), file_rows=in_file)

    def raw(self, rows: slice) -> np.ndarray:
        """The bytes of existing rows, start to stop: uint8 (rows, bytes of a row), C-contiguous."""
        if self.file_rows is None:
            return self._file_bytes(rows.start, rows.stop)
        wanted = self.file_rows[rows]
        first, stop = int(wanted.min()), int(wanted.max()) + 1
        if stop - first <= 2 * len(wanted):
            return self._file_bytes(first, stop)[wanted - first]
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
        return np.concatenate([self._file_bytes(int(run[0]), int(run[-1]) + 1) for run in runs])

    def expect(self) -> None:
        """Lets the system read all rows into memory now, since they will be read soon."""
        self.source.expect(self.offset, self.shape[0] * self.row_bytes)

    def _file_bytes(self, start: int, stop: int) -> np.ndarray:
        """Bytes of rows start to stop in the order of the file, uint8 (rows, bytes of a row)."""
        count = (stop - start) * self.row_bytes
        return self.source.view(self.offset + start * self.row_bytes, count).reshape(stop - start, self.row_bytes)


class StoredWeights:
    """The WeightSource of every file format: a table of tensors by their Hugging Face names.

    `where`: the path that the user gave, a folder or a file.
    """

    def __init__(self, where: Path, tensors: Mapping[str, StoredTensor], files: Iterable[FileBytes]) -> None:
        self.where = where
        self._tensors = dict(tensors)
        self._files = tuple(files)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def stored_dtype(self, name: str) -> str:
        return self._tensors[name].dtype

    def label(self, name: str) -> str:
        """The tensor's name as the file spells it."""
        return self._tensors[name].label if name in self._tensors else name

    def file(self, name: str) -> Path:
        """The file that holds the tensor."""
        return self._tensors[name].source.path

    def files(self) -> frozenset[Path]:
        return frozenset(tensor.source.path for tensor in self._tensors.values())

    def read_into(self, name: str, out: np.ndarray, rows: slice = slice(None)) -> None:
        tensor = self._tensors[name]
        shape = len(range(*rows.indices(tensor.shape[0]))), *tensor.shape[1:]
        if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(f"{name} needs a C-contiguous float32 array {shape}, got {out.dtype} {out.shape}")
        _convert(tensor, out, rows.indices(tensor.shape[0])[0])

    def read_raw(self, name: str, rows: slice) -> np.ndarray:
        tensor = self._tensors[name]
        if tensor.added or tensor.factor != 1 or tensor.negated_exp:
            change = f"{tensor.added:g} is added to" if tensor.added else f"{tensor.factor:g} multiplies"
            raise ValueError(f"{name} differs from the file: {change} its values")
        return tensor.raw(rows)

    def expect(self, name: str) -> None:
        self._tensors[name].expect()

    def renamed(self, rename: Callable[[str], str]) -> StoredWeights:
        """The same weights under other names."""
        return StoredWeights(self.where, {rename(name): tensor for name, tensor in self._tensors.items()}, self._files)

    def beside(self, others: StoredWeights) -> StoredWeights:
        """These weights and `others`, which have other names."""
        return StoredWeights(self.where, {**self._tensors, **others._tensors}, (*self._files, *others._files))

    def changed(self, change: Callable[[Mapping[str, StoredTensor]], Mapping[str, StoredTensor]]) -> StoredWeights:
        """The weights with the tensors that `change` makes of these."""
        return StoredWeights(self.where, change(self._tensors), self._files)

    def arranged(self, changes: Mapping[str, tuple[np.ndarray | None, float, float, bool]]) -> StoredWeights:
        """Only these tensors, each with the given order of rows, its values times a number plus another, or −exp of
        them. The order of row r of the stored tensor is its number in the arranged one."""
        tensors = {}
        for name, (order, factor, added, negated_exp) in changes.items():
            tensor = self._tensors[name]
            if order is not None:
                tensor = tensor.taking(np.argsort(order))
            if factor != 1 or added or negated_exp:  # not so the tensors of thousands of experts
                tensor = replace(tensor, factor=factor * tensor.factor, added=added, negated_exp=negated_exp)
            tensors[name] = tensor
        return StoredWeights(self.where, tensors, self._files)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _convert(tensor: StoredTensor, out: np.ndarray, first: int) -> None:
    """Convert rows of the tensor, from `first` on, into `out`, slab by slab."""
    columns = tensor.columns
    values = out.reshape(out.size // max(1, columns), columns)
    step = max(1, _SLAB // max(1, columns))
    for start in range(0, len(values), step):
        part = values[start : start + step]
        rows = slice(first + start, first + start + len(part))
        part[...] = _values(tensor.raw(rows).reshape(-1), tensor.dtype).reshape(part.shape)
        if tensor.negated_exp:
            np.negative(np.exp(part, out=part), out=part)
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
