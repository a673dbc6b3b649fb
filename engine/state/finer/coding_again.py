"""Codes blocks again with fewer bits when the KV store fills: a few between two units of work."""

from __future__ import annotations

import time
from collections import deque

from polarlm.engine.state.finer.blocks import FinerBlocks

_RECENT = 8  # latest layers: the next one is expected to take as long as the slowest of them
_ALONE = 0.05  # seconds between two units while no request takes steps


class CodingAgain:
    """Makes room in a store with two kinds of blocks, layer by layer, between units of work."""

    def __init__(self, blocks: FinerBlocks | None) -> None:
        """blocks: None for a store whose blocks are all alike."""
        self._blocks = blocks
        self._seconds: deque[float] = deque(maxlen=_RECENT)  # time of each recent layer
        self._awaited: int | None = None  # tokens of a prompt that waits for room

    def must_wait(self, tokens: int) -> bool:
        """Return whether a prompt of `tokens` must wait for `between_units`: else its unit would code many blocks."""
        is_short = self._blocks is not None and self._blocks.lacks_room(tokens)
        self._awaited = tokens if is_short else None
        return is_short

    def between_units(self, step: float | None) -> int:
        """Code blocks again if the store should have more room, and return how many of their layers; before that, all
        that are too old for their bits.

        step: the seconds that a step takes, which this exceeds only if a single layer does; None if no request
        takes steps.
        """
        blocks, seconds, coded = self._blocks, _ALONE if step is None else step, 0
        if blocks is None:
            return 0
        blocks.code_aged()  # at once, so that what a step reads does not depend on how long others take
        awaited, self._awaited = self._awaited, None
        started = before = time.perf_counter()
        while not coded or before - started + max(self._seconds) <= seconds:
            if not (blocks.lacks_room() or blocks.lacks_room(awaited)) or not blocks.code_layer():
                break
            now = time.perf_counter()
            self._seconds.append(now - before)
            before, coded = now, coded + 1
        return coded
