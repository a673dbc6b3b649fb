"""An EAGLE-3 head: a layer after a model's last one, which guesses the token after the next one (arXiv:2503.01840).

It differs from the model's own (`mtp.py`) in what its rows are made of. The hidden state before a token is the sum of
products with the model's hidden states at several depths; before a drafted token it is what the layer has made of the
row before. Attention reads the embedding and that state side by side, and the state goes through as the residual.

A sequence's first token has no row in the head: there is no state before it. Here it has one of zeros, so that the row
of token i is at position i; its value is 0, and its score, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polarlm.engine.backends.ops import Array, Fusion, Ops
from polarlm.engine.model.decoder import Inputs, MtpInputs
from polarlm.engine.model.layers.kinds import HeadWeights
from polarlm.engine.model.layers.mtp import JoinedStates, MtpLayer, MtpRow
from polarlm.engine.sampling.sample import Sampled, greedy
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders.config import ModelConfig


class Eagle3Layer(MtpLayer):
    """The layer of `ModelConfig.eagle3`, on the one device of the model."""

    def __init__(
        self, ops: Ops, config: ModelConfig, weights: HeadWeights, last_norm: Array, head: Linear, *others: Any
    ) -> None:
        assert config.eagle3 is not None
        super().__init__(ops, config, weights, last_norm, weights.head or head, *others)
        one = config.eagle3
        self._size, eps = one.model.hidden_size, one.model.norm_eps
        self._embedding_norm, self._hidden_norm = (weights.embedding_norm, eps), (weights.hidden_norm, eps)
        self._head_fusion, self._residual_normed = Fusion((weights.norm, eps)), one.residual_normed
        # In a warm-up there are fewer layers.
        depths = (min(layer, config.depth) for layer in one.layers)
        self._products, self._ids = [*zip(depths, weights.states, strict=True)], one.ids
        self._greedy = [greedy(len(one.ids) or (one.model if weights.head else config).vocab_size)]
        if (table := weights.embedding) is not None:
            self._embed = lambda ids: (ops.embed(table, ids), None)

    def states(self) -> JoinedStates:
        return JoinedStates(self._ops, self._products)

    def draft(self, rows: Sequence[MtpRow]) -> list[tuple[Sampled, np.ndarray]]:
        found = super().draft(rows)
        return [(self._ids[one] if self._ids and isinstance(one, int) else one, state) for one, state in found]

    def _draft_inputs(self, embedded: np.ndarray, hidden: np.ndarray) -> Inputs:
        both = np.concatenate([embedded, np.zeros_like(hidden)], axis=1)
        return Inputs(both, mtp=MtpInputs(None, hidden, None))

    def _draft(self, inputs: Inputs) -> tuple[Array, Array, Array]:
        """Rows: an embedding and room for the state before it, `x` (T, 2E), which `mtp.before` (T, E) has → tokens
        (T,), logits (T, V of the head), the states (T, E)."""
        assert inputs.mtp is not None
        ops, e, both, x = self._ops, self._size, inputs.x, inputs.mtp.before
        ops.rms_norm(both[:, :e], self._embedding_norm)
        ops.rms_norm(x, self._hidden_norm, both[:, e:])
        if self._residual_normed:
            ops.rms_norm(x, self._hidden_norm)
        layer_inputs = self._choice(self._number, inputs)
        self._layer.complete(x, self._layer.mixer.project(both, layer_inputs), layer_inputs)
        logits = ops.linear(x, self._head, self._head_fusion)
        return ops.sample(logits, inputs.sampler), logits, x
