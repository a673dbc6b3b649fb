"""What a kernel needs to encode the keys or values of one layer; made together with the layer's cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.codecs import EncodedTiles, Tiles
from polarlm.engine.backends.native.kernels.encode.paths import path_tables
from polarlm.engine.backends.native.kernels.encode.unit import LANES, ROW_PAD, TABLES, Block, EncodeArguments
from polarlm.engine.codecs.trellis import TrellisTable
from polarlm.engine.jit.lang import Kernel
from polarlm.engine.jit.run.workers import SCRATCH
from polarlm.engine.quantization.metric import Metric


@dataclass(frozen=True, eq=False)
class Encoder:
    """A kernel and the arrays of its error metric.

    addresses: of these arrays for each KV head, int64 (K, fields of `Block`); 0 in other fields. arrays: name → array,
    referenced here to keep them alive.
    """

    kernel: Kernel[EncodeArguments]
    addresses: np.ndarray
    arrays: dict[str, np.ndarray]


def encoder(tiles: Tiles, format: CacheFormat, side: int) -> Encoder | str:
    """The encoder of keys (side 0) or values (1) into tiles, or the reason why NumPy must encode them."""
    codec, metric = ((format.codec_k, format.metric_k), (format.codec_v, format.metric_v))[side]
    if not isinstance(tiles, EncodedTiles):
        return f"no kernel encodes {codec.name}"
    if (kernel := tiles.encoder(format, side)) is None:
        if codec.rounding is not None and not isinstance(codec.rounding, TABLES):
            return f"no kernel rounds to the table of {codec.name}"
        return (
            f"{SCRATCH >> 10} KiB of scratch memory are too few to encode {format.block_size} tokens of "
            f"{format.head_dim} channels as {codec.name}; a smaller block_size needs less"
        )
    arrays = {} if metric is None else _arrays(metric)
    if isinstance(codec.rounding, TrellisTable):
        arrays["paths"] = path_tables(codec.rounding.bits).content[None]
    addresses = np.zeros((format.kv_heads, len(Block._fields)), np.int64)
    for name, array in arrays.items():
        addresses[:, Block._fields.index(name)] = by_head(array, format.kv_heads)
    return Encoder(kernel, addresses, arrays)


def by_head(array: np.ndarray, heads: int) -> np.ndarray:
    """Addresses (K,) int64 of each head's part of array (K or 1, …), which must be contiguous."""
    assert array[0].flags.c_contiguous
    step = array.strides[0] if len(array) == heads else 0
    return array.ctypes.data + np.arange(heads, dtype=np.int64) * step


def _arrays(metric: Metric) -> dict[str, np.ndarray]:
    arrays = {"feedback": metric.feedback, "matrix": metric.matrix, "weights": metric.weights}
    if metric.tilt_mean is not None:
        arrays["mean_query"] = metric.tilt_mean
    if (token_feedback := metric.token_feedback) is not None and token_feedback.shape[
        2
    ] > 1:  # rounds of several tokens
        arrays["token_feedback"] = np.ascontiguousarray(token_feedback.swapaxes(2, 3))
    elif token_feedback is not None:
        width = metric.feedback.shape[1] // metric.weights.shape[1]
        arrays["feedback"] = diagonals(metric.feedback, width)
        arrays["token_feedback"] = diagonals_of_tokens(token_feedback)
    return arrays


def diagonals(feedback: np.ndarray, width: int) -> np.ndarray:
    """feedback (K, D, D) → (K, P + 1, width, width, P rounded up to 16) float32, as `Encoding` describes it."""
    heads, dim, _ = feedback.shape
    pairs = dim // width
    blocks = feedback.reshape(heads, pairs, width, pairs, width)
    out = np.zeros((heads, pairs + 1, width, width, -(-pairs // LANES) * LANES), np.float32)
    for lag in range(1, pairs):
        rows = np.arange(lag, pairs)
        out[:, lag, :, :, lag:pairs] = blocks[:, rows, :, rows - lag].transpose(1, 2, 3, 0)
    return out


def diagonals_of_tokens(feedback: np.ndarray) -> np.ndarray:
    """feedback (K or 1, N, 1, N) → (K or 1, N + 1, N + 32) float32, as `Encoding` describes it."""
    size = feedback.shape[-1]
    out = np.zeros((len(feedback), size + 1, size + 2 * ROW_PAD), np.float32)
    for lag in range(1, size):
        diagonal = feedback[:, :, 0].diagonal(-lag, axis1=1, axis2=2)  # for tokens lag, …, N − 1
        out[:, lag, ROW_PAD : ROW_PAD + size - lag] = diagonal[:, ::-1]
    return out
