"""Encoding well: codes and norms are chosen by what their errors cost, not by distance. Decoding knows nothing of it.

A codec with a table (`Codec.rounding`) leaves two choices open: the point that each pair of values takes, and the norm
of the vector. Plain encoding takes the nearest points and the norm n = rms(x). Here, for a vector x with n·y for x:

* Feedback rounding. The error e = x − n·y costs e·M·eᵀ, and block LDL makes that a sum of squares of e_j + F_j·e_{<j},
  each in the measure of a block of its own. So pair j takes the point nearest to (x_j + F_j·e_{<j}) / n.
* Paths (`PathRounding`): the one with the least sum of those squares, each survivor with its own e_{<j}.
* Feedback along tokens, for values. Tokens t next to each other share attention, and their errors meet in one sum:
  x_t + Σ_{i<t} B_ti·e_i is encoded in place of x_t, and e_{<j} above are errors against that. Paths are searched for a
  quarter of the tokens at once, every fourth, which costs a tenth of what this gains.
* Norms. A value's makes the cost least. A key's is tilted: queries that attend to a key lean towards it, to the mean
  w = μ + x·(Σ − μᵀμ) / √D, where Σ and μ are second moment and mean of all queries; e·(Σ + wᵀw)·eᵀ is made least.

Source of feedback rounding: LDLQ in Chee et al., "QuIP: 2-Bit Quantization of Large Language Models with Guarantees",
2023, §3; here in pairs, with the queries or the output projection in place of the inputs of a layer.
Letters: K KV heads, B blocks, N tokens in a block, D head dim, P = D / width pairs (or single values).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from engine.codecs import Codec, PathRounding, Rounding
from engine.codecs._arrays import checked
from engine.quantization.metric import Metric

TILT_RANGE = 0.8, 1.25  # how far a norm may tilt from that of least squares

LARGEST = 1e5  # half precision ends sooner; fourth powers, times a metric, still fit float32

_SLAB = 1 << 19  # values that are rounded together: enough to hide the cost of a step, few enough for the cache


def encode_well(codec: Codec, x: np.ndarray, metric: Metric | None) -> dict[str, np.ndarray]:
    """x (K, B, N, D) float32, conditioned and rotated → the codec's fields, (K, B, *shape).

    Plain `codec.encode` without a metric, or where the codec has no table. Raises ValueError on NaN or infinity.

    The same x has the same codes each time. A block alone has the codes that it has among others, except where tokens
    are fed back or paths searched: there the sums of matrix products may differ in their last bits, and so a code at
    the edge of a cell.
    """
    rounding = codec.rounding
    if metric is None or rounding is None or x.size == 0:
        return codec.encode(x)
    x = np.ascontiguousarray(np.clip(checked(x, codec.name), -LARGEST, LARGEST))
    parts = []
    step = max(1, _SLAB // (x.size // x.shape[1]))
    for start in range(0, x.shape[1], step):
        laid = _lay(x[:, start : start + step], metric.token_feedback)
        if isinstance(rounding, PathRounding):
            rounded = _search(rounding, laid, metric)
        else:
            rounded = _round(rounding, laid, metric)
        norms = _fitted(rounded, metric) if metric.tilt_second is None else _tilted(rounded, metric)
        both = rounded.codes.swapaxes(3, 4), norms[..., None]
        parts.append([_unlay(part, metric.token_feedback) for part in both])
    codes, norms = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return rounding.assemble(codes, np.maximum(norms[..., 0], 0))  # negative where feedback turned a vector around


def _lay(x: np.ndarray, token_feedback: np.ndarray | None) -> np.ndarray:
    """x (K, B, N, D) → (K, G, T, R, D): T turns of tokens that wait for each other, and R tokens that do not.

    With feedback along tokens (G, R) is (1, N/T · B). Without it no token waits, (G, T, R) is (B, 1, N), and the matrix
    products of a block have the same shape whatever B is.
    """
    if token_feedback is None:
        return x[:, :, None]
    heads, blocks, _, dim = x.shape
    _, turns, together, _ = token_feedback.shape
    by_turn = x.reshape(heads, blocks, together, turns, dim).transpose(0, 3, 2, 1, 4)
    return by_turn.reshape(heads, 1, turns, together * blocks, dim)


def _unlay(laid: np.ndarray, token_feedback: np.ndarray | None) -> np.ndarray:
    """The inverse of `_lay`."""
    if token_feedback is None:
        return laid[:, :, 0]
    heads, _, _, rows, dim = laid.shape
    _, turns, together, _ = token_feedback.shape
    by_turn = laid.reshape(heads, turns, together, rows // together, dim).transpose(0, 3, 2, 1, 4)
    return by_turn.reshape(heads, rows // together, turns * together, dim)


class _Rounded(NamedTuple):
    """Vectors and what they were rounded to."""

    x: np.ndarray  # (K, G, T, D, R)
    target: np.ndarray  # (K, G, T, D, R): x and what other tokens fed back
    errors: np.ndarray  # (K, G, T, D, R): x − norm · point
    codes: np.ndarray  # (K, G, T, P, R)
    norms: np.ndarray  # (K, G, T, R)

    @property
    def read(self) -> np.ndarray:
        """norm · point, (K, G, T, D, R): what would be read back with these norms."""
        return self.x - self.errors


def _search(rounding: PathRounding, x: np.ndarray, metric: Metric) -> _Rounded:
    """Round x (K, G, T, R, D), turn by turn, to the best paths."""
    heads, groups, turns, rows, dim = x.shape
    norms = np.sqrt(np.square(x).mean(axis=-1))
    inverse = _inverse(norms)
    target, errors, codes = x.copy(), np.empty_like(x), []
    for turn in range(turns):
        if turn and metric.token_feedback is not None:
            size = metric.token_feedback.shape[2] * turn
            before = errors[:, :, :turn].reshape(heads, groups, size, -1)  # (K, 1, tokens, B·D)
            made_up = metric.token_feedback[:, None, turn, :, :size] @ before
            target[:, :, turn] += made_up.reshape(heads, groups, rows, dim)
        unit = target[:, :, turn] * inverse[:, :, turn, :, None]
        unit = unit.reshape(heads, -1, dim)
        code, points = rounding.best_path(unit, metric.feedback, metric.weights, metric.survivors)
        codes.append(code.reshape(heads, groups, rows, -1))
        errors[:, :, turn] = x[:, :, turn] - points.reshape(heads, groups, rows, dim) * norms[:, :, turn, :, None]
    by_row = x, target, errors, np.stack(codes, axis=2)
    return _Rounded._make([*(part.swapaxes(3, 4) for part in by_row), norms])


def _round(rounding: Rounding, x: np.ndarray, metric: Metric) -> _Rounded:
    """Round x (K, G, T, R, D), a token in a turn, with feedback between pairs and between tokens.

    Pair j of token t waits for the pairs before it, and for pair j of the tokens before. All pairs with the same t + j
    can be rounded together, which makes T + P − 1 steps. Inside, the last token comes first: `_fronts` says why.
    """
    x = np.ascontiguousarray(x[:, :, ::-1].swapaxes(3, 4))  # (K, G, T, D, R)
    heads, groups, tokens, dim, rows = x.shape
    width = rounding.width
    pairs = dim // width
    norms = np.sqrt(np.square(x).mean(axis=-2))
    inverse = _inverse(norms)
    target, errors, between_tokens = x, np.zeros_like(x), None  # errors of what has not been rounded yet: 0
    strays = errors  # against the target
    if metric.token_feedback is not None:
        target, strays = x.copy(), errors.copy()
        between_tokens = np.ascontiguousarray(metric.token_feedback[:, None, ::-1, 0, ::-1])
    codes = np.empty((heads, groups, tokens * pairs, rows), rounding.nearest(np.zeros((1, width), np.float32))[0].dtype)
    cells = heads, groups, tokens * pairs, width, rows
    x_cells, target_cells, error_cells, stray_cells = (part.reshape(cells) for part in (x, target, errors, strays))
    errors_by_pair = errors.reshape(heads, groups, tokens, pairs, width * rows).swapaxes(2, 3)
    rows_of_f = metric.feedback.reshape(heads, 1, pairs, width, dim)
    for front in _fronts(tokens, pairs):
        earlier = slice(front.tokens.start + 1, tokens)
        if between_tokens is not None and earlier.start < tokens:
            made_up = between_tokens[:, :, front.tokens, None, earlier] @ errors_by_pair[:, :, front.pairs, earlier]
            target_cells[:, :, front.cells] += made_up.reshape(heads, groups, -1, width, rows)
        aim = target_cells[:, :, front.cells]  # (K, G, C, width, R)
        before = (front.pairs.stop - 1) * width
        if before:
            aim = aim + rows_of_f[:, :, front.pairs, :, :before] @ strays[:, :, front.tokens, :before]
        scaled = (aim * inverse[:, :, front.tokens, None]).swapaxes(3, 4)
        code, points = rounding.nearest(scaled.reshape(-1, width))
        codes[:, :, front.cells] = code.reshape(scaled.shape[:-1])
        taken = points.reshape(scaled.shape).swapaxes(3, 4) * norms[:, :, front.tokens, None]
        error_cells[:, :, front.cells] = x_cells[:, :, front.cells] - taken
        if strays is not errors:
            stray_cells[:, :, front.cells] = target_cells[:, :, front.cells] - taken
    parts = x, target, errors, codes.reshape(heads, groups, tokens, pairs, rows), norms
    return _Rounded._make(part[:, :, ::-1] for part in parts)


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


def _fitted(rounded: _Rounded, metric: Metric) -> np.ndarray:
    """Norms (K, G, T, R) of least cost; what tokens feed back is part of the target."""
    read = rounded.read
    weighted = metric.matrix[:, None, None] @ read
    return _ratio(_dot(rounded.target, weighted), _dot(read, weighted)) * rounded.norms


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
    low, high = TILT_RANGE
    return np.clip(tilted, low * plain, high * plain) * rounded.norms
