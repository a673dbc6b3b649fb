"""A gated delta rule: each head has a matrix, which tokens decay, change with keys and read with queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polarlm.engine.backends.delta import DeltaSlots, DeltaWeights
from polarlm.engine.backends.ops import Array, Ops, Routing
from polarlm.engine.model.layers import Eps, ReadSlot, Tap, add_projected, norm_of, projected
from polarlm.engine.state.recurrent.delta import DeltaShape
from polarlm.engine.state.recurrent.slots import add_rows
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders import config


@dataclass(frozen=True)
class GatedDeltaWeights:
    """Matrices are (out, in). C: channels of queries, keys and values; H: value heads; D: value dim."""

    norm: Array | None  # (E,)
    inputs: Linear  # (C + H·D + 2H, E): q, k, v, z, b, a
    conv: Array  # (C · width,): the numbers of each channel, oldest token first
    decay: Array  # (H,)
    dt_bias: Array  # (H,)
    out_norm: Array  # (D,)
    out: Linear  # (E, H·D)

    @classmethod
    def read(cls, read: ReadSlot) -> GatedDeltaWeights:
        """Read the weights in the slots of a layer."""
        return cls(
            norm=read.vector("delta_norm"),
            inputs=read.linear("delta_in"),
            conv=read.vector("delta_conv"),
            decay=read.vector("delta_decay"),
            dt_bias=read.vector("delta_dt_bias"),
            out_norm=read.vector("delta_out_norm"),
            out=read.linear("delta_out"),
        )


class GatedDelta:
    """The mixer of one layer: see `engine.model.layers.kinds.Mixer`."""

    Weights = GatedDeltaWeights

    def __init__(
        self,
        ops: Ops,
        shape: config.GatedDelta,
        eps: Eps,
        weights: GatedDeltaWeights,
        cache: DeltaSlots,
        transform: None,
    ):
        self._ops, self._weights, self._slots = ops, weights, cache
        self._norm = norm_of(weights.norm, eps.before)
        by_channel = ops.to_host(weights.conv).reshape(shape.channels, shape.width)
        conv = ops.to_device(by_channel.T)
        self._own = DeltaWeights(conv, weights.decay, weights.dt_bias, weights.out_norm, eps.before, shape.tiled)

    @staticmethod
    def state_shape(shape: config.GatedDelta, block_size: int) -> DeltaShape:
        return DeltaShape(shape)

    def project(
        self, x: Array, rope: None, spans: Any, *, adapters: Routing | None, recorded: bool, tap: Tap | None = None
    ) -> Array:
        """Add the rows x (T, E) to the layer's states, and return the gated results of its heads (T, H·D)."""
        inputs = projected(self._ops, x, self._weights.inputs, adapters, norm=self._norm, recorded=recorded)
        return add_rows(self._ops, self._ops.gated_delta, inputs, (self._own,), self._slots, spans)

    def mix(
        self, x: Array, y: Array, spans: Any, *, adapters: Routing | None, recorded: bool, tap: Tap | None = None
    ) -> None:
        """Add the projection of y (T, H·D) to x (T, E), in place."""
        add_projected(self._ops, x, y, self._weights.out, adapters, None, recorded=recorded)
