"""A gated short convolution: each channel of a token is a sum over the last few tokens, times gates."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.engine.backends.ops import Array
from polarlm.engine.model.layers import Eps, slot
from polarlm.engine.model.layers.recurrent import RecurrentMixer
from polarlm.engine.state.recurrent.conv_inputs import ConvShape
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders import config


@dataclass(frozen=True)
class ShortConvWeights:
    """Matrices are (out, in); None for what the family does not have."""

    norm: Array | None = slot("conv_norm")  # (E,)
    inputs: Linear = slot("conv_in", "linear")  # (3E, E): B, C and x
    conv: Array = slot("conv")  # (E · width,): the numbers of each channel, oldest token first
    conv_bias: Array | None = slot("conv_bias")  # (E,)
    out: Linear = slot("conv_out", "linear")  # (E, E)
    post_norm: Array | None = slot("conv_post_norm")  # (E,): norms the result before it is added to the residual


class ShortConv(RecurrentMixer):
    """The mixer of one layer, C · conv(B · x) of the rows x; B · x is kept for later rows."""

    Weights, op = ShortConvWeights, "short_conv"

    @staticmethod
    def state_shape(shape: config.ShortConv) -> ConvShape:
        return ConvShape(shape.channels, shape.width)

    @staticmethod
    def weights_of_op(
        shape: config.ShortConv, eps: Eps, weights: ShortConvWeights, conv: Array
    ) -> tuple[Array, Array | None]:
        return conv, weights.conv_bias
