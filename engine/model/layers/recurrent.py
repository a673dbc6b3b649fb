"""What mixers whose state one op reads and advances have in common: projections of their inputs and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.model.layers import Eps, LayerInputs, Tap, adapted_linear, add_output, norm_of
from polarlm.engine.state.recurrent.slots import add_rows


class RecurrentMixer:
    """A `Mixer` whose weights have `norm`, `inputs`, `conv` and `out`, and may have `post_norm`."""

    op: ClassVar[str]  # the name of the op

    def __init__(self, ops: Ops, shape: Any, eps: Eps, weights: Any, cache: Any, transform: None):
        self._ops, self._weights, self._slots = ops, weights, cache
        self._norm = norm_of(weights.norm, eps.before)
        self._post_norm = norm_of(getattr(weights, "post_norm", None), eps.after)
        channels = ops.to_host(weights.conv).reshape(shape.channels, shape.width)
        self._op_arguments = self.weights_of_op(shape, eps, weights, ops.to_device(channels.T))

    @staticmethod
    def weights_of_op(shape: Any, eps: Eps, weights: Any, conv: Array) -> Sequence[Any]:
        """Return the arguments of the op after its inputs. conv: (width, channels)."""
        raise NotImplementedError

    def project(self, x: Array, inputs: LayerInputs, tap: Tap | None = None) -> Array:
        """Add the rows x (T, E) to the layer's state, and return the results of the op for them."""
        rows = adapted_linear(self._ops, x, self._weights.inputs, inputs.adapters, norm=self._norm)
        return add_rows(self._ops, getattr(self._ops, self.op), rows, self._op_arguments, self._slots, inputs.spans)

    def mix(self, x: Array, y: Array, inputs: LayerInputs) -> None:
        """Add the projection of the results y to x (T, E), in place."""
        add_output(self._ops, x, y, self._weights.out, inputs.adapters, self._post_norm)
