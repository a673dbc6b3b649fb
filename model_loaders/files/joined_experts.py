"""Tensors of all experts of a layer, as some safetensors have them, taken apart into one matrix for each expert.

In gpt-oss's files a matrix is transposed, or in MXFP4 with its scales in a tensor of their own. Rows of gate and up
projection alternate. In others the matrices of the experts follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from polarlm.model_loaders.config import Experts, ModelConfig, is_gated
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.files.ggml_types import size_of
from polarlm.model_loaders.files.tensors import PLAIN, StoredTensor

_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)  # the lower half of each byte
SUFFIXES = ("", "_bias", "_blocks", "_scales")  # suffixes of tensors that hold all experts
_BLOCK, _CODES = 32, 16  # values of a block of MXFP4, and bytes of their codes


@dataclass(frozen=True)
class _Columns(StoredTensor):
    """A matrix whose rows are columns of the stored one: column `first`, and every `step`-th after it."""

    first: int = 0
    step: int = 1
    width: int = 0  # of the stored matrix; 0: the columns of this one are all

    def raw(self, rows: slice) -> np.ndarray:
        item, width = size_of(self.dtype, 1), self.width or self.shape[0] * self.step
        matrix = self.source.whole(self.offset, self.columns * width * item).reshape(self.columns, width, item)
        part = matrix[:, self.first + rows.start * self.step : self.first + rows.stop * self.step : self.step]
        if rows.stop == self.shape[0]:
            self.source.forget()
        return np.ascontiguousarray(part.swapaxes(0, 1)).reshape(rows.stop - rows.start, self.row_bytes)


@dataclass(frozen=True)
class _Blocks(StoredTensor):
    """A matrix in MXFP4 whose rows are every `step`-th of the stored ones, from row `first` on.

    `offset` is the offset of the codes, two neighbouring values in a byte; the scales begin at `scales_at` in `scales`.
    """

    scales: StoredTensor | None = None
    scales_at: int = 0
    first: int = 0
    step: int = 1

    def raw(self, rows: slice) -> np.ndarray:
        """As in GGUF: a block is its scale and 16 bytes, and byte j has the values j and j + 16."""
        assert self.scales is not None
        count, blocks = rows.stop - rows.start, self.columns // _BLOCK
        raw = np.empty((count, blocks, 1 + _CODES), np.uint8)
        raw[..., 0] = self._read_rows(self.scales, self.scales_at, rows, blocks)
        codes = self._read_rows(self, self.offset, rows, blocks * _CODES).reshape(count, blocks, _CODES)
        halves = np.ascontiguousarray(codes).view(np.uint64)  # eight bytes at a time
        first_values, last_values = halves[..., :1], halves[..., 1:]
        raw[..., 1::2] = (first_values & _LOW | (last_values & _LOW) << np.uint64(4)).view(np.uint8)
        raw[..., 2::2] = (first_values >> np.uint64(4) & _LOW | last_values & ~_LOW).view(np.uint8)
        return raw.reshape(count, self.row_bytes)

    def _read_rows(self, tensor: StoredTensor, at: int, rows: slice, width: int) -> np.ndarray:
        """Bytes of these rows, uint8 (rows, width)."""
        start, count = rows.start * self.step, (rows.stop - rows.start) * self.step
        data = tensor.source.view(at + start * width, count * width).reshape(count, width)
        return data[self.first :: self.step]


def split_experts(
    tensors: Mapping[str, StoredTensor], name: str, names: tuple[str, ...], count: int, size: int, columns: int
) -> dict[str, StoredTensor]:
    """The tensors of `count` experts in the tensors that `name` begins, by the names that `names` make of their number.

    names: with {} for the number of the expert; rows of several alternate. size: rows of a matrix. columns: of it.
    Raises LoadError for a tensor of another shape or type, and if one of the two of MXFP4 is missing.
    """
    step, rows = len(names), size * len(names)
    parts = [(expert, first, each.format(expert)) for expert in range(count) for first, each in enumerate(names)]
    tensors_by_name: dict[str, StoredTensor] = {}
    kinds: list[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = [
        ("", ".weight", (size, columns), (count, columns, rows)),
        ("_bias", ".bias", (size,), (count, rows)),
    ]
    for suffix, kind, shape, tensor in kinds:
        if whole := tensors.get(name + suffix):
            _check(whole, tensor, PLAIN)
            for expert, first, each in parts:
                at = whole.offset + expert * size_of(whole.dtype, prod(tensor[1:]))
                tensors_by_name[each + kind] = _Columns(
                    whole.source, whole.label, shape, whole.dtype, at, first=first, step=step
                )
    codes, scales = tensors.get(f"{name}_blocks"), tensors.get(f"{name}_scales")
    if codes is None and scales is None:
        return tensors_by_name
    if codes is None or scales is None:
        place = next(one for one in (codes, scales) if one is not None).source.path
        lacking = f"{name}_{'blocks' if codes is None else 'scales'}"
        raise LoadError(f"{place}: the model lacks {lacking}; download it completely.")
    if columns % _BLOCK:
        raise LoadError(f"{codes.source.path}: {codes.label} has rows of {columns} values, not of blocks of {_BLOCK}.")
    blocks = columns // _BLOCK
    _check(codes, (count, rows, blocks, _CODES), ("U8",))
    _check(scales, (count, rows, blocks), ("U8",))
    shape = size, columns
    for expert, first, each in parts:
        at, scales_at = (t.offset + expert * rows * w for t, w in ((codes, blocks * _CODES), (scales, blocks)))
        tensors_by_name[f"{each}.weight"] = _Blocks(
            codes.source, codes.label, shape, "MXFP4", at, scales=scales, scales_at=scales_at, first=first, step=step
        )
    return tensors_by_name


GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"


def split_layers(
    config: ModelConfig,
    file_tensors: Mapping[str, StoredTensor],
    prefix: str,
    gate_up: tuple[str, tuple[str, ...]],
    down: tuple[str, tuple[str, ...]],
    experts: str = "",
) -> dict[str, StoredTensor]:
    """The tensors of a model whose files have the matrices of a layer's experts one after another in two tensors.

    Both may be matrices, with the experts' rows one after another. prefix: what their names have in common after a
    layer's number. gate_up, down: the rest of the name of a tensor, and the names of the matrices that an expert has
    there, one after another. experts: what the names of an expert's matrices have between `prefix` and its number.
    They may be transposed. Raises LoadError for a tensor of another shape or type.
    """
    size, tensors = config.hidden_size, dict(file_tensors)
    for layer, ffn in enumerate(one.ffn for one in config.layers):
        if not isinstance(ffn, Experts):
            continue
        layer_prefix = f"model.layers.{layer}.{prefix}"
        up = ffn.size * (1 + is_gated(ffn.activation))
        for (label, names), (rows, columns) in ((gate_up, (up, size)), (down, (size, ffn.size))):
            whole = tensors.pop(layer_prefix + label, None)
            if whole is None:
                continue
            if len(whole.shape) == 2:
                whole = replace(whole, shape=(ffn.count, whole.shape[0] // ffn.count, whole.shape[1]))
            transposed = whole.shape == (ffn.count, columns, rows) and rows != columns
            if not transposed:
                _check(whole, (ffn.count, rows, columns), PLAIN)
            shape = rows // len(names), columns
            for number in range(ffn.count * len(names)):
                expert, part = divmod(number, len(names))
                name = f"{layer_prefix}{experts}{expert}.{names[part]}.weight"
                if transposed:
                    at, first = whole.offset + expert * size_of(whole.dtype, rows * columns), part * shape[0]
                    tensors[name] = _Columns(whole.source, whole.label, shape, whole.dtype, at, first=first, width=rows)
                    continue
                offset = whole.offset + number * size_of(whole.dtype, shape[0] * columns)
                tensors[name] = replace(whole, shape=shape, offset=offset)
    return tensors


def _check(tensor: StoredTensor, shape: tuple[int, ...], types: tuple[str, ...]) -> None:
    if tensor.shape != shape or tensor.dtype not in types:
        raise LoadError(
            f"{tensor.source.path}: the tensor {tensor.label} is {tensor.dtype} {tensor.shape}, but the configuration "
            f"asks for {' or '.join(types)} {shape}; configuration and weights belong to different models."
        )
