"""Sampling on the device, for all rows at once; only ids, and log-probabilities if requested, are copied back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.cuda.device import Array, Device, PaddedInput, row_stride
from polarlm.engine.backends.cuda.launch import LaunchConfig, Launcher
from polarlm.engine.backends.cuda.sampling.inputs import ROW_WORDS, SamplerInputs
from polarlm.engine.errors import EngineError
from polarlm.engine.outputs import TokenLogprob
from polarlm.engine.sampling.sample import NOT_FINITE, Fetch, Sampled, SamplerInput, nothing_left

_THREADS = 512  # per block of `cuda/sampling/logprobs.cu`
# Constants of `cuda/sampling/sample.cu`, which does not compile if its arrays have other sizes.
_NOTHING_LEFT = -2  # stands for an id if the chain leaves no token
_SAMPLE_THREADS, _PART = 256, 4096  # per block, and its logits
_PART_WORDS = 2 + _SAMPLE_THREADS // 32 * (32 + 1 / 2)  # uint64 of scratch per block: 32 tokens of each warp
_SIZES = {"THREADS": _SAMPLE_THREADS, "PART": _PART, "PART_WORDS": int(_PART_WORDS), "ROW_WORDS": ROW_WORDS}
SAMPLE = LaunchConfig({**_SIZES, "NOTHING_LEFT": _NOTHING_LEFT}, _SAMPLE_THREADS)
_SUMS = 4  # int32 before the pairs in a result of `cuda/sampling/logprobs.cu`
_UNIT = 2.0**-44  # in which it adds masses


def sample(
    device: Device, launch: Launcher, logits: Array, sampler_inputs: SamplerInputs, newest: Array | None = None
) -> Array:
    """logits (B, V) → token ids (B,) int32 on the device; negative where no token can be sampled."""
    (count, width), rows = logits.shape, logits
    if width % 4:  # rows must be aligned to 16 bytes
        rows = device.empty((count, -(-width // 4) * 4), np.float32)
        rows[:, :width] = logits
    ids = device.empty((count,), np.int32)
    table, vocabulary, stride = sampler_inputs.device_table(device), sampler_inputs.vocabulary, np.int64(rows.shape[1])
    scratch = device.empty((count, scratch_words(vocabulary)), np.uint64)
    saved_logits = device.empty(sampler_inputs.table.shape, np.float32) if sampler_inputs.has_lists else None
    if saved_logits is not None:
        launch("sample_adjust", (count,), SAMPLE, rows, saved_logits, table, newest, stride, file="sample")
    args = ids, scratch, launch.counts(count), rows, table, saved_logits, vocabulary, stride
    launch("sample", (-(-vocabulary // _PART), count), SAMPLE, *args)
    if saved_logits is not None:
        launch("sample_restore", (count,), SAMPLE, rows, saved_logits, table, newest, stride, file="sample")
    return ids


def scratch_words(vocabulary: int) -> int:
    """uint64 of scratch for a row of so many logits."""
    return int(-(-vocabulary // _PART) * _PART_WORDS)


def fetch_tokens(
    device: Device, launch: Launcher, ids: Array, logits: Array, sampler_inputs: Sequence[SamplerInput]
) -> list[Sampled]:
    """The tokens that `sample` chose, on the host. Copies 4·B bytes.

    Rows that ask for log-probabilities share one more launch, and copy 16 + 8·n bytes each; n is the largest count of
    any row, rounded up to an even number.
    """
    chosen = device.to_host(ids).tolist()
    requested = [
        (row, token, sampler_input.logprobs)
        for row, (token, sampler_input) in enumerate(zip(chosen, sampler_inputs, strict=True))
        if token >= 0 and sampler_input.logprobs is not None
    ]
    logprobs = _logprobs(device, launch, logits, requested, sampler_inputs[0].vocabulary) if requested else {}
    rows = enumerate(zip(chosen, sampler_inputs, strict=True))
    return [logprobs.get(row) or (token if token >= 0 else _error(token, one)) for row, (token, one) in rows]


def fetch_later(device: Device, ids: Array, sampler_inputs: Sequence[SamplerInput]) -> Fetch:
    """See `Ops.fetch_later`. A negative id is passed on too: `embed` reads row 0 for it, and the request ends."""
    copy, wait = device.to_host_later(ids)

    def tokens() -> list[Sampled]:
        rows = zip(wait().tolist(), sampler_inputs, strict=True)
        return [token if token >= 0 else _error(token, sampler_input) for token, sampler_input in rows]

    return Fetch(PaddedInput(np.zeros(len(ids), np.int32), copy, device), tokens)


def _error(token: int, sampler_input: SamplerInput) -> EngineError:
    return nothing_left(sampler_input) if token == _NOTHING_LEFT else EngineError(NOT_FINITE, "model_damaged")


def _logprobs(
    device: Device, launch: Launcher, logits: Array, requested: Sequence[tuple[int, int, int]], vocabulary: int
) -> dict[int, TokenLogprob]:
    """Row → its log-probabilities, for each (row of the logits, token, count) of `requested`."""
    table = np.array(requested, np.int32)
    most = int(table[:, 2].max())
    width = _SUMS + 2 * (most + most % 2)
    out = device.empty((len(requested), width), np.int32)
    args = out, logits, device.from_host(table), vocabulary, row_stride(logits), width
    launch("logprobs", (len(requested),), LaunchConfig({}, _THREADS), *args)
    rows = device.to_host(out)
    return {
        row: _token_logprob(words, token, count) for words, (row, token, count) in zip(rows, requested, strict=True)
    }


def _token_logprob(words: np.ndarray, token: int, count: int) -> TokenLogprob:
    """The log-probabilities in words (4 + 2·most,) int32, the result of `cuda/sampling/logprobs.cu` for one row."""
    total = float(words[:2].view(np.uint64)[0]) * _UNIT
    best, logit = words[2:_SUMS].view(np.float32).astype(np.float64)
    pairs = words[_SUMS : _SUMS + 2 * count].reshape(-1, 2)
    ids, logits = pairs[:, 0], pairs[:, 1].copy().view(np.float32).astype(np.float64)
    is_listed = (ids >= 0) & np.isfinite(logits)
    logprobs = logits[is_listed] - best - np.log(total)
    top = zip(ids[is_listed].tolist(), logprobs.tolist(), strict=True)
    return TokenLogprob(token, float(logit - best - np.log(total)), tuple(top))
