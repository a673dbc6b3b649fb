"""A gated short convolution: each channel of a token is a sum over the last few tokens, times gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polarlm.engine.backends.ops import Array, Ops, Routing
from polarlm.engine.model.layers import Eps, ReadSlot, Tap, add_projected, norm_of, projected
from polarlm.engine.state.recurrent.conv_inputs import ConvShape
from polarlm.engine.state.recurrent.slots import add_rows
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders import config


@dataclass(frozen=True)
class ShortConvWeights:
    """Matrices are (out, in); None for what the family does not have."""

    norm: Array | None  # (E,)
    inputs: Linear  # (3E, E): B, C and x
    conv: Array  # (E · width,): the numbers of each channel, oldest token first
    conv_bias: Array | None  # (E,)
    out: Linear  # (E, E)

    @classmethod
    def read(cls, read: ReadSlot) -> ShortConvWeights:
        """Read the weights in the slots of a layer."""
        conv = read.vector("conv")
        assert conv is not None
        return cls(
            norm=read.vector("conv_norm"),
            inputs=read.linear("conv_in"),
            conv=conv,
            conv_bias=read.vector("conv_bias"),
            out=read.linear("conv_out"),
        )


class ShortConv:
    """The mixer of one layer: see `engine.model.layers.kinds.Mixer`."""

    Weights = ShortConvWeights

    def __init__(
        self, ops: Ops, shape: config.ShortConv, eps: Eps, weights: ShortConvWeights, cache: Array, transform: None
    ):
        self._ops, self._shape, self._weights, self._slots = ops, shape, weights, cache
        self._norm = norm_of(weights.norm, eps.before)
        by_channel = ops.to_host(weights.conv).reshape(shape.channels, shape.width)
        self._conv = ops.to_device(by_channel.T)

    @staticmethod
    def state_shape(shape: config.ShortConv, block_size: int) -> ConvShape:
        return ConvShape(shape.channels, shape.width)

    def project(
        self, x: Array, rope: None, spans: Any, *, adapters: Routing | None, recorded: bool, tap: Tap | None = None
    ) -> Array:
        """Return C · conv(B · x) of the rows x (T, E); B · x is kept for later rows."""
        ops, w = self._ops, self._weights
        inputs = projected(ops, x, w.inputs, adapters, norm=self._norm, recorded=recorded)
        return add_rows(ops, ops.short_conv, inputs, (self._conv, w.conv_bias), self._slots, spans)

    def mix(
        self, x: Array, y: Array, spans: Any, *, adapters: Routing | None, recorded: bool, tap: Tap | None = None
    ) -> None:
        """Add the projection of y (T, E) to x (T, E), in place."""
        add_projected(self._ops, x, y, self._weights.out, adapters, None, recorded=recorded)
