"""A gated delta rule: each head has a matrix, which tokens decay, change with keys and read with queries."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.engine.backends.delta import DeltaWeights
from polarlm.engine.backends.ops import Array
from polarlm.engine.model.layers import Eps, slot
from polarlm.engine.model.layers.recurrent import RecurrentMixer
from polarlm.engine.state.recurrent.delta import DeltaShape
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders import config


@dataclass(frozen=True)
class GatedDeltaWeights:
    """Matrices are (out, in). C: channels of queries, keys and values; H: value heads; D: value dim."""

    norm: Array | None = slot("delta_norm")  # (E,)
    inputs: Linear = slot("delta_in", "linear")  # (C + H·D + 2H, E): q, k, v, z, b, a
    conv: Array = slot("delta_conv")  # (C · width,): the numbers of each channel, oldest token first
    decay: Array = slot("delta_decay")  # (H,)
    dt_bias: Array = slot("delta_dt_bias")  # (H,)
    out_norm: Array = slot("delta_out_norm")  # (D,)
    out: Linear = slot("delta_out", "linear")  # (E, H·D)


class GatedDelta(RecurrentMixer):
    Weights, state_shape, op = GatedDeltaWeights, DeltaShape, "gated_delta"

    @staticmethod
    def weights_of_op(
        shape: config.GatedDelta, eps: Eps, weights: GatedDeltaWeights, conv: Array
    ) -> tuple[DeltaWeights]:
        w = weights
        return (DeltaWeights(conv, w.decay, w.dt_bias, w.out_norm, eps.before, shape.tiled),)
