"""Rows of images in a prompt: a vision encoder computes them, and they take the place of embeddings."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.ops import Array
from polarlm.engine.model.vision_encoders import ImageReader
from polarlm.engine.state.store import Span
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders.vision_encoders import ImageShape


class PlacedImage(NamedTuple):
    """An image in a prompt: the position of its first row, and its pixels uint8 (height, width, 3)."""

    first: int
    shape: ImageShape
    pixels: np.ndarray


class ImagePart(NamedTuple):
    """What a prompt's rows get of an image: rows (n, E) in place of their embeddings, and products that are added to
    their hidden states after each of the first layers. at: these rows of the prompt."""

    at: slice
    rows: Array
    added: Sequence[tuple[Array, Linear]]


def read_images(
    reader: ImageReader | None, images: Sequence[PlacedImage], span: Span
) -> Generator[int, None, list[ImagePart]]:
    """Compute the images that a span has rows of. Yields 0, rows of layers that are done, after each layer of a
    vision encoder."""
    parts = []
    for first, shape, pixels in images:
        begin, end = max(first, span.start), min(first + shape.rows, span.start + span.count)
        if begin >= end:
            continue
        assert reader is not None
        rows, added = yield from reader.read(pixels, shape)
        cut = slice(begin - first, end - first)
        parts.append(ImagePart(slice(begin - span.start, end - span.start), rows[cut], [(x[cut], w) for x, w in added]))
    return parts
