"""From a file's tensors to the fused matrices of the forward pass, each tensor read once into its place.

And what tells them from those of another model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

import numpy as np

from engine.backends.ops import Array, Ops
from engine.model.forward import LayerWeights, ModelWeights
from model_loaders.config import ModelConfig
from model_loaders.weights import WeightSource, main_dtype

_SAMPLE = 1024  # values from either end of each weight matrix that tell one model from another


class _Reader:
    """Reads named tensors into float32 arrays and brings them to the device."""

    def __init__(self, ops: Ops, source: WeightSource, stored: str, progress: Callable[[int], None] | None):
        self._ops, self._source, self._stored, self._progress = ops, source, stored, progress
        self.bytes = 0

    def stacked(self, names: Sequence[str]) -> Array:
        """Tensors (rows_i, …) under each other in one array; a single name is that tensor itself."""
        shapes = [self._source.shape(name) for name in names]
        fused = np.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), np.float32)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            self._source.read_into(name, fused[row : row + shape[0]])
            row += shape[0]
            if self._progress:
                self._progress(4 * int(np.prod(shape)))
        weight = self._ops.weight(fused, self._stored)
        self.bytes += weight.nbytes
        return weight

    def optional(self, names: Sequence[str], present: bool) -> Array | None:
        return self.stacked(names) if present else None


def load_weights(
    ops: Ops, config: ModelConfig, source: WeightSource, progress: Callable[[int], None] | None = None
) -> ModelWeights:
    """Every weight on the device. `progress` is told the float32 bytes that have been read since its last call."""
    read = _Reader(ops, source, main_dtype(source), progress)
    embedding = read.stacked(["model.embed_tokens.weight"])
    layers = [_layer(read, config, f"model.layers.{i}.") for i in range(config.layers)]
    norm = read.stacked(["model.norm.weight"])
    head = embedding if config.tied_head else read.stacked(["lm_head.weight"])
    return ModelWeights(embedding, layers, norm, head, read.bytes)


def weight_count(source: WeightSource) -> int:
    """Values of all tensors."""
    return sum(int(np.prod(source.shape(name))) for name in source.names())


def fingerprint(ops: Ops, config: ModelConfig, weights: ModelWeights) -> str:
    """What tells this model from others, as a digest: its shape and arithmetic, and samples of its weights.

    Of the weights as they are on the device: where those are narrower than the file's, it is another model.
    """
    digest = hashlib.sha256(repr(config).encode())
    for name, tensor in _tensors(weights):
        digest.update(repr((name, tuple(tensor.shape))).encode())
        flat = tensor.reshape(-1)
        for sample in (flat[:_SAMPLE], flat[-_SAMPLE:]):
            digest.update(np.asarray(ops.to_host(sample), np.float32).tobytes())
    return digest.hexdigest()


def _tensors(weights: ModelWeights) -> Iterator[tuple[str, Array]]:
    yield from (("embedding", weights.embedding), ("norm", weights.norm), ("head", weights.head))
    for number, layer in enumerate(weights.layers):
        for field in fields(LayerWeights):
            if (tensor := getattr(layer, field.name)) is not None:
                yield f"{number}.{field.name}", tensor


def _layer(read: _Reader, config: ModelConfig, prefix: str) -> LayerWeights:
    qkv = [f"{prefix}self_attn.{x}_proj" for x in "qkv"]
    gate_up = [f"{prefix}mlp.{x}_proj" for x in ("gate", "up")]
    out, down = f"{prefix}self_attn.o_proj", f"{prefix}mlp.down_proj"

    def weights(names: Sequence[str]) -> list[str]:
        return [f"{name}.weight" for name in names]

    def biases(names: Sequence[str]) -> list[str]:
        return [f"{name}.bias" for name in names]

    return LayerWeights(
        attention_norm=read.stacked([f"{prefix}input_layernorm.weight"]),
        qkv=read.stacked(weights(qkv)),
        qkv_bias=read.optional(biases(qkv), config.qkv_bias),
        q_norm=read.optional([f"{prefix}self_attn.q_norm.weight"], config.qk_norm),
        k_norm=read.optional([f"{prefix}self_attn.k_norm.weight"], config.qk_norm),
        out=read.stacked(weights([out])),
        out_bias=read.optional(biases([out]), config.out_bias),
        ffn_norm=read.stacked([f"{prefix}post_attention_layernorm.weight"]),
        gate_up=read.stacked(weights(gate_up)),
        gate_up_bias=read.optional(biases(gate_up), config.mlp_bias),
        down=read.stacked(weights([down])),
        down_bias=read.optional(biases([down]), config.mlp_bias),
    )
