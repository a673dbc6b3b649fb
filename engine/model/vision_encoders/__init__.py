"""What vision encoders compute: pixels of an image to rows of a prompt. One kind is one file.

It defines `Weights` and `LayerWeights`, whose fields are slots (see `engine.model.layers.slot`), and `Reader`, made of
ops, the vision encoder, its weights, the weights of its layers, and the bytes of both. Files that begin with an
underscore are helpers.

Letters: P patches of an image, R its rows of a prompt, E hidden size of the decoder, C hidden size of the vision
encoder.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from polarlm.engine.backends.ops import Array, Ops
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


def parts(ops: Ops, x: Array) -> Iterator[Array]:
    """x, some rows at a time, so that what a network has between its products stays small."""
    for first in range(0, len(x), ops.prefill_rows):
        yield x[first : first + ops.prefill_rows]
