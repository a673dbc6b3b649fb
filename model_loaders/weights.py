"""Where weights come from, and what a model needs of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Protocol

import numpy as np

from model_loaders import families
from model_loaders.config import ModelConfig
from model_loaders.errors import LoadError
from model_loaders.tensor_table import row_order
from model_loaders.tensors import PLAIN, READABLE, StoredWeights, can_dequantize

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_HARMLESS = ("rotary_emb.inv_freq",)  # derived values that old checkpoints store beside the weights
_LISTED = 3  # names shown in an error before "and N more"


class WeightSource(Protocol):
    """Tensors under their Hugging Face names, matrices as (out, in); the head is absent where it is the embedding."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_dtype(self, name: str) -> str:
        """How the file stores it, in the file format's own words: "F32", "BF16", "Q4_1"."""

    def read_raw(self, name: str, rows: slice) -> np.ndarray:
        """Rows start to stop of a matrix as the file has them: uint8 (rows, bytes of a row), C-contiguous.

        Where it can be, a view of the mapped file. Raises ValueError for a tensor that the file has otherwise.
        """

    def release(self, name: str, rows: slice) -> None:
        """Lets the system drop from memory what `read_raw` gave of these rows; they can be read again."""

    def read_into(self, name: str, out: np.ndarray, rows: slice = slice(None)) -> None:
        """Converts rows of the tensor into `out`: float32, C-contiguous, of their shape. Takes a few MB beside it.

        Raises ValueError for an `out` of another shape or type.
        """

    def close(self) -> None:
        """Closes the files; nothing can be read afterwards."""


def fit(
    config: ModelConfig, weights: StoredWeights, *, interleaved: bool = False, offsets: bool = True
) -> tuple[ModelConfig, StoredWeights]:
    """Checks that the files hold exactly the model that `config` describes, and keeps only its tensors.

    interleaved: the file has the pairs of channels that RoPE rotates side by side. offsets: it leaves out of weights
    what `TensorSpec.offset` says. A missing output head makes the head tied, and embeddings are scaled as precisely as
    they are stored. Raises LoadError for a tensor that is missing, of another shape, in a type that cannot be read, or
    inside a layer but unknown to the family (it would silently not take part).
    """
    if HEAD not in weights.names():
        config = replace(config, tied_head=True)
    expected = {spec.name: spec for spec in families.tensors(config).specs()}
    if missing := [name for name in expected if name not in weights.names()]:
        listed = ", ".join(weights.label(name) for name in missing[:_LISTED])
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise LoadError(
            f"{weights.where} lacks the tensor {listed}{more}, which a {config.family} model with {config.layers} "
            "layers has; download the model completely."
        )
    for name, spec in expected.items():
        _check(weights, name, spec.shape)
    for name in sorted(weights.names() - expected.keys()):
        if name.startswith("model.layers.") and not name.endswith(_HARMLESS) and _layer(name) < config.layers:
            raise LoadError(
                f"{weights.where} has the tensor {weights.label(name)!r}, which a {config.family} model with this "
                "configuration does not have; use a plain checkpoint of a supported model."
            )
    if config.embedding_scale != 1:
        config = replace(config, embedding_scale=as_stored(config.embedding_scale, weights.stored_dtype(EMBEDDING)))
    changes = {
        name: (row_order(spec, config, interleaved), spec.offset if offsets else 0.0) for name, spec in expected.items()
    }
    return config, weights.arranged(changes)


def as_stored(number: float, dtype: str) -> float:
    """The number as F16 or BF16 has it; other types do not round it."""
    if dtype == "BF16":  # the upper half of a float32, to the nearest
        bits = int(np.float32(number).view(np.uint32)) + 0x8000
        return float(np.uint32(bits & 0xFFFF0000).view(np.float32))
    return float(np.float16(number)) if dtype == "F16" else number


def _check(weights: StoredWeights, name: str, shape: tuple[int, ...]) -> None:
    if weights.shape(name) != shape:
        raise LoadError(
            f"{weights.file(name)}: the tensor {weights.label(name)} has the shape {weights.shape(name)}, "
            f"but the configuration asks for {shape}; configuration and weights belong to different models."
        )
    dtype = weights.stored_dtype(name)
    readable = READABLE if len(shape) > 1 else PLAIN  # nobody quantizes norms and biases
    if dtype not in readable:
        raise LoadError(
            f"{weights.file(name)}: the tensor {weights.label(name)} is stored as {dtype}, which is not supported "
            f"(supported: {', '.join(readable)})."
        )
    if not can_dequantize(dtype):
        raise LoadError(
            f"{weights.file(name)}: the tensor {weights.label(name)} is stored as {dtype}, which the installed version "
            "of the Python package gguf cannot read; upgrade it (pip install --upgrade gguf)."
        )


def _layer(name: str) -> int:
    """The layer number in `model.layers.N...`; -1, which is below every count, where there is none."""
    number = name.split(".")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else -1


def main_dtype(weights: WeightSource) -> str:
    """The type that most of the values are stored in."""
    counts: Counter[str] = Counter()
    for name in weights.names():
        counts[weights.stored_dtype(name)] += prod(weights.shape(name))
    return counts.most_common(1)[0][0]
