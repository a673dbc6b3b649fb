"""The embedding of a layer: a gated network whose second input is the layer's own embedding of the token."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.model.layers import Eps, LayerInputs, OutputProjection, Projection, norm_of, slot
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders.config import Activation


@dataclass(frozen=True)
class TokenInputs:
    """What makes the inputs of all layers of a token: weights on the device."""

    table: Matrix = slot("layer_embedding", "matrix")  # (V, L·P)
    projection: Linear = slot("layer_projection", "linear")  # (L·P, E)
    norm: Array = slot("layer_projection_norm")  # (P,)

    def compute(self, ops: Ops, ids: Array, x: Array, scale: float, eps: float) -> Array:
        """Return the inputs (T, L·P) of tokens ids (T,) with embeddings x (T, E): those in the table, times `scale`,
        plus the normed projection of x, which is computed for some rows at a time: it is as large."""
        size = self.norm.shape[0]
        inputs = ops.embed(self.table, ids, scale)
        for first in range(0, len(inputs), ops.prefill_rows):
            part = slice(first, first + ops.prefill_rows)
            summand = ops.linear(x[part], self.projection)
            rows = summand.shape[0] * summand.shape[1] // size
            ops.rms_norm(summand.reshape(rows, size), (self.norm, eps), residual=inputs[part].reshape(rows, size))
        return inputs


@dataclass(frozen=True)
class LayerEmbeddingWeights:
    """Matrices are (out, in)."""

    gate: Linear = slot("layer_gate", "linear")  # (P, E)
    out: Linear = slot("layer_out", "linear")  # (E, P)
    post_norm: Array | None = slot("layer_post_norm")  # (E,): norms the result before it is added to the residual


class LayerEmbedding:
    def __init__(self, ops: Ops, activation: Activation, number: int, eps: Eps, weights: LayerEmbeddingWeights):
        self._ops, self._activation = ops, activation
        self._gate = Projection(ops, weights.gate)
        self._out = OutputProjection(ops, weights.out, norm_of(weights.post_norm, eps.after))
        size = weights.gate.shape[0]
        self._columns = slice(number * size, (number + 1) * size)

    def add(self, x: Array, inputs: LayerInputs) -> None:
        """Add the projection of activation(gate(x)) · `inputs.added` to x (T, E), in place."""
        y = self._gate(x, inputs.adapters)
        assert inputs.added is not None
        self._ops.activate(y, inputs.added[:, self._columns], self._activation)
        self._out.add(x, y, inputs.adapters)
