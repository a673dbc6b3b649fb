"""A layer of an encoder: attention of each text to its own rows, and a network. Each adds its result to the residual.

In BERT's layers a norm of the sum follows; EmbeddingGemma's have the norms of a decoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polarlm.engine.backends.kv import PreparedTransform
from polarlm.engine.backends.ops import Array, EncoderOps, Ops
from polarlm.engine.model.layers import Eps, add_projected, norm_of
from polarlm.engine.model.layers.gated_mlp import GatedMLP, GatedMLPWeights
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
        eps: Eps,
        weights: LayerWeights,
        transform: PreparedTransform,
    ) -> None:
        assert isinstance(layer.mixer, config.Attention)
        assert isinstance(layer.ffn, config.GatedMLP)
        assert isinstance(weights.ffn, GatedMLPWeights)
        self._ops, self._of_encoders, self._shape, self._transform = ops, of_encoders, layer.mixer, transform
        self._attention = own = weights.mixer
        self._norm, self._post_norm = norm_of(own.norm, eps.before), norm_of(own.post_norm, eps.after)
        self._qk_norms = None if own.q_norm is None else (own.q_norm, own.k_norm, eps.before)
        self._network: _SummedNetwork | GatedMLP
        self._sum_norm = None
        if layer.norms == "sums":
            self._sum_norm, self._post_norm = (own.post_norm, own.post_norm_bias, eps.after), None
            self._network = _SummedNetwork(ops, of_encoders, layer.ffn.activation, eps, weights.ffn)
        else:
            self._network = GatedMLP(ops, layer.ffn, eps, weights.ffn)

    def compute(self, x: Array, rope: tuple[Array, Array], lengths: Sequence[int]) -> None:
        """Compute the layer for x (T, E), the rows of texts of these lengths, in place. rope: cos and sin (T, D/2)."""
        ops, of_encoders, shape = self._ops, self._of_encoders, self._shape
        heads, dim = shape.heads + 2 * shape.kv_heads, shape.head_dim
        turned = None if shape.rope is None and self._qk_norms is None else rope
        qkv = ops.linear(x, self._attention.qkv, norm=self._norm).reshape(len(x), heads, dim)
        mixed = of_encoders.self_attention(
            qkv, turned, self._transform, lengths, shape.score_scale, shape.window, self._qk_norms
        )
        mixed = mixed.reshape(len(x), shape.heads * dim)
        add_projected(ops, x, mixed, self._attention.out, None, self._post_norm, recorded=False)
        if self._sum_norm is not None:
            of_encoders.layer_norm(x, self._sum_norm)
        self._network.add(x, adapters=None, recorded=False)


class _SummedNetwork:
    """The network of a layer, and the norm of the sum of its input and its result."""

    def __init__(self, ops: Ops, of_encoders: EncoderOps, activation: str, eps: Eps, weights: GatedMLPWeights) -> None:
        self._ops, self._of_encoders, self._activation, self._weights = ops, of_encoders, activation, weights
        self._norm = weights.post_norm, weights.post_norm_bias, eps.after

    def add(self, x: Array, *, adapters: None, recorded: bool) -> None:
        """As `GatedMLP.add`; then norm x."""
        ops, w = self._ops, self._weights
        y = ops.linear(x, w.gate_up, activation=self._activation, then=w.down, recorded=recorded)
        ops.linear(y, w.down, residual=x, recorded=recorded)
        self._of_encoders.layer_norm(x, self._norm)
