"""Where the rows of spans are: positions, also for RoPE, and which rows are images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlm.engine.state.image_positions import ImagePositions
from polarlm.engine.state.store import Span


def positions(spans: Sequence[Span]) -> np.ndarray:
    """Return the positions of all rows of `spans`, (T,) int64."""
    counts = [span.count for span in spans]
    if sum(counts) == len(spans):  # as in most steps
        return np.array([span.start for span in spans])
    firsts = np.cumsum([0, *counts[:-1]])
    return np.arange(sum(counts)) + np.repeat([span.start for span in spans] - firsts, counts)


def rope_positions(spans: Sequence[Span]) -> np.ndarray:
    """Return the positions of all rows for RoPE: `positions`, or (3, T) if some are in an image; see
    `ImagePositions`."""
    if not [span for span in spans if span.sequence.image_positions is not None]:
        return positions(spans)
    each = [(span.sequence.image_positions or ImagePositions(())).positions(span.start, span.count) for span in spans]
    if any(one.ndim > 1 for one in each):
        each = [np.broadcast_to(one, (3, one.shape[-1])) for one in each]
    return np.concatenate(each, axis=-1)


def whole_images(spans: Sequence[Span]) -> list[range]:
    """Return which of all rows of `spans` are images, or the rest of one."""
    images, end = list[range](), 0
    for span in spans:
        shift, end = end - span.start, end + span.count
        parts = span.sequence.image_positions.parts(span.start, span.count) if span.sequence.image_positions else ()
        images += [range(part.start + shift, part.stop + shift) for part, sees in parts if sees]
    return images
