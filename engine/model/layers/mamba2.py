"""Mamba 2: each head has a matrix, which decays, to which tokens add, and which they read."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.engine.backends.delta import Mamba2Weights
from polarlm.engine.backends.ops import Array
from polarlm.engine.model.layers import Eps, slot
from polarlm.engine.model.layers.recurrent import RecurrentMixer
from polarlm.engine.state.recurrent.delta import DeltaShape
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders import config


@dataclass(frozen=True)
class Mamba2LayerWeights:
    """Matrices are (out, in). C: channels of x, B and C; H: heads; I: H times the head dim."""

    norm: Array | None = slot("mamba_norm")  # (E,)
    inputs: Linear = slot("mamba_in", "linear")  # (I + C + H, E): z, x, B, C, dt
    conv: Array = slot("mamba_conv")  # (C · width,): the numbers of each channel, oldest token first
    conv_bias: Array | None = slot("mamba_conv_bias")  # (C,)
    decay: Array = slot("mamba_decay")  # (H,)
    dt_bias: Array = slot("mamba_dt_bias")  # (H,)
    skip: Array = slot("mamba_skip")  # (H,)
    out_norm: Array = slot("mamba_out_norm")  # (I,)
    out: Linear = slot("mamba_out", "linear")  # (E, I)


class Mamba2(RecurrentMixer):
    Weights, state_shape, op = Mamba2LayerWeights, DeltaShape, "mamba2"

    @staticmethod
    def weights_of_op(shape: config.Mamba2, eps: Eps, weights: Mamba2LayerWeights, conv: Array) -> tuple[Mamba2Weights]:
        w = weights
        return (Mamba2Weights(conv, w.conv_bias, w.decay, w.dt_bias, w.skip, w.out_norm, shape.norm_eps),)
