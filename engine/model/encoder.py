"""The forward pass of an encoder: the tokens of texts to their last hidden states. Nothing of them is kept.

Letters: T rows, E hidden size, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.kv import HeadTransform
from polarlm.engine.backends.ops import PLAIN, Array, Fusion
from polarlm.engine.errors import EngineError
from polarlm.engine.model.forward import ModelWeights, Transformer, table_rows
from polarlm.engine.model.layers import Eps
from polarlm.engine.model.layers.encoder import EncoderLayer
from polarlm.engine.sampling.sample import NOT_FINITE
from polarlm.model_loaders.config import Attention


class Encoder(Transformer):
    """A model whose tokens see later ones. Its store holds nothing, and it has no logits."""

    def encode(self, texts: Sequence[Sequence[int]], seconds: Sequence[int] | None = None) -> Array:
        """Return the last hidden states (T, E) of the tokens of all `texts`, in order.

        seconds: for each text, the place from which on its tokens have the second type; None: none has it. All rows go
        through a product together; a row sees the rows of its text.
        """
        lengths = [len(text) for text in texts]
        places = np.concatenate([np.arange(length) for length in lengths])
        types = np.zeros_like(places) if seconds is None else (places >= np.repeat(seconds, lengths)).astype(np.int64)
        x = self._inputs(np.concatenate(texts), places, types)
        ropes = [tuple(map(self.ops.to_device, table)) for table in self._ropes.tables(places)]
        for number, layer in enumerate(self._encoder_layers):
            layer.compute(x, self._ropes.layer_table(number, ropes), lengths)
        if self.weights.norm is not None:
            if self.config.centred:
                self.ops.centre(x)
            self.ops.rms_norm(x, (self.weights.norm, self.config.norm_eps))
        return x

    def relevance(self, hidden: Array) -> float:
        """Return the logit that the second text of a pair is relevant for the first. hidden (T, E): the pair's."""
        ops, head = self.ops, self.weights.pair_head
        assert head is not None
        pooled = hidden[:1]
        if self.config.pooled_pairs:
            pooled = ops.to_device(self.final_states(hidden).mean(axis=0, keepdims=True))
        inner = ops.linear(pooled, head.dense, PLAIN if head.norm is None else Fusion(activation="gelu"))
        if head.norm is None:
            inner = ops.to_device(np.tanh(self.final_states(inner)))
        else:
            ops.centre(inner)
            ops.rms_norm(inner, (head.norm, self.config.norm_eps))
        return float(self.final_states(ops.linear(inner, head.score))[0, 0])

    def final_states(self, hidden: Array) -> np.ndarray:
        states: np.ndarray = self.ops.to_host(hidden)
        if not np.isfinite(states).all():
            raise EngineError(NOT_FINITE, "model_damaged")
        return states

    def _inputs(self, ids: np.ndarray, places: np.ndarray, types: np.ndarray) -> Array:
        """ids (T,), the tokens at `places` of their texts, of `types` → the inputs of the first layer (T, E)."""
        ops, inputs = self.ops, self.weights.encoder_inputs
        ids = table_rows(self.weights.embedding, ids)
        if inputs is None:
            return self._embed(ops.to_device(ids))[0]
        assert ops.encoder_ops is not None
        x = ops.embed(self.weights.embedding, ops.to_device(ids))
        rows = places + self.config.first_position
        for table, at in ((inputs.positions, rows), (inputs.token_types, types)):
            if table is not None:
                with np.errstate(invalid="ignore", over="ignore"):  # damaged weights are found at the end
                    x += ops.embed(table, ops.to_device(table_rows(table, at)))
        if inputs.norm_bias is None:
            ops.centre(x)
            ops.rms_norm(x, (inputs.norm, self.config.norm_eps))
        else:
            ops.encoder_ops.layer_norm(x, (inputs.norm, inputs.norm_bias, self.config.norm_eps))
        return x

    def _transform_of(self, layer: int, attention: Attention) -> HeadTransform:
        return HeadTransform(attention.kv_heads)

    def _make_layers(self, weights: ModelWeights) -> None:
        encoder_ops, eps = self.ops.encoder_ops, Eps(self.config.norm_eps, self.config.norm_eps)
        assert encoder_ops is not None
        self._encoder_layers = [
            EncoderLayer(self.ops, encoder_ops, layer, eps, w, self._transforms[number], centred=self.config.centred)
            for number, (layer, w) in enumerate(zip(self.config.layers, weights.layers, strict=True))
        ]
