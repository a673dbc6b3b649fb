"""The interface of weight files, and the check that they hold a model's tensors."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np

from polarlm.model_loaders import families
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.files.ggml_types import OF_SAFETENSORS
from polarlm.model_loaders.files.tensor_table import TensorSpec, unused_names
from polarlm.model_loaders.files.tensors import PLAIN, READABLE, StoredTensor, StoredWeights, can_dequantize

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_HARMLESS = ("rotary_emb.inv_freq",)  # derived values that old checkpoints store with the weights
_MOST_NAMES = 3  # names shown in an error before "and N more"


class WeightSource(Protocol):
    """Tensors under their Hugging Face names, matrices as (out, in); a head that is the embedding is absent."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_dtype(self, name: str) -> str:
        """The type of the stored values, by the file format's name: "F32", "BF16", "Q4_1"."""

    def read_raw(self, name: str, rows: slice) -> np.ndarray:
        """The bytes of a matrix's rows, start to stop: uint8 (rows, bytes of a row), C-contiguous.

        Raises ValueError for a tensor whose values change when it is loaded.
        """

    def expect(self, name: str) -> None:
        """Lets the system read a tensor into memory now, since it will be read soon."""

    def read_into(self, name: str, out: np.ndarray, rows: slice = slice(None)) -> None:
        """Converts rows of the tensor into `out`: float32, C-contiguous, of their shape. Takes a few MB of scratch.

        Raises ValueError for an `out` of another shape or type.
        """

    def files(self) -> frozenset[Path]:
        """The files that hold the tensors."""

    def close(self) -> None:
        """Closes the files; nothing can be read afterwards."""


def fit(
    config: ModelConfig, weights: StoredWeights, *, interleaved: bool = False, is_gguf: bool = False
) -> tuple[ModelConfig, StoredWeights]:
    """`config` completed from the files, and the weights of exactly its tensors.

    interleaved: whether RoPE's pairs are neighbouring channels in the file. is_gguf: whether values in the file have
    `TensorSpec.offset` already, and tensors llama.cpp's names. Without an output head, the head is the embedding.
    Raises LoadError as `complete` does, and for a tensor that belongs to a layer but is unknown to the family (it would
    silently be ignored).
    """
    if HEAD not in weights.tensors:
        config = replace(config, tied_head=True)
    table = families.tensors(config)
    if config.mtp and not any(spec.name in weights.tensors for spec in table.layers[-1].get("mtp_in", ())):
        raise LoadError(f"{weights.where} has no layer for spec_type=mtp; choose another spec_type.")
    expected = {spec.name: spec for spec in table.specs()}
    owner = f"a {config.family} model with {len(config.layers)} layers"
    file_tensors = complete(weights, expected.values(), owner, is_gguf=is_gguf)
    sources = {spec.row_parts.source for spec in expected.values() if spec.row_parts is not None}
    for name in sorted(file_tensors.keys() - expected.keys() - sources - unused_names(config)):
        if name.startswith("model.layers.") and not name.endswith(_HARMLESS) and _layer(name) < len(config.layers):
            raise LoadError(
                f"{weights.where} has the tensor {file_tensors[name].label!r}, which a {config.family} model with this "
                "configuration does not have; use a plain checkpoint of a supported model."
            )
    if config.rounded_scale:
        config = replace(config, embedding_scale=as_stored(config.embedding_scale, file_tensors[EMBEDDING].dtype))
    tensors = {name: arrange(file_tensors[name], spec, interleaved, is_gguf) for name, spec in expected.items()}
    return config, StoredWeights(weights.where, tensors, weights.open_files)


def is_needed(config: ModelConfig, name: str) -> bool:
    """Whether a model cannot be without the tensor that its safetensors files call `name`."""
    name = families.table_name(config, name)
    if name.startswith("model.layers."):
        return _layer(name) < len(config.layers) and not name.endswith(_HARMLESS) and name not in unused_names(config)
    return any(name == spec.name for spec in families.tensors(config).specs())


def complete(
    weights: StoredWeights, specs: Collection[TensorSpec], owner: str, *, is_gguf: bool
) -> dict[str, StoredTensor]:
    """All tensors of files, and those of `specs` that are made of others.

    owner: what has the tensors, for errors. Raises LoadError for a tensor that is missing, or has another shape or an
    unsupported type.
    """
    tensors = dict(weights.tensors)
    for spec in specs:
        if (tensor := _make_tensor(spec, tensors)) is not None:
            tensors[spec.name] = tensor
    if missing_specs := [spec for spec in specs if spec.name not in tensors]:
        in_folder = (spec.row_parts.source if spec.row_parts else spec.name for spec in missing_specs[:_MOST_NAMES])
        names = ", ".join((spec.gguf for spec in missing_specs[:_MOST_NAMES]) if is_gguf else in_folder)
        others = f" and {len(missing_specs) - _MOST_NAMES} more" if len(missing_specs) > _MOST_NAMES else ""
        raise LoadError(
            f"{weights.where} lacks the tensor {names}{others}, which {owner} has; download the model completely."
        )
    for spec in specs:
        _check(tensors[spec.name], spec.shape)
    return tensors


def _make_tensor(spec: TensorSpec, tensors: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """The tensor of a spec, made of what a file has; None if the file has no tensor to make it of."""
    if spec.is_transposed and spec.copy_of in tensors:
        return tensors[spec.copy_of].transpose()
    tensor = tensors.get(spec.copy_of, tensors.get(spec.name))
    if tensor is None and spec.row_parts is not None and (whole := tensors.get(spec.row_parts.source)) is not None:
        # One that cannot be divided stays whole, and is then refused for its shape.
        is_whole = whole.shape[0] % sum(spec.row_parts.sizes) != 0
        tensor = whole if is_whole else whole.with_rows(spec.row_parts.rows(whole.shape[0]))
        if spec.is_transposed and not is_whole:
            tensor = tensor.transpose()
    if tensor is None or not spec.flat:
        return tensor
    dims = len(spec.shape) - 1
    return replace(tensor, shape=(*tensor.shape[:dims], prod(tensor.shape[dims:])))


def arrange(tensor: StoredTensor, spec: TensorSpec, interleaved: bool, is_gguf: bool) -> StoredTensor:
    """The tensor with its rows in the order of memory, and with the values that the spec asks for."""
    order = spec.row_order(interleaved)
    if order is not None:
        tensor = tensor.with_rows(np.argsort(order))
    added, negated_exp = (0.0, False) if is_gguf else (spec.offset, spec.negated_exp)
    if spec.factor == 1 and not added and not negated_exp:  # as all tensors of thousands of experts
        return tensor
    return replace(tensor, factor=spec.factor * tensor.factor, added=added, negated_exp=negated_exp)


def as_stored(number: float, dtype: str) -> float:
    """`number` rounded to `dtype` if that is F16 or BF16, else unchanged."""
    if dtype == "BF16":  # the upper half of a float32, to the nearest
        bits = int(np.float32(number).view(np.uint32)) + 0x8000
        return float(np.uint32(bits & 0xFFFF0000).view(np.float32))
    return float(np.float16(number)) if dtype == "F16" else number


def _check(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    """Raises LoadError for a tensor of another shape, or of a type that cannot be read."""
    path, what, dtype = tensor.source.path, f"the tensor {tensor.label}", tensor.dtype
    if tensor.shape != shape:
        raise LoadError(
            f"{path}: {what} has the shape {tensor.shape}, but the configuration asks for {shape}; configuration and "
            "weights belong to different models."
        )
    if dtype in OF_SAFETENSORS:
        return  # matrices that are put together from several tensors
    readable = READABLE if len(shape) > 1 else PLAIN  # norms and biases are never quantized
    if dtype not in readable:
        raise LoadError(
            f"{path}: {what} is stored as {dtype}, which is not supported (supported: {', '.join(readable)})."
        )
    if dtype not in PLAIN and importlib.util.find_spec("gguf") is None:  # an import would take megabytes
        raise LoadError(
            f"{path} cannot be read without the Python package gguf: install it (pip install gguf), or give a folder "
            "with config.json and safetensors files."
        )
    if not can_dequantize(dtype):
        raise LoadError(
            f"{path}: {what} is stored as {dtype}, which the installed version of the Python package gguf cannot "
            "read; upgrade it (pip install --upgrade gguf)."
        )


@cache
def _layer(name: str) -> int:
    """The layer number in `model.layers.N...`; -1 if there is none."""
    number = name.split(".")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else -1


def main_dtype(weights: WeightSource) -> str:
    """The type in which most values are stored."""
    counts: Counter[str] = Counter()
    for name in weights.names():
        counts[weights.stored_dtype(name)] += prod(weights.shape(name))
    return counts.most_common(1)[0][0]
