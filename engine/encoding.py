"""Encoding well: codes and norms are chosen by what their errors cost, not by distance. Decoding knows nothing of it.

A codec with a table (`Codec.rounding`) leaves two choices open: the point that each pair of values takes, and the norm
of the vector. Plain encoding takes the nearest points and the norm n = rms(x). Here, for a vector x with n·y for x:

* Feedback rounding. The error e = x − n·y costs e·M·eᵀ, and block LDL makes that a sum of squares of e_j + F_j·e_{<j},
  each in the measure of a block of its own. So pair j takes the point nearest to (x_j + F_j·e_{<j}) / n.
* Feedback along tokens, for values. Tokens t next to each other share attention, and their errors meet in one sum:
  x_t + Σ_{i<t} B_ti·e_i is encoded in place of x_t.
* Norms. A value's makes the cost least. A key's is tilted: queries that attend to a key lean towards it, to the mean
  w = μ + x·(Σ − μᵀμ) / √D, where Σ and μ are second moment and mean of all queries; e·(Σ + wᵀw)·eᵀ is made least.

Source of feedback rounding: LDLQ in Chee et al., "QuIP: 2-Bit Quantization of Large Language Models with Guarantees",
2023, §3; here in pairs, with the queries or the output projection in place of the inputs of a layer.
Letters: K KV heads, B blocks, N tokens in a block, D head dim, P = D / width pairs (or single values).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.codecs import Codec, Rounding
from engine.codecs._arrays import checked

_RIDGE = 0.05  # share of the mean diagonal that is added to it: statistics of 512 tokens are not to be taken literally
_TILT_RANGE = 0.8, 1.25  # how far a norm may tilt from that of least squares

_LARGEST = np.float32(1e5)  # half precision ends sooner; fourth powers, times a metric, still fit float32

_SLAB = 1 << 19  # values that are rounded together: enough to hide the cost of a step, few enough for the cache


@dataclass(frozen=True)
class Metric:
    """What an error costs, for each KV head, in the space that is stored (balanced and rotated). All float32."""

    matrix: np.ndarray  # (K, D, D) M: the error e of a vector costs e·M·eᵀ
    feedback: np.ndarray  # (K, D, D) strictly block-lower: row block j holds F_j
    tilt_second: np.ndarray | None  # (K, D, D) E[qᵀq] of the queries that attend; keys only
    tilt_mean: np.ndarray | None  # (K, D) E[q] of the same
    token_feedback: np.ndarray | None  # (N, N) strictly lower: B; values only


def key_metric(
    query_second: np.ndarray, query_mean: np.ndarray, balance: np.ndarray, rotation: np.ndarray | None, width: int
) -> Metric:
    """Of keys stored as (k / balance) @ rotation, whose errors cost what they change in the products with queries.

    query_second (K, D, D), query_mean (K, D): E[qᵀq] and E[q], weighted by attention, before balance and rotation;
    balance (K, D); rotation (D, D), None for none; width: values that the codec rounds together.
    """
    turn = np.eye(balance.shape[1]) if rotation is None else rotation.astype(np.float64)
    into = balance[:, :, None] * turn  # a query is stored as q @ into
    second = into.swapaxes(1, 2) @ query_second.astype(np.float64) @ into
    mean = (query_mean.astype(np.float64)[:, None] @ into)[:, 0]
    matrix = _ridged(second)
    return Metric(
        matrix=_stored(matrix),
        feedback=_feedback(matrix, width),
        tilt_second=_stored(second),
        tilt_mean=_stored(mean),
        token_feedback=None,
    )


def value_metric(
    output: np.ndarray,
    kv_heads: int,
    head_dim: int,
    rotation: np.ndarray | None,
    width: int,
    token_correlation: np.ndarray | None,
) -> Metric:
    """Of values stored as v @ rotation, whose errors cost what they change in the layer's output.

    output (E, H·D): the output projection; token_correlation (N,): E[p_t p_{t+lag}] of attention inside a block over
    its value at lag 0, None for tokens that are rounded on their own; rotation and width as in `key_metric`.
    """
    heads = output.reshape(len(output), kv_heads, -1, head_dim).transpose(1, 2, 0, 3).astype(np.float64)  # (K, G, E, D)
    second = (heads.swapaxes(2, 3) @ heads).mean(axis=1)
    if rotation is not None:
        second = rotation.T.astype(np.float64) @ second @ rotation
    matrix = _ridged(second)
    tokens = None
    if token_correlation is not None:
        lag = np.abs(np.subtract.outer(np.arange(len(token_correlation)), np.arange(len(token_correlation))))
        tokens = _feedback(_ridged(token_correlation.astype(np.float64)[lag][None]), 1)[0]
    return Metric(_stored(matrix), _feedback(matrix, width), None, None, tokens)


def _ridged(second: np.ndarray) -> np.ndarray:
    """(K, D, D) → the same with a share of its mean diagonal added to the diagonal."""
    size = second.shape[-1]
    return second + _RIDGE * second.trace(axis1=1, axis2=2)[:, None, None] / size * np.eye(size)


def _stored(x: np.ndarray) -> np.ndarray:
    """As BLAS takes it without a copy."""
    return np.ascontiguousarray(x, np.float32)


def _feedback(matrix: np.ndarray, width: int) -> np.ndarray:
    """Block LDL of matrix (K, D, D) float64, positive definite, from the last block backward → F (K, D, D) float32."""
    rest, feedback = matrix.copy(), np.zeros_like(matrix)
    for start in range(matrix.shape[-1] - width, 0, -width):
        block = slice(start, start + width)
        feedback[:, block, :start] = np.linalg.solve(rest[:, block, block], rest[:, block, :start])
        rest[:, :start, :start] -= rest[:, :start, block] @ feedback[:, block, :start]
    return _stored(feedback)


def encode_well(
    codec: Codec,
    x: np.ndarray,
    metric: Metric | None,
    *,
    feedback: bool = True,
    tilt: bool = True,
    tokens: bool = True,
) -> dict[str, np.ndarray]:
    """x (K, B, N, D) float32, conditioned and rotated → the codec's fields, (K, B, *shape).

    Plain `codec.encode` without a metric, or where the codec has no table. `feedback` (between pairs), `tilt` (else a
    key's norm is chosen like a value's) and `tokens` can be turned off. Raises ValueError on NaN or infinity.

    The same x has the same codes each time. A block alone has the codes that it has among others, except where tokens
    are fed back: there the sums of matrix products may differ in their last bits, and so a code at the edge of a cell.
    """
    rounding = codec.rounding
    if metric is None or rounding is None or x.size == 0:
        return codec.encode(x)
    x = np.clip(checked(x, codec.name), -_LARGEST, _LARGEST)
    between_pairs = metric.feedback if feedback else None
    between_tokens = None
    if tokens and metric.token_feedback is not None:
        between_tokens = _stored(metric.token_feedback[::-1, ::-1])  # last token first, as `_lay` has them
    parts = []
    step = max(1, _SLAB // (x.size // x.shape[1]))
    for start in range(0, x.shape[1], step):
        laid = _lay(x[:, start : start + step], waiting=between_tokens is not None)
        rounded = _round(rounding, np.ascontiguousarray(laid.swapaxes(3, 4)), between_pairs, between_tokens)
        tilted = tilt and metric.tilt_second is not None
        norms = _tilted(rounded, metric) if tilted else _fitted(rounded, metric.matrix, between_tokens)
        both = rounded.codes.swapaxes(3, 4), norms[..., None]
        parts.append([_unlay(part, waiting=between_tokens is not None) for part in both])
    codes, norms = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return rounding.assemble(codes, np.maximum(norms[..., 0], 0))  # negative where feedback turned a vector around


def _lay(x: np.ndarray, waiting: bool) -> np.ndarray:
    """x (K, B, N, D) → (K, G, T, R, D): T tokens that wait for each other, the last one first, and R that do not.

    (G, T, R) is (1, N, B) with feedback along tokens. Without it no token waits, (B, 1, N), and the matrix products of
    a block have the same shape whatever B is.
    """
    return x[:, None, :, ::-1].swapaxes(2, 3) if waiting else x[:, :, None]


def _unlay(laid: np.ndarray, waiting: bool) -> np.ndarray:
    """The inverse of `_lay`."""
    return laid.swapaxes(2, 3)[:, 0, :, ::-1] if waiting else laid[:, :, 0]


class _Rounded(NamedTuple):
    """Vectors and what they were rounded to."""

    x: np.ndarray  # (K, G, T, D, R)
    errors: np.ndarray  # (K, G, T, D, R): x − norm · point
    codes: np.ndarray  # (K, G, T, P, R)
    norms: np.ndarray  # (K, G, T, R)

    @property
    def read(self) -> np.ndarray:
        """norm · point, (K, G, T, D, R): what would be read back with these norms."""
        return self.x - self.errors


def _round(
    rounding: Rounding, x: np.ndarray, between_pairs: np.ndarray | None, between_tokens: np.ndarray | None
) -> _Rounded:
    """Round x (K, G, T, D, R) with feedback between pairs (K, D, D) and between tokens (T, T), the last token first.

    Pair j of token t waits for the pairs before it, and for pair j of the tokens before. All pairs with the same t + j
    can be rounded together, which makes T + P − 1 steps.
    """
    heads, groups, tokens, dim, rows = x.shape
    width = rounding.width
    pairs = dim // width
    norms = np.sqrt(np.square(x).mean(axis=-2))
    inverse = _inverse(norms)
    errors = np.zeros_like(x)  # of what has not been rounded yet: 0
    codes = np.empty((heads, groups, tokens * pairs, rows), rounding.nearest(np.zeros((1, width), np.float32))[0].dtype)
    x_cells, error_cells = (array.reshape(heads, groups, tokens * pairs, width, rows) for array in (x, errors))
    errors_by_pair = errors.reshape(heads, groups, tokens, pairs, width * rows).swapaxes(2, 3)
    rows_of_f = None if between_pairs is None else between_pairs.reshape(heads, 1, pairs, width, dim)
    for front in _fronts(tokens, pairs):
        target = x_cells[:, :, front.cells]  # (K, G, C, width, R)
        before = (front.pairs.stop - 1) * width
        if rows_of_f is not None and before:
            target = target + rows_of_f[:, :, front.pairs, :, :before] @ errors[:, :, front.tokens, :before]
        earlier = slice(front.tokens.start + 1, tokens)
        if between_tokens is not None and earlier.start < tokens:
            made_up = between_tokens[front.tokens, None, earlier] @ errors_by_pair[:, :, front.pairs, earlier]
            target = target + made_up.reshape(target.shape)
        scaled = (target * inverse[:, :, front.tokens, None]).swapaxes(3, 4)
        code, points = rounding.nearest(scaled.reshape(-1, width))
        codes[:, :, front.cells] = code.reshape(scaled.shape[:-1])
        taken = points.reshape(scaled.shape).swapaxes(3, 4) * norms[:, :, front.tokens, None]
        error_cells[:, :, front.cells] = x_cells[:, :, front.cells] - taken
    return _Rounded(x, errors, codes.reshape(heads, groups, tokens, pairs, rows), norms)


class _Front(NamedTuple):
    """Cells (token, pair) of a diagonal, by ascending pair."""

    pairs: slice
    tokens: slice
    cells: slice  # of the flat axis token · P + pair


def _fronts(tokens: int, pairs: int) -> Iterator[_Front]:
    """The diagonals of a (tokens, pairs) array from the lower left to the upper right."""
    for top in range(tokens - 1, -pairs, -1):  # the token of pair 0, were it in the array
        first, stop = max(0, -top), min(pairs, tokens - top)
        yield _Front(
            slice(first, stop),
            slice(top + first, top + stop),
            slice((top + first) * pairs + first, (top + stop - 1) * pairs + stop, pairs + 1),
        )


def _inverse(norms: np.ndarray) -> np.ndarray:
    return np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a, b (..., D, R) → (..., R)."""
    return np.einsum("...dr,...dr->...r", a, b)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """above / below, and 1 for vectors without length."""
    return np.divide(above, below, out=np.ones_like(above), where=below > 0)


def _fitted(rounded: _Rounded, matrix: np.ndarray, between_tokens: np.ndarray | None) -> np.ndarray:
    """Norms (K, G, T, R) of least cost by `matrix` (K, D, D); what tokens feed back is part of the target."""
    target, read = rounded.x, rounded.read
    if between_tokens is not None:
        target = target + (between_tokens @ rounded.errors.swapaxes(2, 3)).swapaxes(2, 3)
    weighted = matrix[:, None, None] @ read
    return _ratio(_dot(target, weighted), _dot(read, weighted)) * rounded.norms


def _tilted(rounded: _Rounded, metric: Metric) -> np.ndarray:
    """Norms (K, G, T, R) of least cost to the queries that attend to each key."""
    assert metric.tilt_second is not None
    assert metric.tilt_mean is not None
    x, read = rounded.x, rounded.read
    mean = metric.tilt_mean[:, None, None, :, None]
    second = metric.tilt_second[:, None, None]
    lean = (second - mean * mean.swapaxes(3, 4)) @ x  # (K, G, T, D, R)
    lean /= np.float32(np.sqrt(x.shape[3]))
    lean += mean
    lean_x, lean_read, weighted = _dot(x, lean), _dot(read, lean), second @ read
    tilted = _ratio(_dot(x, weighted) + lean_x * lean_read, _dot(read, weighted) + np.square(lean_read))
    plain = _ratio(_dot(x, read), _dot(read, read))
    low, high = _TILT_RANGE
    return np.clip(tilted, low * plain, high * plain) * rounded.norms
