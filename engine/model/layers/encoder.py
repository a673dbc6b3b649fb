"""A layer of an encoder: attention of each text to all of its rows, and a network.

Each adds its result to the residual, and a norm of the sum follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polarlm.engine.backends.encoder_ops import EncoderOps
from polarlm.engine.backends.kv import PreparedTransform
from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.model.layers.gated_mlp import GatedMLPWeights
from polarlm.engine.model.layers.kinds import LayerWeights
from polarlm.engine.weight_formats import Matrix
from polarlm.model_loaders import config


@dataclass(frozen=True)
class EncoderInputs:
    """What is added to the embeddings of tokens, and the norm of the sum. None for what the family does not have."""

    norm: Array  # (E,)
    norm_bias: Array  # (E,)
    positions: Matrix | None  # a row for each position
    token_types: Matrix | None  # the first row is added everywhere


class EncoderLayer:
    """One layer of an encoder."""

    def __init__(
        self,
        ops: Ops,
        of_encoders: EncoderOps,
        layer: config.Layer,
        eps: float,
        weights: LayerWeights,
        transform: PreparedTransform,
    ) -> None:
        assert isinstance(layer.mixer, config.Attention)
        assert isinstance(layer.ffn, config.GatedMLP)
        self._ops, self._of_encoders, self._shape, self._transform = ops, of_encoders, layer.mixer, transform
        assert isinstance(weights.ffn, GatedMLPWeights)
        self._activation, self._attention, self._network = layer.ffn.activation, weights.mixer, weights.ffn
        self._norms = [(one.post_norm, one.post_norm_bias, eps) for one in (weights.mixer, weights.ffn)]

    def compute(self, x: Array, rope: tuple[Array, Array], lengths: Sequence[int]) -> None:
        """Compute the layer for x (T, E), the rows of texts of these lengths, in place. rope: cos and sin (T, D/2)."""
        ops, of_encoders, shape = self._ops, self._of_encoders, self._shape
        heads, dim = shape.heads + 2 * shape.kv_heads, shape.head_dim
        qkv = ops.linear(x, self._attention.qkv).reshape(len(x), heads, dim)
        mixed = of_encoders.self_attention(qkv, rope, self._transform, lengths, shape.score_scale)
        ops.linear(mixed.reshape(len(x), shape.heads * dim), self._attention.out, residual=x)
        of_encoders.layer_norm(x, self._norms[0])
        network = self._network
        y = ops.linear(x, network.gate_up, activation=self._activation, then=network.down)
        ops.linear(y, network.down, residual=x)
        of_encoders.layer_norm(x, self._norms[1])
