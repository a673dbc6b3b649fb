"""A layer of an encoder: attention of each text to its own rows, and a network. Each adds its result to the residual.

In BERT's layers a norm of the sum follows; EmbeddingGemma's and ModernBERT's have the norms of a decoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polarlm.engine.backends.kv import HeadRule, PreparedTransform
from polarlm.engine.backends.ops import Array, EncoderOps, Fusion, Ops, Texts
from polarlm.engine.model.layers import Eps, LayerInputs, OutputProjection, Projection, norm_of, slot
from polarlm.engine.model.layers.experts import ExpertsWeights
from polarlm.engine.model.layers.kinds import FFNS, LayerWeights
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders import config


@dataclass(frozen=True)
class EncoderInputs:
    """What is added to the embeddings of tokens, and the norm of the sum. None for what the family does not have."""

    norm: Array = slot("embedding_norm")  # (E,)
    norm_bias: Array | None = slot("embedding_norm_bias")  # (E,)
    positions: Matrix | None = slot("positions", "matrix")  # a row for each position
    token_types: Matrix | None = slot("token_types", "matrix")  # the first row is added everywhere


@dataclass(frozen=True)
class PairHead:
    """What scores a pair of texts by one state, or the mean of all: tanh between two products, or GELU and a norm."""

    dense: Linear = slot("score_dense", "linear")  # (E, E)
    norm: Array | None = slot("score_norm")  # (E,)
    score: Linear = slot("score", "linear")  # (1, E)


class EncoderLayer:
    """One layer of an encoder."""

    def __init__(
        self,
        ops: Ops,
        encoder_ops: EncoderOps,
        layer: config.Layer,
        eps: Eps,
        weights: LayerWeights,
        transform: PreparedTransform,
        *,
        centred: bool,
    ) -> None:
        """centred: see `ModelConfig`."""
        assert isinstance(layer.mixer, config.Attention)
        assert layer.ffn is not None
        assert weights.ffn is not None
        self._ops, self._encoder_ops, self._shape, self._centred = ops, encoder_ops, layer.mixer, centred
        w, post_norm = weights.mixer, norm_of(weights.mixer.post_norm, eps.after)
        self._heads = HeadRule(transform, None if w.q_norm is None else (w.q_norm, w.k_norm, eps.before))
        self._sum_norms, network = None, weights.ffn
        if layer.norms == "sums":
            self._sum_norms = [(part.post_norm, part.post_norm_bias, eps.after) for part in (w, network)]
            post_norm, network = None, replace(network, post_norm=None)
        self._centres_first = centred and w.norm is not None
        self._qkv = Projection(ops, w.qkv, Fusion(norm_of(w.norm, eps.before)))
        self._out = OutputProjection(ops, w.out, post_norm)
        self._network = FFNS[type(layer.ffn)](ops, layer.ffn, eps, network)
        self._sum_bias = network.sum_bias if isinstance(network, ExpertsWeights) else None

    def compute(self, x: Array, rope: tuple[Array, ...], lengths: Sequence[int]) -> None:
        """Compute the layer for x (T, E), the rows of texts of these lengths, in place. rope: cos and sin (T, D/2)."""
        encoder_ops, shape = self._encoder_ops, self._shape
        heads, dim = shape.heads + 2 * shape.kv_heads, shape.head_dim
        if self._centres_first:
            self._ops.centre(x)
        turned = None if shape.rope is None and self._heads.norms is None else rope
        qkv = self._qkv(x, None).reshape(len(x), heads, dim)
        mixed = encoder_ops.self_attention(qkv, turned, self._heads, Texts(lengths, shape.window), shape.score_scale)
        mixed = mixed.reshape(len(x), shape.heads * dim)
        self._out.add(x, mixed, None)
        if self._sum_norms is not None:
            encoder_ops.layer_norm(x, self._sum_norms[0])
        if self._centred:
            self._ops.centre(x)
        self._network.add(x, LayerInputs())
        if self._sum_bias is not None:
            x += self._sum_bias
        if self._sum_norms is not None:
            encoder_ops.layer_norm(x, self._sum_norms[1])
