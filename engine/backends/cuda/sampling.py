"""The next tokens on the device: one launch for all rows, and what of it comes back to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.backends.cuda.device import Array, Device
from engine.backends.cuda.draws import Draws
from engine.backends.cuda.launch import LaunchConfig, Launcher, row_stride
from engine.errors import EngineError
from engine.outputs import TokenLogprob
from engine.sampling.sample import NOT_FINITE, Draw, Sampled, nothing_left

_THREADS = 512
_NOTHING_LEFT = -2  # of `cuda/sampling/sample.cu`, in the place of an id
_SUMS = 4  # words before the pairs of `cuda/sampling/logprobs.cu`


def sample(device: Device, launch: Launcher, logits: Array, draws: Draws) -> Array:
    """The tokens (B,) int32 of logits (B, V), below 0 where there is none; on the device."""
    rows, ids = _in_fours(device, logits), device.empty((len(logits),), np.int32)
    # What stood in the logits that lists change, by the words of the lists.
    saved = device.empty(draws.table.shape, np.float32) if draws.has_lists else None
    args = ids, rows, draws.on(device), saved, draws.vocabulary, np.int64(rows.shape[1])
    launch("sample", (len(logits),), LaunchConfig({}, _THREADS), *args)
    return ids


def fetch_tokens(device: Device, launch: Launcher, ids: Array, logits: Array, draws: Sequence[Draw]) -> list[Sampled]:
    """What `sample` chose, on the host: 4·B bytes.

    Rows that ask for log-probabilities cost one more launch for all of them, and each of them brings 16 + 8·n bytes
    back; n is the largest count, rounded up to an even number.
    """
    chosen = device.to_host(ids).tolist()
    asked = [
        (row, token, draw.logprobs)
        for row, (token, draw) in enumerate(zip(chosen, draws, strict=True))
        if token >= 0 and draw.logprobs is not None
    ]
    logprobs = _logprobs(device, launch, logits, asked, draws[0].vocabulary) if asked else {}
    return [logprobs.get(row) or _token_or_error(token, draws[row]) for row, token in enumerate(chosen)]


def _token_or_error(token: int, draw: Draw) -> int | EngineError:
    if token == _NOTHING_LEFT:
        return nothing_left(draw)
    return token if token >= 0 else EngineError(NOT_FINITE, "model_damaged")


def _logprobs(
    device: Device, launch: Launcher, logits: Array, asked: Sequence[tuple[int, int, int]], vocabulary: int
) -> dict[int, TokenLogprob]:
    """`token_logprob` of each (row of the logits, token, count), by its row."""
    table = np.array(asked, np.int32)
    most = int(table[:, 2].max())
    width = _SUMS + 2 * (most + most % 2)
    out = device.empty((len(asked), width), np.int32)
    args = out, logits, device.from_host(table), vocabulary, row_stride(logits), width
    launch("logprobs", (len(asked),), LaunchConfig({}, _THREADS), *args)
    rows = device.to_host(out)
    return {row: _token_logprob(words, token, count) for words, (row, token, count) in zip(rows, asked, strict=True)}


def _token_logprob(words: np.ndarray, token: int, count: int) -> TokenLogprob:
    """words (4 + 2·most,) int32: those of `cuda/sampling/logprobs.cu` for one row."""
    total = words[:2].view(np.float64)[0]
    best, own = words[2:_SUMS].view(np.float32).astype(np.float64)
    pairs = words[_SUMS : _SUMS + 2 * count].reshape(-1, 2)
    ids, logits = pairs[:, 0], pairs[:, 1].copy().view(np.float32).astype(np.float64)
    kept = (ids >= 0) & np.isfinite(logits)
    logprobs = logits[kept] - best - np.log(total)
    top = zip(ids[kept].tolist(), logprobs.tolist(), strict=True)
    return TokenLogprob(token, float(own - best - np.log(total)), tuple(top))


def _in_fours(device: Device, logits: Array) -> Array:
    """logits (B, V) in rows that begin at multiples of 16 bytes."""
    count, width = logits.shape
    if width % 4 == 0:
        return logits
    rows = device.empty((count, -(-width // 4) * 4), np.float32)
    rows[:, :width] = logits
    return rows
