"""The gated feed-forward network: down(activation(gate(x)) · up(x))."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.model.layers import Eps, LayerInputs, adapted_linear, add_output, norm_of, slot
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders import config


@dataclass(frozen=True)
class GatedMLPWeights:
    """Matrices are (out, in); None for what the family does not have."""

    norm: Array | None = slot("ffn_norm")  # (E,)
    gate_up: Linear = slot("gate_up", "linear")  # (2F, E)
    down: Linear = slot("down", "linear")  # (E, F)
    # (E,): norms the result before it is added to the residual, or in encoders the sum
    post_norm: Array | None = slot("ffn_post_norm")
    post_norm_bias: Array | None = slot("ffn_post_norm_bias", default=None)  # (E,)


class GatedMLP:
    Weights = GatedMLPWeights

    def __init__(self, ops: Ops, shape: config.GatedMLP, eps: Eps, weights: GatedMLPWeights):
        self._ops, self._shape, self._weights = ops, shape, weights
        self._norm, self._post_norm = norm_of(weights.norm, eps.before), norm_of(weights.post_norm, eps.after)

    def add(self, x: Array, inputs: LayerInputs) -> None:
        """Add the network's result to x (T, E), in place."""
        ops, w, activation = self._ops, self._weights, self._shape.activation
        y = adapted_linear(ops, x, w.gate_up, inputs.adapters, norm=self._norm, activation=activation, consumer=w.down)
        add_output(ops, x, y, w.down, inputs.adapters, self._post_norm)
