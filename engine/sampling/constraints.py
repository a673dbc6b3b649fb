"""Constrained decoding: the interface of an object that decides which tokens may come next.

The engine has no grammar of its own. A constraint wraps a library's matcher. Its bit masks have the layout of
`SamplerInput.allowed`, as in xgrammar and llguidance: bit v % 32 of word v // 32 is 1 if token v is allowed.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from polarlm.engine.errors import EngineError

WORD = 32  # tokens per word of a mask


class Constraint(Protocol):
    """The constraint of one request. The engine calls it between steps, from one thread at a time. An exception in one
    of its methods ends this request only."""

    def allowed(self) -> np.ndarray | None:
        """The mask (ceil(V / 32),) of the tokens that may come next, in 32-bit words; None if all may.

        The mask decides about end tokens, too. The engine copies it before the next call of `accept`, and ignores bits
        and words beyond V. A token that is the only one allowed is appended without a step.
        """

    def accept(self, token: int) -> None:
        """Advance by `token`, which was appended to the answer. Called once for each token except the end token, also
        if the request is preempted and computed again."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete; the request then ends with "stop" after the last accepted token."""


def mask_words(vocabulary: int) -> int:
    """The number of words of a mask over `vocabulary` tokens."""
    return -(-vocabulary // WORD)


def checked_mask(mask: np.ndarray, vocabulary: int) -> np.ndarray:
    """A copy of `mask` as uint32 (ceil(V / 32),). Raises EngineError unless it is a mask over `vocabulary` tokens."""
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


def only_token(mask: np.ndarray, vocabulary: int) -> int | None:
    """The token that a mask (ceil(V / 32),) uint32 allows, if it is the only one."""
    (words,) = mask.nonzero()
    if len(words) != 1:
        return None
    bits = int(mask[words[0]])
    token = int(words[0]) * WORD + bits.bit_length() - 1
    return token if bits & (bits - 1) == 0 and token < vocabulary else None
