"""Snapshots of matrices: how they are stored, and at which ends of blocks a prompt keeps them."""

from __future__ import annotations

import numpy as np

_STEP = 4  # of the distances, in blocks, between the end of a prompt and the snapshots before it
_CODES = 127


def ends_to_keep(first: int, complete: int, branch: int | None) -> list[int]:
    """Return the blocks with a snapshot at their end, of a prompt's complete blocks first … complete − 1.

    These are the last one, those 4, 16, 64, … blocks before it, and the block `branch`, at whose end another prompt
    has left this one. Ascending, without block 0: it is computed again in less time than reading its state takes.

    >>> ends_to_keep(0, 30, None)
    [13, 25, 29]
    """
    distances, distance = [0], _STEP
    while distance < complete:
        distances.append(distance)
        distance *= _STEP
    wanted = {complete - 1 - one for one in distances} | ({branch} if branch is not None else set())
    return sorted(number for number in wanted if max(1, first) <= number < complete)


def encode(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes int8 (..., A, D) of matrices (..., A, D), and scales (..., D): one for each value channel.

    A channel of values that is larger than the others then costs these no precision.
    """
    scales = np.abs(matrices).max(axis=-2) / np.float32(_CODES)
    factors = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    return np.rint(matrices * factors[..., None, :]).astype(np.int8), scales


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the matrices (..., A, D) that were encoded."""
    return codes * scales[..., None, :]
