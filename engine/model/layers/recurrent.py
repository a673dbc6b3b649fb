"""Mixers whose state one op reads and advances: short convolutions, delta rules and Mamba 2. Projections of their
inputs and results are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polarlm.engine.backends.delta import DeltaWeights, Mamba2Weights
from polarlm.engine.backends.ops import Array, Fusion, Ops
from polarlm.engine.model.layers import Eps, LayerInputs, OutputProjection, Projection, Tap, norm_of, slot
from polarlm.engine.state.recurrent.conv_inputs import ConvShape
from polarlm.engine.state.recurrent.delta import DeltaShape
from polarlm.engine.state.recurrent.slots import add_rows
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders import config


class RecurrentMixer:
    """A `Mixer` whose weights have `norm`, `inputs`, `conv` and `out`, and may have `post_norm`."""

    op: ClassVar[str]  # the name of the op

    def __init__(self, ops: Ops, shape: Any, eps: Eps, weights: Any, cache: Any, transform: None):
        self._ops, self._slots = ops, cache
        self._inputs = Projection(ops, weights.inputs, Fusion(norm_of(weights.norm, eps.before)))
        self._out = OutputProjection(ops, weights.out, norm_of(getattr(weights, "post_norm", None), eps.after))
        channels = ops.to_host(weights.conv).reshape(shape.channels, shape.width)
        self._op_arguments = self.weights_of_op(shape, eps, weights, ops.to_device(channels.T))

    @staticmethod
    def weights_of_op(shape: Any, eps: Eps, w: Any, conv: Array) -> Sequence[Any]:
        """Return the arguments of the op after its inputs. conv: (width, channels)."""
        raise NotImplementedError

    def project(self, x: Array, inputs: LayerInputs, tap: Tap | None = None) -> Array:
        """Add the rows x (T, E) to the layer's state, and return the results of the op for them."""
        rows = self._inputs(x, inputs.adapters)
        arguments = self._arguments(x, inputs)
        return add_rows(self._ops, getattr(self._ops, self.op), rows, arguments, self._slots, inputs.spans)

    def _arguments(self, x: Array, inputs: LayerInputs) -> Sequence[Any]:
        """Return the arguments of the op after its inputs, for the layer's rows x."""
        return self._op_arguments

    def mix(self, x: Array, y: Array, inputs: LayerInputs) -> None:
        """Add the projection of the results y to x (T, E), in place."""
        self._out.add(x, y, inputs.adapters)


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
    """A gated short convolution, C · conv(B · x) of the rows x: each channel of a token is a sum over the last few
    tokens, times gates. B · x is kept for later rows."""

    Weights, op = ShortConvWeights, "short_conv"

    @staticmethod
    def state_shape(shape: config.ShortConv) -> ConvShape:
        return ConvShape(shape.channels, shape.width)

    @staticmethod
    def weights_of_op(shape: config.ShortConv, eps: Eps, w: ShortConvWeights, conv: Array) -> Sequence[Any]:
        return conv, w.conv_bias


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
    """A gated delta rule: each head has a matrix, which tokens decay, change with keys and read with queries."""

    Weights: ClassVar[Any] = GatedDeltaWeights
    state_shape, op = DeltaShape, "gated_delta"

    @staticmethod
    def weights_of_op(shape: config.Recurrent, eps: Eps, w: Any, conv: Array) -> Sequence[Any]:
        return (DeltaWeights(conv, w.decay, w.dt_bias, w.out_norm, eps.before, shape.tiled),)


@dataclass(frozen=True)
class ChannelDeltaWeights:
    """Matrices are (out, in). C: channels of queries, keys and values; H: heads; A, D: key and value dim; R: rank."""

    norm: Array | None = slot("delta_norm")  # (E,)
    inputs: Linear = slot("delta_in", "linear")  # (C + H, E): q, k, v, b
    decay_down: Linear = slot("delta_decay_down", "linear")  # (R, E)
    decay_up: Linear = slot("delta_decay_up", "linear")  # (H·A, R)
    gate_down: Linear = slot("delta_gate_down", "linear")  # (R, E)
    gate_up: Linear = slot("delta_gate_up", "linear")  # (H·D, R)
    conv: Array = slot("delta_conv")  # (C · width,): the numbers of each channel, oldest token first
    decay: Array = slot("delta_decay")  # (H,)
    dt_bias: Array = slot("delta_dt_bias")  # (H·A,)
    out_norm: Array = slot("delta_out_norm")  # (D,)
    out: Linear = slot("delta_out", "linear")  # (E, H·D)


class ChannelDelta(GatedDelta):
    """The same, whose decays and gates are products of short vectors."""

    Weights, op = ChannelDeltaWeights, "channel_delta"

    def __init__(
        self, ops: Ops, shape: config.ChannelDelta, eps: Eps, weights: ChannelDeltaWeights, cache: Any, transform: None
    ):
        super().__init__(ops, shape, eps, weights, cache, transform)
        norm = Fusion(norm_of(weights.norm, eps.before))
        self._decay = Projection(ops, weights.decay_down, norm), Projection(ops, weights.decay_up)
        self._gate = Projection(ops, weights.gate_down, norm), Projection(ops, weights.gate_up)

    def _arguments(self, x: Array, inputs: LayerInputs) -> Sequence[Any]:
        ups = (up(down(x, inputs.adapters), inputs.adapters) for down, up in (self._decay, self._gate))
        return *ups, *self._op_arguments


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
    """Mamba 2: each head has a matrix, which decays, to which tokens add, and which they read."""

    Weights, state_shape, op = Mamba2LayerWeights, DeltaShape, "mamba2"

    @staticmethod
    def weights_of_op(shape: config.Mamba2, eps: Eps, w: Mamba2LayerWeights, conv: Array) -> Sequence[Any]:
        return (Mamba2Weights(conv, w.conv_bias, w.decay, w.dt_bias, w.skip, w.out_norm, shape.norm_eps),)
