"""What towers compute: pixels of an image to rows of a prompt. One kind is one file.

It defines `Weights` and `LayerWeights`, whose fields are slots (see `engine.model.layers.slot`), and `Reader`, made of
ops, the tower, its weights, the weights of its layers, and the bytes of both. Files that begin with an underscore are
helpers.

Letters: P patches of an image, R its rows of a prompt, E hidden size of the decoder, C hidden size of the tower.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

import numpy as np

from polarlm.engine.backends.ops import Array, Ops
from polarlm.model_loaders import towers
from polarlm.model_loaders.files.weights import WeightSource
from polarlm.model_loaders.towers import ImageShape, Tower


class ImageRows(NamedTuple):
    """The rows (R, E) of an image in place of embeddings, and what is added to the hidden states of these rows after
    each of the first layers of the decoder, (R, E) each."""

    rows: Array
    added: tuple[Array, ...] = ()


class ImageReader(Protocol):
    """A tower on the device."""

    tower: Tower
    bytes: int
    """Of its weights."""

    def read(self, pixels: np.ndarray, shape: ImageShape) -> Generator[None, None, ImageRows]:
        """Compute the rows of an image: pixels uint8 (height, width, 3), scaled to `shape`. Yields after each layer, so
        that other work can run between them."""


def load_tower(
    ops: Ops, tower: Tower, source: WeightSource, progress: Callable[[int], None] | None = None
) -> ImageReader:
    """Load a tower to the device. progress: called with the bytes of the file that are done since its last call."""
    from polarlm.engine.model.weights import LayerReader, TensorReader  # which import the forward pass, and it this

    module, table, ops = importlib.import_module(f"{__name__}.{tower.kind}"), towers.tensors(tower), ops.of_layer(0)
    read = TensorReader(ops, source, progress)
    top, *layers = (LayerReader(read, read, slots, 0) for slots in (table.top, *table.layers))
    weights, of_layers = top.weights(module.Weights), [layer.weights(module.LayerWeights) for layer in layers]
    ops.wait()
    reader: ImageReader = module.Reader(ops, tower, weights, of_layers, read.bytes)
    return reader
