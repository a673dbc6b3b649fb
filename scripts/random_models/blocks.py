"""Random blocks of weight formats, scaled so that a model's values neither grow nor vanish."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type


def random_blocks(rng: np.random.Generator, rows: int, columns: int, type: Type) -> np.ndarray:
    """A matrix of random blocks: (rows, bytes of a row) uint8. Its values have a mean near 0 and variance 1/columns."""
    values, nbytes = gguf.GGML_QUANT_SIZES[type]
    blocks = rng.integers(256, size=(rows, columns // values, nbytes), dtype=np.uint8)
    if type in _SCALES:
        _SCALES[type](rng, blocks, columns**-0.5)
    else:
        _scale_lattice(blocks, type, columns**-0.5)
    return blocks.reshape(rows, -1)


def _scale_q8_0(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """d, then 32 int8: all 256 of them have a standard deviation of 74."""
    _set_half(blocks, 0, size / 74)


def _scale_q4_0(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """d, then 32 codes. Values are d · (q − 8), whose mean is −0.5 d; half of the blocks have a negative d."""
    _set_half(blocks, 0, size / float(np.sqrt(np.mean((np.arange(16) - 8.0) ** 2))))
    blocks[..., 1] |= 128 * rng.integers(2, size=blocks.shape[:-1], dtype=np.uint8)  # the sign


def _scale_iq4_xs(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """d, then scales of 6 bits and codes. Values are d · (scale − 32) · table[q]; both factors are random."""
    scales, table = np.arange(64) - 32.0, np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    _set_half(blocks, 0, size / float(np.sqrt(np.mean(scales**2) * np.mean(table**2))))


def _scale_q4_k(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """d and dmin, then scales and minima of 6 bits. Values are d · scale · q − dmin · minimum; the mean of q is 7.5."""
    _set_half(blocks, 0, size / 257)
    _set_half(blocks, 2, 7.5 * size / 257)


def _scale_q6_k(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """192 bytes of codes, 16 int8 scales, d. Values are d · scale · (q − 32); q has a standard deviation of 18.5."""
    scales = rng.integers(20, 60, size=blocks[..., 192:208].shape)
    blocks[..., 192:208] = scales
    _set_half(blocks, 208, size / (18.5 * float(np.sqrt(np.mean(scales**2)))))


def _normal_bf16(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """A value of two bytes: the upper half of a float32."""
    values = size * rng.standard_normal(blocks.shape[:-1], np.float32)
    blocks[:] = values[..., None].view("<u2")[..., 1:].view(np.uint8)


def _scale_mxfp4(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """The exponent of a power of two, then 32 codes, whose values have a standard deviation of 2.9."""
    blocks[..., 0] = 127 + round(float(np.log2(size / 2.9)))


def _scale_tq1_0(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """52 bytes of digits, d. Values are d · (digit − 1), each a third of them."""
    _set_half(blocks, 52, size / float(np.sqrt(2 / 3)))


def _normal_f32(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    blocks[:] = (size * rng.standard_normal(blocks.shape[:-1], np.float32))[..., None].view(np.uint8)


def _scale_lattice(blocks: np.ndarray, type: Type, size: float) -> None:
    """d, then indices of points, scales and signs: what these make of d = 1 is measured."""
    _set_half(blocks, 0, 1)
    sample = blocks.reshape(-1, blocks.shape[-1])[:4096]
    _set_half(blocks, 0, size / float(gguf.dequantize(sample, type).std()))


def _set_half(blocks: np.ndarray, at: int, value: float) -> None:
    blocks[..., at : at + 2] = np.array(value, "<f2").reshape(1).view(np.uint8)


_SCALES: dict[Type, Callable[[np.random.Generator, np.ndarray, float], None]] = {
    Type.Q8_0: _scale_q8_0,
    Type.Q4_0: _scale_q4_0,
    Type.Q4_K: _scale_q4_k,
    Type.Q6_K: _scale_q6_k,
    Type.IQ4_XS: _scale_iq4_xs,
    Type.BF16: _normal_bf16,
    Type.F32: _normal_f32,
    Type.MXFP4: _scale_mxfp4,
    Type.TQ1_0: _scale_tq1_0,
}
