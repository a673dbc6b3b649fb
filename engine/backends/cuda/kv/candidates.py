"""Candidates for the nearest point of a codec's table: a short list for every cell of a grid.

`cuda/encode/encode_blocks.cu` compares a pair only with the candidates of its cell, and finds the same point as by a
comparison with all points. A path search has the candidates of `engine.codecs.parts.cosets`.
"""

from __future__ import annotations

import numpy as np

from polarlm.engine.codecs.parts.cosets import CELLS, STATES, Cosets

_CELLS = 64  # cells along each axis of the square [−4, 4)²
_SIDE = 8 / _CELLS
_MANY = 256  # with up to this many points a cell has room for four candidates, else for twelve

ALL = 0xFFFF  # marks a cell whose list does not fit: the kernel compares with every point

# Scores in the square are sums of three terms below 24: their float32 error is less than 1e-5.
_TOLERANCE = 1e-4


def candidates(points: np.ndarray) -> np.ndarray:
    """points (P, 2) float32 → (64, 64, 4) uint16, or (64, 64, 12) if P > 256: ascending codes, padded with the first.

    The nearest point has the least score |p|²/2 − x·p in float32. The difference of two scores is linear in x: from the
    centre of a cell to its edges it changes by at most half a side times the sum of the points' coordinate differences.
    A point is a candidate if that is enough to overtake the best point at the centre.
    """
    p, room = points.astype(np.float64), 4 if len(points) <= _MANY else 12
    centres = (np.moveaxis(np.indices((_CELLS, _CELLS)), 0, -1).reshape(-1, 2) + 0.5) * _SIDE - 4
    score = np.square(p).sum(1) / 2 - centres @ p.T
    best = score.argmin(1)
    lead = score - score.min(1, keepdims=True)
    reach = np.abs(p[None] - p[best][:, None]).sum(2) * (_SIDE / 2 + _TOLERANCE)
    can_win = lead <= reach + _TOLERANCE
    lists = np.empty((len(centres), room), np.uint16)
    for row, winners in zip(lists, can_win, strict=True):
        codes = np.flatnonzero(winners)
        row[:] = ALL if len(codes) > room else np.pad(codes, (0, room - len(codes)), constant_values=codes[0])
    return lists.reshape(_CELLS, _CELLS, room)


def path_candidates(points: np.ndarray) -> np.ndarray:
    """points (P, 2) float32 → (256, 256, 2) uint16: for each cell, the codes of its four candidates, a byte each."""
    cosets = Cosets(points)
    codes = np.ascontiguousarray(cosets.codes.T.astype(np.uint8)[cosets.entries])  # (65536, 4)
    return codes.view(np.uint16).reshape(CELLS, CELLS, STATES // 2)
