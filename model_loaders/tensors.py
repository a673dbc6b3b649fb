"""Tensors in files, and their conversion to float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from model_loaders.file_bytes import FileBytes

_PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # of one value
PLAIN = tuple(_PLAIN_BYTES)
_LATTICE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")
_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4")
READABLE = (*PLAIN, *_BLOCKS, *_LATTICE)
_SLAB = 1 << 18  # values converted at a time: the temporaries stay in the cache


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies, and as what."""

    source: FileBytes
    label: str  # the name in the file
    shape: tuple[int, ...]
    dtype: str
    offset: int  # from the start of the file
    row_order: np.ndarray | None = None  # int64 (rows,): row r of the file is row row_order[r] of the tensor
    added: float = 0.0  # to every value


class StoredWeights:
    """The WeightSource of every file format: a table of tensors by their Hugging Face names.

    `where` is what the user gave: the folder or the file.
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

    def read_into(self, name: str, out: np.ndarray) -> None:
        tensor = self._tensors[name]
        if out.shape != tensor.shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(f"{name} needs a C-contiguous float32 array {tensor.shape}, got {out.dtype} {out.shape}")
        _convert(tensor, out)

    def renamed(self, rename: Callable[[str], str]) -> StoredWeights:
        """The same files, with other names for the tensors."""
        return StoredWeights(self.where, {rename(name): tensor for name, tensor in self._tensors.items()}, self._files)

    def arranged(self, changes: Mapping[str, tuple[np.ndarray | None, float]]) -> StoredWeights:
        """The same files, with these tensors alone: each in another order of rows, and with a number added to it."""
        tensors = {
            name: replace(self._tensors[name], row_order=order, added=added) for name, (order, added) in changes.items()
        }
        return StoredWeights(self.where, tensors, self._files)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _convert(tensor: StoredTensor, out: np.ndarray) -> None:
    """Slab by slab of whole rows; a vector counts as rows of one value, so that it is cut and reordered alike."""
    columns = out.shape[-1] if out.ndim > 1 else 1
    rows = out.reshape(out.size // max(1, columns), columns)
    block, block_bytes = _block(tensor.dtype)
    row_bytes = columns // block * block_bytes
    step = max(1, _SLAB // max(1, columns))
    for start in range(0, len(rows), step):
        stop = min(start + step, len(rows))
        offset, count = tensor.offset + start * row_bytes, (stop - start) * row_bytes
        values = _values(tensor.source.view(offset, count), tensor.dtype).reshape(stop - start, columns)
        if tensor.row_order is None:
            rows[start:stop] = values
        else:
            rows[tensor.row_order[start:stop]] = values
        if tensor.added:
            rows[start:stop] += np.float32(tensor.added)
        del values  # may be a view of the mapping
        tensor.source.release(offset, count)


def can_dequantize(dtype: str) -> bool:
    """Whether the installed `gguf` converts this type of READABLE; its older versions lack some."""
    if dtype in PLAIN:
        return True
    try:
        _values(np.zeros(_block(dtype)[1], np.uint8), dtype)
    except NotImplementedError:
        return False
    return True


def _block(dtype: str) -> tuple[int, int]:
    """Values of a block of this type, and its bytes."""
    if dtype in _PLAIN_BYTES:
        return 1, _PLAIN_BYTES[dtype]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # only a GGUF file has blocks

    return GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]


def _values(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Stored bytes, uint8 (n,), as a flat float array; float16 is left to the assignment."""
    if dtype == "F32":
        return raw.view("<f4")
    if dtype == "F16":
        return raw.view("<f2")
    if dtype == "BF16":  # the upper half of a float32
        return np.left_shift(raw.view("<u2"), 16, dtype=np.uint32).view(np.float32)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # a damaged scale makes infinities, and no warning helps the user
        return dequantize(raw.reshape(1, -1), GGMLQuantizationType[dtype])[0]
