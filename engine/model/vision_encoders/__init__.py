"""What vision encoders compute: pixels of an image to rows of a prompt, in place of embeddings. One kind is one file.

It defines `Weights` and `LayerWeights`, whose fields are slots (see `engine.model.layers.slot`), and `Reader`, made of
ops, the vision encoder, its weights, the weights of its layers, and the bytes of both. Files that begin with an
underscore are helpers.

Letters: P patches of an image, R its rows of a prompt, E hidden size of the decoder, C hidden size of the vision
encoder.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.state.store import Span
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders.vision_encoders import ImageShape, VisionEncoder


class ImageRows(NamedTuple):
    """The rows (R, E) of an image in place of embeddings, and products that are added to the hidden states of these
    rows after each of the first layers of the decoder: inputs (R, n), and the matrix (E, n)."""

    rows: Array
    added: tuple[tuple[Array, Linear], ...] = ()


class ImageReader(Protocol):
    """A vision encoder on the device."""

    encoder: VisionEncoder
    bytes: int
    """Of its weights."""

    def read(self, pixels: np.ndarray, shape: ImageShape) -> Generator[int, None, ImageRows]:
        """Compute the rows of an image: pixels uint8 (height, width, 3), scaled to `shape`. Yields 0 after each layer,
        so that other work can run between them."""


class PlacedImage(NamedTuple):
    """Rows of an image in a prompt: the position of the first, the pixels uint8 (height, width, 3) of the image, and
    which of its rows they are."""

    first: int
    shape: ImageShape
    pixels: np.ndarray
    part: range


class ImagePart(NamedTuple):
    """What a prompt's rows get of an image: rows (n, E) in place of their embeddings, and products that are added to
    their hidden states after each of the first layers. at: these rows of the prompt."""

    at: slice
    rows: Array
    added: Sequence[tuple[Array, Linear]]


def read_images(
    reader: ImageReader | None, images: Sequence[PlacedImage], span: Span
) -> Generator[int, None, list[ImagePart]]:
    """Compute the images that a span has rows of, once if their parts follow each other. Yields 0, rows of layers that
    are done, after each layer of a vision encoder."""
    parts: list[ImagePart] = []
    computed = None
    for first, shape, pixels, part in images:
        begin, end = max(first, span.start), min(first + len(part), span.start + span.count)
        if begin >= end:
            continue
        assert reader is not None
        if pixels is not computed:
            rows, added = yield from reader.read(pixels, shape)
            computed = pixels
        cut = slice(begin - first + part.start, end - first + part.start)
        parts.append(ImagePart(slice(begin - span.start, end - span.start), rows[cut], [(x[cut], w) for x, w in added]))
    return parts


def parts(ops: Ops, x: Array) -> Iterator[Array]:
    """x, some rows at a time, so that what a network has between its products stays small."""
    for first in range(0, len(x), ops.prefill_rows):
        yield x[first : first + ops.prefill_rows]
