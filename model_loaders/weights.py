"""Where weights come from, and what a model needs of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Protocol

import numpy as np

from model_loaders.config import ModelConfig
from model_loaders.errors import LoadError
from model_loaders.tensors import PLAIN, READABLE, StoredWeights, can_dequantize

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_HARMLESS = ("rotary_emb.inv_freq",)  # derived values that old checkpoints store beside the weights
_LISTED = 3  # names shown in an error before "and N more"


class WeightSource(Protocol):
    """Tensors under their Hugging Face names, matrices as (out, in); the head is absent where it is the embedding."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_dtype(self, name: str) -> str:
        """How the file stores it, in the file format's own words: "F32", "BF16", "Q4_1"."""

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Converts the tensor into `out`: float32, C-contiguous, of the tensor's shape. Takes a few MB beside it.

        Raises ValueError for an `out` of another shape or type.
        """

    def close(self) -> None:
        """Closes the files; nothing can be read afterwards."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model with its shape."""
    e, f, d = config.hidden_size, config.ffn_size, config.head_dim
    q, kv = config.heads * d, config.kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, e), FINAL_NORM: (e,)}
    if not config.tied_head:
        shapes[HEAD] = (config.vocab_size, e)
    projections = {
        "self_attn.q_proj": (q, e, config.qkv_bias),
        "self_attn.k_proj": (kv, e, config.qkv_bias),
        "self_attn.v_proj": (kv, e, config.qkv_bias),
        "self_attn.o_proj": (e, q, config.out_bias),
        "mlp.gate_proj": (f, e, config.mlp_bias),
        "mlp.up_proj": (f, e, config.mlp_bias),
        "mlp.down_proj": (e, f, config.mlp_bias),
    }
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (e,)
        shapes[prefix + "post_attention_layernorm.weight"] = (e,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (d,)
            shapes[prefix + "self_attn.k_norm.weight"] = (d,)
        for name, (rows, columns, bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def fit(config: ModelConfig, weights: StoredWeights) -> tuple[ModelConfig, StoredWeights]:
    """Checks that the files hold exactly the model that `config` describes, and keeps only its tensors.

    A missing output head makes the head tied. Raises LoadError for a tensor that is missing, of another shape, in a
    type that cannot be read, or inside a layer but unknown to the family (it would silently not take part).
    """
    if HEAD not in weights.names():
        config = replace(config, tied_head=True)
    expected = expected_shapes(config)
    if missing := [name for name in expected if name not in weights.names()]:
        listed = ", ".join(weights.label(name) for name in missing[:_LISTED])
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise LoadError(
            f"{weights.where} lacks the tensor {listed}{more}, which a {config.family} model with {config.layers} "
            "layers has; download the model completely."
        )
    for name, shape in expected.items():
        _check(weights, name, shape)
    for name in sorted(weights.names() - expected.keys()):
        if name.startswith("model.layers.") and not name.endswith(_HARMLESS) and _layer(name) < config.layers:
            raise LoadError(
                f"{weights.where} has the tensor {weights.label(name)!r}, which a {config.family} model with this "
                "configuration does not have; use a plain checkpoint of a supported model."
            )
    return config, weights.only(expected)


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
