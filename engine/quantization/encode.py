"""Encodes blocks with an error metric: chooses codes and norms by the cost of their errors. Decoding does not change.

A codec with a table (`Codec.rounding`) leaves two choices to the encoder: the point of each pair of values, and the
norm of the vector. `Codec.encode` takes the nearest points and the norm n = rms(x). Here x, decoded as n·y, gets

* Error feedback. The error e = x − n·y costs e·M·eᵀ. Block LDL of M turns this into a sum over pairs: squares of
  e_j + F_j·e_{<j}, each in a metric of its own. So pair j takes the point nearest to (x_j + F_j·e_{<j}) / n.
* A norm. A value's norm minimizes the cost. A key's norm is tilted: queries that attend to a key lean towards it, to
  the mean w = μ + x·(Σ − μᵀμ) / √D, where Σ and μ are the second moment and the mean of all queries, and the norm
  minimizes e·(Σ + wᵀw)·eᵀ.
* The best of several norms, for keys: a key is rounded with each of `NORM_FACTORS` times rms(x), and the codes are
  kept that cost least with their tilted norms. A value is rounded with rms(x).

Example with two pairs: M = [[I, .9·I], [.9·I, I]] has F_1 = .9·I. The vector x = (.4, 0 | .3, 0) has n = .25, and a
table with the coordinates 0 and ±4, scaled by n, offers 0 and ±1. Pair 0 takes (0, 0), so e_0 = (.4, 0). Pair 1 aims at
.3 + .9·.4 = .66 and takes (1, 0), although (0, 0) is nearer to .3. The errors cost .146 instead of .466:

>>> M = np.kron([[1, .9], [.9, 1]], np.eye(2))
>>> for points in (0, 0, 1, 0), (0, 0, 0, 0):
...     e = np.array([.4, 0, .3, 0]) - points
...     print(f"{e @ M @ e:.3f}")
0.146
0.466

The norm of least cost is then .66·n, and the error costs .030.

Source of error feedback: LDLQ in Chee et al., "QuIP: 2-Bit Quantization of Large Language Models with Guarantees",
2023, §3, which equals GPTQ (Frantar et al., 2022); here it is applied to pairs, with the queries or the output
projection in place of the inputs of a layer.
Letters: K KV heads, B blocks, N tokens in a block, D head dim, P = D / width pairs (or single values).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polarlm.engine.codecs import Codec, Rounding
from polarlm.engine.codecs.schema.arrays import require_finite
from polarlm.engine.quantization.conditioning import centre, read_mean
from polarlm.engine.quantization.metric import Metric

# Norms to round keys with, over the rms; of equal costs the first one counts.
NORM_FACTORS = 1.0, 0.92, 1.08, 0.85, 1.16

TILT_RANGE = 0.8, 1.25  # limits of a tilted norm, over the norm of least squares

LARGEST = 1e5  # values are clipped to this: it exceeds half precision, and fourth powers times a metric fit float32

_SLAB = 1 << 19  # values rounded together: enough to hide the cost of a NumPy call, few enough for the cache


def encode_with_metric(codec: Codec, x: np.ndarray, metric: Metric | None) -> dict[str, np.ndarray]:
    """Return the codec's fields, (K, B, *shape), of x (K, B, N, D) float32, conditioned and rotated. Raises ValueError
    on NaN or infinity.

    Equal x give equal codes. A block's codes do not depend on the other blocks.
    """
    rounding = codec.rounding
    if metric is None or rounding is None:
        return codec.encode(x)
    x = np.ascontiguousarray(np.clip(require_finite(x, codec.name), -LARGEST, LARGEST))
    encoded = []
    step = max(1, _SLAB // (x.size // x.shape[1]))
    for start in range(0, x.shape[1], step):
        encoded.append(_best_of_norms(rounding, x[:, start : start + step], metric))
    codes, norms = (np.concatenate(slabs, axis=1) for slabs in zip(*encoded, strict=True))
    return rounding.assemble(codes, norms)


def norm_factors(is_tilted: bool) -> tuple[float, ...]:
    """Return the norms to round with, over the rms: several where norms are tilted, as those of keys are."""
    return NORM_FACTORS if is_tilted else NORM_FACTORS[:1]


def encode_centred(
    codec: Codec, x: np.ndarray, metric: Metric | None, mean_bits: int = 0
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the codec's fields of x (K, B, N, D), and the fields of the blocks' means: none if `mean_bits` is 0."""
    mean: dict[str, np.ndarray] = {}
    if mean_bits:
        x, mean = centre(x, mean_bits)
    return encode_with_metric(codec, x, metric), mean


def read_back(codec: Codec, x: np.ndarray, metric: Metric | None, block_size: int, mean_bits: int = 0) -> np.ndarray:
    """Return x (K, S, D), S ≤ block_size, after it was encoded and decoded as one block, padded by `fill_up`."""
    block = fill_up(x, block_size)[:, None]
    return decode_centred(codec, *encode_centred(codec, block, metric, mean_bits))[:, 0, : x.shape[1]]


def fill_up(x: np.ndarray, block_size: int) -> np.ndarray:
    """Pad x (K, S, D), S ≤ block_size, to (K, block_size, D) with its mean over the S tokens."""
    heads, tokens, head_dim = x.shape
    filling = np.broadcast_to(x.mean(axis=1, keepdims=True), (heads, block_size - tokens, head_dim))
    return np.concatenate([x, filling], axis=1)


def decode_centred(codec: Codec, fields: dict[str, np.ndarray], mean: dict[str, np.ndarray]) -> np.ndarray:
    """Decode what `encode_centred` returns to (K, B, N, D) float32."""
    values = codec.decode(fields)
    return values + read_mean(mean)[..., None, :] if mean else values


def _best_of_norms(rounding: Rounding, x: np.ndarray, metric: Metric) -> tuple[np.ndarray, np.ndarray]:
    """Round x (K, B, N, D) with each norm that is tried, all at once → the codes (K, B, N, P) of least cost of each
    vector, and their norms (K, B, N)."""
    count, factors = x.shape[2], np.array(norm_factors(metric.tilt_mean is not None), np.float32)
    rounded = _round(rounding, np.tile(x, (1, 1, len(factors), 1)), metric, np.repeat(factors, count))
    norms, costs = _fitted_norms(rounded, metric)
    best = costs.reshape(*costs.shape[:2], -1, count).argmin(axis=2)
    chosen = best * count + np.arange(count)
    codes = np.take_along_axis(rounded.codes, chosen[:, :, None], axis=3)
    return codes.swapaxes(2, 3), np.take_along_axis(norms, chosen, axis=2)


class _RoundedVectors(NamedTuple):
    """Vectors, and the codes that they were rounded to with some norms. R: tokens, once for each norm."""

    x: np.ndarray  # (K, B, D, R)
    errors: np.ndarray  # (K, B, D, R): x − norm · point
    codes: np.ndarray  # (K, B, P, R)
    norms: np.ndarray  # (K, B, R)


def _round(rounding: Rounding, x: np.ndarray, metric: Metric, factors: np.ndarray) -> _RoundedVectors:
    """Round x (K, B, R, D) value by value or pair by pair, all vectors at once, with feedback of the errors of earlier
    ones. factors (R,) float32: norms, over the rms."""
    x = np.ascontiguousarray(x.swapaxes(2, 3))  # (K, B, D, R)
    heads, blocks, dim, rows = x.shape
    width = rounding.width
    norms = np.sqrt(np.square(x).mean(axis=-2)) * factors
    inverse, errors, codes = _inverse(norms), np.empty_like(x), []
    for start in range(0, dim, width):
        pair = slice(start, start + width)
        aim = x[:, :, pair]
        if start:
            aim = aim + metric.feedback[:, None, pair, :start] @ errors[:, :, :start]
        scaled = (aim * inverse[:, :, None]).swapaxes(2, 3)
        code, points = rounding.nearest(np.ascontiguousarray(scaled.reshape(-1, width)))  # one block is a view
        codes.append(code.reshape(heads, blocks, rows))
        errors[:, :, pair] = x[:, :, pair] - points.reshape(scaled.shape).swapaxes(2, 3) * norms[:, :, None]
    return _RoundedVectors(x, errors, np.stack(codes, axis=2), norms)


def _inverse(norms: np.ndarray) -> np.ndarray:
    """Return 1 / norms, and 0 where a norm is 0."""
    return np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("...dr,...dr->...r", a, b)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return numerator / denominator, and 1 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.ones_like(numerator), where=denominator > 0)


def _fitted_norms(rounded: _RoundedVectors, metric: Metric) -> tuple[np.ndarray, np.ndarray]:
    """Return the norms that minimize the cost, of keys for the queries that attend to each, and that cost, (K, B, R).

    With the ratio r of a norm to the one that rounded, the error is (1 − r)·x + r·e. Sums over x and e, not over x and
    what is decoded, keep the cost precise.
    """
    x, errors, _, norms = rounded
    second = metric.matrix[:, None]
    weighted = second @ errors
    xx, xe, ee = _dot(x, second @ x), _dot(x, weighted), _dot(errors, weighted)
    if metric.tilt_mean is None:
        ratio = _ratio(xx - xe, xx - 2 * xe + ee)
    else:
        mean = metric.tilt_mean[:, None, :, None]
        lean = (second - mean * mean.swapaxes(2, 3)) @ x  # (K, B, D, R)
        lean /= np.float32(np.sqrt(x.shape[2]))
        lean += mean
        values, lean_x, lean_e = x - errors, _dot(x, lean), _dot(errors, lean)
        with_x, with_e = xx - xe + lean_x * (lean_x - lean_e), xe - ee + lean_e * (lean_x - lean_e)
        plain = _ratio(_dot(x, values), _dot(values, values))
        low, high = TILT_RANGE
        ratio = np.clip(_ratio(with_x, with_x - with_e), low * plain, high * plain)
    rest = 1 - ratio
    costs = rest * (rest * xx + 2 * ratio * xe) + ratio * ratio * ee
    if metric.tilt_mean is not None:
        costs += np.square(rest * lean_x + ratio * lean_e)
    return np.maximum(ratio * norms, 0), costs  # negative where feedback reversed a vector
