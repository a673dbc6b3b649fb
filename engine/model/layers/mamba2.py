"""Mamba 2: each head has a matrix, which decays, to which tokens add, and which they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polarlm.engine.backends.delta import DeltaSlots, Mamba2Weights
from polarlm.engine.backends.ops import Array, Ops, Routing
from polarlm.engine.model.layers import Eps, ReadSlot, Tap, add_projected, norm_of, projected
from polarlm.engine.state.recurrent.delta import DeltaShape
from polarlm.engine.state.recurrent.slots import add_rows
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders import config


@dataclass(frozen=True)
class Mamba2LayerWeights:
    """Matrices are (out, in). C: channels of x, B and C; H: heads; I: H times the head dim."""

    norm: Array | None  # (E,)
    inputs: Linear  # (I + C + H, E): z, x, B, C, dt
    conv: Array  # (C · width,): the numbers of each channel, oldest token first
    conv_bias: Array | None  # (C,)
    decay: Array  # (H,)
    dt_bias: Array  # (H,)
    skip: Array  # (H,)
    out_norm: Array  # (I,)
    out: Linear  # (E, I)

    @classmethod
    def read(cls, read: ReadSlot) -> Mamba2LayerWeights:
        """Read the weights in the slots of a layer."""
        return cls(
            norm=read.vector("mamba_norm"),
            inputs=read.linear("mamba_in"),
            conv=read.vector("mamba_conv"),
            conv_bias=read.vector("mamba_conv_bias"),
            decay=read.vector("mamba_decay"),
            dt_bias=read.vector("mamba_dt_bias"),
            skip=read.vector("mamba_skip"),
            out_norm=read.vector("mamba_out_norm"),
            out=read.linear("mamba_out"),
        )


class Mamba2:
    """The mixer of one layer: see `engine.model.layers.kinds.Mixer`."""

    Weights = Mamba2LayerWeights

    def __init__(
        self, ops: Ops, shape: config.Mamba2, eps: Eps, weights: Mamba2LayerWeights, cache: DeltaSlots, transform: None
    ):
        self._ops, self._weights, self._slots = ops, weights, cache
        self._norm = norm_of(weights.norm, eps.before)
        by_channel = ops.to_host(weights.conv).reshape(shape.channels, shape.width)
        self._own = Mamba2Weights(
            ops.to_device(by_channel.T),
            weights.conv_bias,
            weights.decay,
            weights.dt_bias,
            weights.skip,
            weights.out_norm,
            shape.norm_eps,
        )

    @staticmethod
    def state_shape(shape: config.Mamba2, block_size: int) -> DeltaShape:
        return DeltaShape(shape)

    def project(
        self, x: Array, rope: None, spans: Any, *, adapters: Routing | None, recorded: bool, tap: Tap | None = None
    ) -> Array:
        """Add the rows x (T, E) to the layer's states, and return the gated results of its heads (T, I)."""
        inputs = projected(self._ops, x, self._weights.inputs, adapters, norm=self._norm, recorded=recorded)
        return add_rows(self._ops, self._ops.mamba2, inputs, (self._own,), self._slots, spans)

    def mix(
        self, x: Array, y: Array, spans: Any, *, adapters: Routing | None, recorded: bool, tap: Tap | None = None
    ) -> None:
        """Add the projection of y (T, I) to x (T, E), in place."""
        add_projected(self._ops, x, y, self._weights.out, adapters, None, recorded=recorded)
