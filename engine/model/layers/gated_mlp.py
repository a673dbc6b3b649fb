"""The gated feed-forward network: down(activation(gate(x)) · up(x))."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.engine.backends.ops import Array, Fusion, Ops
from polarlm.engine.model.layers import Eps, LayerInputs, OutputProjection, Projection, norm_of, slot
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
        fusion = Fusion(norm_of(weights.norm, eps.before), shape.activation, weights.down)
        self._gate_up = Projection(ops, weights.gate_up, fusion)
        self.down = OutputProjection(ops, weights.down, norm_of(weights.post_norm, eps.after))

    def project(self, x: Array, inputs: LayerInputs) -> Array:
        """Return the input of the last projection for rows x (T, E): (T, F)."""
        return self._gate_up(x, inputs.adapters)

    def add(self, x: Array, inputs: LayerInputs) -> None:
        """Add the network's result to x (T, E), in place."""
        self.down.add(x, self.project(x, inputs), inputs.adapters)
