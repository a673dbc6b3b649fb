"""Constrained decoding: which tokens may come next, told by whoever knows the grammar of an answer.

No grammar lives here. A constraint wraps a library's matcher, whose bit masks have the layout that `Draw.allowed`
takes: bit v % 32 of word v // 32 belongs to token v, and 1 allows it, as in xgrammar and llguidance.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from engine.errors import EngineError

WORD = 32  # tokens that a word of a mask is for


class Constraint(Protocol):
    """What one request may generate, token by token. The engine calls it between steps, from one thread at a time.

    An exception that it raises ends its request alone.
    """

    def allowed(self) -> np.ndarray | None:
        """The mask (ceil(V / 32),) of the tokens that may come next, 32-bit words; None where all may.

        Tokens that end the answer are among those it decides about. The engine copies what it needs before the next
        call of `accept`. More words than V takes are fine, and bits behind V do not count.
        """

    def accept(self, token: int) -> None:
        """The answer has grown by `token`. Called once for each of its tokens; the one that ends it is not among them.

        A request that is preempted and computed again does not repeat its calls.
        """

    @property
    def finished(self) -> bool:
        """Whether nothing may follow: the request ends with "stop" behind the token accepted last."""


def mask_words(vocabulary: int) -> int:
    """Words of a mask over so many tokens."""
    return -(-vocabulary // WORD)


def checked_mask(mask: np.ndarray, vocabulary: int) -> np.ndarray:
    """A copy of `mask` as uint32 (ceil(V / 32),). Raises EngineError for what is no mask over so many tokens."""
    mask, words = np.asarray(mask), mask_words(vocabulary)
    if mask.dtype.kind not in "iu" or mask.dtype.itemsize != 4 or mask.ndim != 1 or len(mask) < words:
        raise EngineError(
            f"The constraint gave a mask of {mask.dtype} {mask.shape}, but {vocabulary} tokens take {words} words of "
            "32 bits"
        )
    return mask[:words].astype(np.uint32)


def allowed_bits(mask: np.ndarray, vocabulary: int) -> np.ndarray:
    """The bits (V,) bool of a mask (ceil(V / 32),) uint32."""
    in_order = np.ascontiguousarray(mask, "<u4").view(np.uint8)
    return np.unpackbits(in_order, count=vocabulary, bitorder="little").view(np.bool_)
