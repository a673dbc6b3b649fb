"""The ops of encoders, in which every token of a text sees all others of it.

Letters and types as in `engine.backends.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from polarlm.engine.backends.kv import PreparedTransform

Array = Any


class EncoderOps(Protocol):
    """The ops of a backend that only encoders need."""

    def layer_norm(self, x: Array, norm: tuple[Array, Array, float]) -> None:
        """(x − mean) / √(variance + eps) · weight + bias of each row of x (T, n), in place.

        norm: weight and bias (n,), and eps.
        """

    def self_attention(
        self,
        qkv: Array,
        rope: tuple[Array, Array] | None,
        transform: PreparedTransform,
        lengths: Sequence[int],
        scale: float,
        window: int | None = None,
        norms: tuple[Array, Array, float] | None = None,
    ) -> Array:
        """`transform_heads` of qkv (T, H + 2K, D), then attention of each text to its own rows → (T, H, D).

        rope: None if heads have neither RoPE nor norms, and the transform changes nothing: they are taken as they are.
        lengths: the numbers of rows of the texts, in order; their sum is T. Nothing is kept. scale: multiplies scores.
        window: rows attend to those at most window // 2 away; None: to all. norms: as in `transform_heads`.
        """
