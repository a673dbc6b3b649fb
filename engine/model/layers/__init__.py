"""The kinds of layers of a decoder, each with its weights and its forward pass.

A *mixer* lets the tokens of a sequence see each other, through the state that the store keeps for its layer; a
feed-forward network computes each token alone. Both add their result to the residual stream x (T, E), in place.

Letters: T rows, E hidden size, F feed-forward size, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any, NamedTuple

from polarlm.engine.backends.kv import Norm, Spans
from polarlm.engine.backends.ops import Array, Ops, Routing
from polarlm.engine.weight_formats import Linear

Tap = Callable[[Array, Array], None]
"""tap(queries, keys) gets the queries (T, H, D) and keys (T, K, D) of rows, scaled and rotated as they are stored. They
are valid until it returns."""


class LayerInputs(NamedTuple):
    """What a layer reads besides its rows x (T, E).

    rope: cos and sin (T, D/2), and factors of queries (T, 1) if they grow; None for a layer without attention. spans:
    as `LayerState.spans` returns them. adapters: those of the rows; None if no row has one. added: what `TokenInputs`
    adds in all layers (T, L·P), if the model has that.
    """

    rope: tuple[Array, ...] | None = None
    spans: Spans = None
    adapters: Routing | None = None
    added: Array | None = None

    def after(self, rows: int) -> LayerInputs:
        """The inputs of the rows after the first ones, but for `rope`, which is read before, and `spans`."""
        adapters = None if self.adapters is None else self.adapters.part(slice(rows, None))
        return self._replace(rope=None, adapters=adapters, added=None if self.added is None else self.added[rows:])


class Eps(NamedTuple):
    """Epsilons of RMS norms."""

    before: float  # for inputs of mixers and networks, queries and keys, and the last hidden states
    after: float  # for outputs of mixers and networks


def slot(name: str, read: str = "vector", default: Any = MISSING) -> Any:
    """A field of a layer's weights: the slot whose tensors fill it, and the method of `LayerReader` that reads them."""
    return field(default=default, metadata={"slot": name, "read": read})


def norm_of(weight: Array | None, eps: float) -> Norm:
    return None if weight is None else (weight, eps)


def adapted_linear(
    ops: Ops,
    x: Array,
    w: Linear,
    adapters: Routing | None,
    *,
    norm: Norm = None,
    residual: Array | None = None,
    activation: str | None = None,
    consumer: Linear | None = None,
) -> Array:
    """`Ops.linear`, whose product has what the adapter of each row adds. adapters: None if no row has one."""
    if adapters is None or w.deltas is None:
        consumer = consumer if adapters is None else None  # what follows may read the result in float32
        return ops.linear(x, w, norm=norm, residual=residual, activation=activation, consumer=consumer)
    y, deltas = ops.linear(x, w, norm=norm, residual=residual), w.deltas
    ops.experts(x, adapters, deltas.a, deltas.b, None, norm=norm, residual=y)
    return y if activation is None else ops.activate_halves(y, activation)


def add_output(ops: Ops, x: Array, y: Array, w: Linear, adapters: Routing | None, post_norm: Norm) -> None:
    """Add the projection w of y (T, in) to x (T, E), in place; `post_norm` norms it first, unless it is None."""
    if post_norm is None:
        adapted_linear(ops, y, w, adapters, residual=x)
    else:
        ops.rms_norm(adapted_linear(ops, y, w, adapters), post_norm, residual=x)
