"""AWQ: 4 bits, a scale and a zero point for each group of inputs, packed along the outputs: w = scale * (q - zero)."""

from __future__ import annotations

import numpy as np

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensors import PLAIN, StoredTensor
from polarlm.model_loaders.quantized.matrix import (
    Codes,
    Parts,
    columns_of,
    group_size,
    integer_type,
    matrix,
    minus_zeros,
    numbers,
    part,
    unpack,
)

_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where a word has each of its 8 outputs


def read(parts: Parts, settings: Fields) -> StoredTensor | None:
    if "qweight" not in parts:
        return None
    packed = part(parts, "qweight", None, ("I32",))
    columns, words = packed.shape
    group = group_size(settings, columns)
    scales = part(parts, "scales", (columns // group, 8 * words), PLAIN)
    zeros = part(parts, "qzeros", (columns // group, words), ("I32",))

    def decode(start: int, stop: int) -> Codes:
        first, last = start // 8, -(-stop // 8)
        here = slice(start - 8 * first, stop - 8 * first)
        codes = _outputs(columns_of(packed, first, last))[here]
        of_groups = _outputs(numbers(zeros)[:, first:last])[here]
        return Codes(minus_zeros(codes, of_groups), numbers(scales)[:, start:stop].T)

    return matrix(packed, (8 * words, columns), integer_type(4, group, symmetric=False), decode)


def _outputs(words: np.ndarray) -> np.ndarray:
    """(n, words) → codes (8 · words, n) uint8."""
    codes = unpack(words, 4).reshape(len(words), -1, 8)[..., _ORDER]
    return np.ascontiguousarray(codes.reshape(len(words), -1).T)
