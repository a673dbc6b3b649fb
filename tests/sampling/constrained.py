"""Constraints that stand in for a grammar library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from polarlm.engine.sampling.constraints import mask_words


def mask_of(tokens: Iterable[int], vocabulary: int) -> np.ndarray:
    """The mask (ceil(V / 32),) uint32 that allows these tokens, in the documented layout."""
    mask = np.zeros(mask_words(vocabulary), np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


class InTurn:
    """The sets of tokens that may come, one after the other, and from the beginning again; None allows all.

    accepted: the tokens so far. count: of those behind which nothing follows, None for no end.
    """

    def __init__(self, sets: Sequence[Iterable[int] | None], vocabulary: int, count: int | None = None):
        self._masks = [None if tokens is None else mask_of(tokens, vocabulary) for tokens in sets]
        self._count = count
        self.accepted: list[int] = []

    def allowed(self) -> np.ndarray | None:
        return self._masks[len(self.accepted) % len(self._masks)]

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    @property
    def finished(self) -> bool:
        return len(self.accepted) == self._count
