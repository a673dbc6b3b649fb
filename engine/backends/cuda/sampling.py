"""The next tokens on the device: one launch for all rows, and what of it comes back to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.backends.cuda.device import Array, Device
from engine.backends.cuda.draws import Draws
from engine.backends.cuda.launch import Launcher, Shape
from engine.errors import EngineError
from engine.sampling.sample import NOT_FINITE, Draw, Sampled, nothing_left, token_logprob

_THREADS = 512
_NOTHING_LEFT = -2  # of `cuda/sampling/sample.cu`, in the place of an id


def sample(device: Device, launch: Launcher, logits: Array, draws: Draws) -> Array:
    """The tokens (B,) int32 of logits (B, V), below 0 where there is none; on the device."""
    rows, ids = _in_fours(device, logits), device.empty((len(logits),), np.int32)
    # What stood in the logits that lists change, by the words of the lists.
    saved = device.empty(draws.table.shape, np.float32) if draws.has_lists else None
    args = ids, rows, draws.on(device), saved, draws.vocabulary, np.int64(rows.shape[1])
    launch("sample", (len(logits),), Shape({}, _THREADS), *args)
    return ids


def fetch_tokens(device: Device, ids: Array, logits: Array, draws: Sequence[Draw]) -> list[Sampled]:
    """What `sample` chose, on the host: 4·B bytes come back, and 4·V of each row that asks for log-probabilities."""
    chosen = device.to_host(ids).tolist()
    return [_fetched(device, token, logits[row], draws[row]) for row, token in enumerate(chosen)]


def _fetched(device: Device, token: int, logits: Array, draw: Draw) -> Sampled:
    if token == _NOTHING_LEFT:
        return nothing_left(draw)
    if token < 0:
        return EngineError(NOT_FINITE, "model_damaged")
    if draw.logprobs is None:
        return token
    return token_logprob(device.to_host(logits[: draw.vocabulary]), token, draw.logprobs)


def _in_fours(device: Device, logits: Array) -> Array:
    """logits (B, V) in rows that begin at multiples of 16 bytes."""
    count, width = logits.shape
    if width % 4 == 0:
        return logits
    rows = device.empty((count, -(-width // 4) * 4), np.float32)
    rows[:, :width] = logits
    return rows
