"""The kinds of layers of a decoder, each with its weights and its forward pass.

A *mixer* lets the tokens of a sequence see each other, through the state that the store keeps for its layer; a
feed-forward network computes each token alone. Both add their result to the residual stream x (T, E), in place.

Letters: T rows, E hidden size, F feed-forward size, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.backends.kv import Norm, Spans
from polarlm.engine.backends.ops import PLAIN, Array, ExpertNetwork, Fusion, Ops, Routing
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

    def part(self, rows: slice | np.ndarray) -> LayerInputs:
        """The inputs of some rows, but for `rope`, which is read before, and `spans`."""
        adapters = None if self.adapters is None else self.adapters.part(rows)
        return self._replace(rope=None, adapters=adapters, added=None if self.added is None else self.added[rows])


class Eps(NamedTuple):
    """Epsilons of RMS norms."""

    before: float  # for inputs of mixers and networks, queries and keys, and the last hidden states
    after: float  # for outputs of mixers and networks


def slot(name: str, read: str = "vector", default: Any = MISSING) -> Any:
    """A field of a layer's weights: the slot whose tensors fill it, and the method of `LayerReader` that reads them."""
    return field(default=default, metadata={"slot": name, "read": read})


def norm_of(weight: Array | None, eps: float) -> Norm:
    return None if weight is None else (weight, eps)


class Projection:
    """A product of a layer with weights: `Ops.linear`, and what the adapter of each row adds to it."""

    def __init__(self, ops: Ops, w: Linear, fusion: Fusion = PLAIN) -> None:
        self._ops, self._w, self._fusion, self._deltas = ops, w, fusion, None
        # With adapters, what follows may read the result in float32.
        self._float_fusion, self._norm_fusion = fusion._replace(consumer=None), Fusion(fusion.norm)
        if w.deltas is not None:
            self._deltas = ExpertNetwork(w.deltas.a, w.deltas.b, self._norm_fusion)

    def __call__(self, x: Array, adapters: Routing | None, residual: Array | None = None) -> Array:
        """The product of x (T, in). adapters: None if no row has one. residual: as in `Ops.linear`."""
        ops, w, activation = self._ops, self._w, self._fusion.activation
        if adapters is None:
            return ops.linear(x, w, self._fusion, residual)
        if self._deltas is None:
            return ops.linear(x, w, self._float_fusion, residual)
        y = ops.linear(x, w, self._norm_fusion, residual)
        ops.experts(x, adapters, self._deltas, residual=y)
        return y if activation is None else ops.activate_halves(y, activation)


class OutputProjection(Projection):
    """The last product of a mixer or of a network, which is added to the residual stream."""

    def __init__(self, ops: Ops, w: Linear, post_norm: Norm = None) -> None:
        """post_norm: norms the result before it is added."""
        super().__init__(ops, w)
        self._post_norm = post_norm

    def add(self, x: Array, y: Array, adapters: Routing | None) -> None:
        """Add the product of y (T, in) to x (T, E), in place."""
        if self._post_norm is None:
            self(y, adapters, x)
        else:
            self._ops.rms_norm(self(y, adapters), self._post_norm, residual=x)
