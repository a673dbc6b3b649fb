"""Encodes blocks with an error metric: chooses codes and norms by the cost of their errors. Decoding does not change.

A codec with a table (`Codec.rounding`) leaves two choices to the encoder: the point of each pair of values, and the
norm of the vector. `Codec.encode` takes the nearest points and the norm n = rms(x). Here x, decoded as n·y, gets

* Error feedback. The error e = x − n·y costs e·M·eᵀ. Block LDL of M turns this into a sum over pairs: squares of
  e_j + F_j·e_{<j}, each in a metric of its own. So pair j takes the point nearest to (x_j + F_j·e_{<j}) / n.
* Error feedback along tokens, for values. Attention weights of neighbouring tokens are correlated, and their errors add
  up in one sum. So token t encodes the target x_t + Σ_{i<t} B_ti·e_i, and e_{<j} above are errors against that target.
* A norm. A value's norm minimizes the cost. A key's norm is tilted: queries that attend to a key lean towards it, to
  the mean w = μ + x·(Σ − μᵀμ) / √D, where Σ and μ are the second moment and the mean of all queries, and the norm
  minimizes e·(Σ + wᵀw)·eᵀ.
* The best of several norms, for keys: a key is rounded with each of `NORM_FACTORS` times rms(x), and the codes are
  kept that cost least with their tilted norms.

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

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from polarlm.engine.codecs import Codec, Rounding
from polarlm.engine.codecs.schema.arrays import require_finite
from polarlm.engine.quantization.conditioning import centre, read_mean
from polarlm.engine.quantization.metric import Metric

NORM_FACTORS = 1.0, 0.92, 1.08, 0.85, 1.16  # norms to round with, over the rms; of equal costs the first one counts

TILT_RANGE = 0.8, 1.25  # limits of a tilted norm, over the norm of least squares

LARGEST = 1e5  # values are clipped to this: it exceeds half precision, and fourth powers times a metric fit float32

_SLAB = 1 << 19  # values rounded together: enough to hide the cost of a NumPy call, few enough for the cache


def encode_with_metric(codec: Codec, x: np.ndarray, metric: Metric | None) -> dict[str, np.ndarray]:
    """Return the codec's fields, (K, B, *shape), of x (K, B, N, D) float32, conditioned and rotated. Raises ValueError
    on NaN or infinity.

    Equal x give equal codes. A block's codes do not depend on the other blocks, except with feedback along tokens:
    there the last bits of matrix products may change the code of a value at the edge of a cell.
    """
    rounding = codec.rounding
    if metric is None or rounding is None or x.size == 0:
        return codec.encode(x)
    x = np.ascontiguousarray(np.clip(require_finite(x, codec.name), -LARGEST, LARGEST))
    encoded = []
    step = max(1, _SLAB // (x.size // x.shape[1]))
    for start in range(0, x.shape[1], step):
        rows = _by_round(x[:, start : start + step], metric.token_feedback)
        if metric.tilt_mean is not None:
            codes, norms = _best_of_norms(rounding, rows, metric)
        else:
            rounded = _round(rounding, rows, metric, np.ones(1, np.float32))
            codes, norms = rounded.codes, _fitted_norms(rounded, metric)
        both = codes.swapaxes(3, 4), norms[..., None]
        encoded.append([_by_block(rows, metric.token_feedback) for rows in both])
    codes, norms = (np.concatenate(slabs, axis=1) for slabs in zip(*encoded, strict=True))
    return rounding.assemble(codes, np.maximum(norms[..., 0], 0))  # negative where feedback reversed a vector


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


def _by_round(x: np.ndarray, token_feedback: np.ndarray | None) -> np.ndarray:
    """Rearrange x (K, B, N, D) to (K, G, T, R, D): T rounds of R tokens; each round needs the errors before it. With
    feedback along tokens (G, R) is (1, N/T · B), else (G, T, R) is (B, 1, N): products have the same shape for any
    B."""
    if token_feedback is None:
        return x[:, :, None]
    heads, blocks, _, dim = x.shape
    _, rounds, together, _ = token_feedback.shape
    by_round = x.reshape(heads, blocks, together, rounds, dim).transpose(0, 3, 2, 1, 4)
    return by_round.reshape(heads, 1, rounds, together * blocks, dim)


def _by_block(x: np.ndarray, token_feedback: np.ndarray | None) -> np.ndarray:
    """The inverse of `_by_round`: (K, G, T, R, D) → (K, B, N, D)."""
    if token_feedback is None:
        return x[:, :, 0]
    heads, _, _, rows, dim = x.shape
    _, rounds, together, _ = token_feedback.shape
    by_round = x.reshape(heads, rounds, together, rows // together, dim).transpose(0, 3, 2, 1, 4)
    return by_round.reshape(heads, rows // together, rounds * together, dim)


class _RoundedVectors(NamedTuple):
    """Vectors, and the codes that they were rounded to with some norms."""

    x: np.ndarray  # (K, G, T, D, R)
    target: np.ndarray  # (K, G, T, D, R): x plus the feedback from other tokens
    errors: np.ndarray  # (K, G, T, D, R): x − norm · point
    codes: np.ndarray  # (K, G, T, P, R)
    norms: np.ndarray  # (K, G, T, R)

    @property
    def values(self) -> np.ndarray:
        return self.x - self.errors


def _best_of_norms(rounding: Rounding, x: np.ndarray, metric: Metric) -> tuple[np.ndarray, np.ndarray]:
    """Round x (K, G, T, R, D) with each of `NORM_FACTORS` times the rms, all at once → the codes (K, G, T, P, R) of
    least cost of each vector, and their norms (K, G, T, R)."""
    count, factors = x.shape[3], np.array(NORM_FACTORS, np.float32)
    rounded = _round(rounding, np.tile(x, (1, 1, 1, len(factors), 1)), metric, np.repeat(factors, count))
    norms, costs = _tilted_norms(rounded, metric)
    best = costs.reshape(*costs.shape[:3], -1, count).argmin(axis=3)
    chosen = best * count + np.arange(count)
    codes = np.take_along_axis(rounded.codes, chosen[:, :, :, None], axis=4)
    return codes, np.take_along_axis(norms, chosen, axis=3)


def _round(rounding: Rounding, x: np.ndarray, metric: Metric, factors: np.ndarray) -> _RoundedVectors:
    """Round x (K, G, T, R, D) value by value or pair by pair, a token per round, with error feedback between them and
    tokens. factors (R,) or (1,) float32: norms, over the rms.

    Pair j of token t needs the errors of earlier pairs, and errors of pair j of earlier tokens. So all pairs with the
    same t + j form a wavefront and are rounded together, in T + P − 1 steps. The token axis is reversed inside, so that
    slices select a wavefront.
    """
    x = np.ascontiguousarray(x[:, :, ::-1].swapaxes(3, 4))  # (K, G, T, D, R)
    heads, groups, tokens, dim, rows = x.shape
    width = rounding.width
    pairs = dim // width
    norms = np.sqrt(np.square(x).mean(axis=-2)) * factors
    inverse = _inverse(norms)
    target, errors, token_feedback = x, np.zeros_like(x), None  # errors of pairs not rounded yet are 0
    target_errors = errors
    if metric.token_feedback is not None:
        target, target_errors = x.copy(), errors.copy()
        token_feedback = np.ascontiguousarray(metric.token_feedback[:, None, ::-1, 0, ::-1])
    codes = np.empty((heads, groups, tokens * pairs, rows), rounding.nearest(np.zeros((1, width), np.float32))[0].dtype)
    cells = heads, groups, tokens * pairs, width, rows
    x_cells, target_cells, error_cells, target_error_cells = (
        array.reshape(cells) for array in (x, target, errors, target_errors)
    )
    errors_by_pair = errors.reshape(heads, groups, tokens, pairs, width * rows).swapaxes(2, 3)
    pair_feedback = metric.feedback.reshape(heads, 1, pairs, width, dim)
    for front in _wavefronts(tokens, pairs):
        earlier = slice(front.tokens.start + 1, tokens)
        if token_feedback is not None and earlier.start < tokens:
            correction = token_feedback[:, :, front.tokens, None, earlier] @ errors_by_pair[:, :, front.pairs, earlier]
            target_cells[:, :, front.cells] += correction.reshape(heads, groups, -1, width, rows)
        aim = target_cells[:, :, front.cells]  # (K, G, C, width, R)
        before = (front.pairs.stop - 1) * width
        if before:
            aim = aim + pair_feedback[:, :, front.pairs, :, :before] @ target_errors[:, :, front.tokens, :before]
        scaled = (aim * inverse[:, :, front.tokens, None]).swapaxes(3, 4)
        code, points = rounding.nearest(np.ascontiguousarray(scaled.reshape(-1, width)))  # one block is a view
        codes[:, :, front.cells] = code.reshape(scaled.shape[:-1])
        values = points.reshape(scaled.shape).swapaxes(3, 4) * norms[:, :, front.tokens, None]
        error_cells[:, :, front.cells] = x_cells[:, :, front.cells] - values
        if target_errors is not errors:
            target_error_cells[:, :, front.cells] = target_cells[:, :, front.cells] - values
    arrays = x, target, errors, codes.reshape(heads, groups, tokens, pairs, rows), norms
    return _RoundedVectors._make(array[:, :, ::-1] for array in arrays)


class _Wavefront(NamedTuple):
    """Cells (token, pair) of a diagonal, by ascending pair."""

    pairs: slice
    tokens: slice
    cells: slice  # places on the flat axis token · P + pair


def _wavefronts(tokens: int, pairs: int) -> Iterator[_Wavefront]:
    """Yield the diagonals of a (tokens, pairs) array from the lower left to the upper right."""
    for top in range(tokens - 1, -pairs, -1):  # the token of pair 0, which may be outside the array
        first, stop = max(0, -top), min(pairs, tokens - top)
        yield _Wavefront(
            slice(first, stop),
            slice(top + first, top + stop),
            slice((top + first) * pairs + first, (top + stop - 1) * pairs + stop, pairs + 1),
        )


def _inverse(norms: np.ndarray) -> np.ndarray:
    """Return 1 / norms, and 0 where a norm is 0."""
    return np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("...dr,...dr->...r", a, b)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return numerator / denominator, and 1 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.ones_like(numerator), where=denominator > 0)


def _fitted_norms(rounded: _RoundedVectors, metric: Metric) -> np.ndarray:
    """Return the norms (K, G, T, R) that minimize the cost of errors against the target."""
    values = rounded.values
    weighted = metric.matrix[:, None, None] @ values
    return _ratio(_dot(rounded.target, weighted), _dot(values, weighted)) * rounded.norms


def _tilted_norms(rounded: _RoundedVectors, metric: Metric) -> tuple[np.ndarray, np.ndarray]:
    """Return the norms that minimize the cost for the queries that attend to each key, and that cost, (K, G, T, R).

    With the ratio r of a norm to the one that rounded, the error is (1 − r)·x + r·e. Sums over x and e, not over x and
    what is decoded, keep the cost precise.
    """
    assert metric.tilt_mean is not None
    x, errors, values = rounded.x, rounded.errors, rounded.values
    mean = metric.tilt_mean[:, None, None, :, None]
    second = metric.matrix[:, None, None]
    lean = (second - mean * mean.swapaxes(3, 4)) @ x  # (K, G, T, D, R)
    lean /= np.float32(np.sqrt(x.shape[3]))
    lean += mean
    weighted, lean_x, lean_e = second @ errors, _dot(x, lean), _dot(errors, lean)
    xx, xe, ee = _dot(x, second @ x), _dot(x, weighted), _dot(errors, weighted)
    with_x, with_e = xx - xe + lean_x * (lean_x - lean_e), xe - ee + lean_e * (lean_x - lean_e)
    plain = _ratio(_dot(x, values), _dot(values, values))
    low, high = TILT_RANGE
    ratio = np.clip(_ratio(with_x, with_x - with_e), low * plain, high * plain)
    rest = 1 - ratio
    costs = rest * (rest * xx + 2 * ratio * xe) + ratio * ratio * ee + np.square(rest * lean_x + ratio * lean_e)
    return ratio * rounded.norms, costs
