"""Sampling on the device, for all rows at once, with parameters packed as int32 for `cuda/sampling/sample.cu`; see
`engine.sampling.sample`. Only ids, and log-probabilities if requested, are copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from polarlm.engine.backends.cuda.device import Array, Device, PaddedInput, row_stride
from polarlm.engine.backends.cuda.kv.cache import HostTable, with_rows
from polarlm.engine.backends.cuda.launch import LaunchConfig, Launcher
from polarlm.engine.errors import EngineError
from polarlm.engine.outputs import TokenLogprob
from polarlm.engine.sampling.constraints import mask_words
from polarlm.engine.sampling.sample import NOT_FINITE, SHAPES, Fetch, Sampled, SamplerInput, nothing_left

ROW_WORDS = 16  # int32 of `Params` in `cuda/sampling/adjust.cuh`
_UNIFORM, _LISTS = 4, 6  # indices in a row of the random number and of the offset of its lists
_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))
_LEAST_LISTS = 256  # least int32 for lists
_SHAPE = [option for options in SHAPES.values() for option in options]  # the members of `Shape` there


@dataclass
class SamplerInputs(HostTable):
    """The sampling parameters of B rows.

    table: int32 (B, 16) if no row has a list, else (16·B + room for lists,): 16 parameters for each row, then the lists
    of all rows. `cuda/sampling/adjust.cuh` defines the parameters. The room for lists is a power of two, so that steps
    are recorded for few lengths of lists. rows: B. vocabulary: V.

    Bytes uploaded per row: 64, and for lists 16 for a shape, 8 per token with a bias, 4 per recent token if penalties
    are on, 12 per token that DRY penalises, V / 8 for a mask.
    """

    rows: int
    vocabulary: int

    @property
    def has_lists(self) -> bool:
        return self.table.ndim == 1

    def pad_rows(self, rows: int) -> SamplerInputs:
        if not self.has_lists:
            return replace(self, table=with_rows(self.table, rows), rows=rows)
        words, lists = self.table[: self.rows * ROW_WORDS], self.table[self.rows * ROW_WORDS :]
        params = with_rows(words.reshape(self.rows, ROW_WORDS), rows)
        params[:, _LISTS] += (rows - self.rows) * ROW_WORDS  # also where it is unused, in rows without lists
        return replace(self, table=np.concatenate([params.reshape(-1), lists]), rows=rows)


def pack_sampler_inputs(sampler_inputs: Sequence[SamplerInput]) -> SamplerInputs:
    """The table of `sampler_inputs`. All rows have the same vocabulary."""
    (vocabulary,) = {sampler_input.vocabulary for sampler_input in sampler_inputs}
    rows = np.zeros((len(sampler_inputs), ROW_WORDS), np.int32)
    both = [(sampler_input.sampling, sampler_input) for sampler_input in sampler_inputs]
    params = [(c.temperature, c.top_k, c.top_p, c.min_p, one.uniform, c.repeat_penalty) for c, one in both]
    most = np.inf, vocabulary, np.inf, np.inf, _BELOW_ONE, np.inf
    rows[:, :6] = np.minimum(np.array(params, np.float32), np.array(most, np.float32)).view(np.int32)
    penalties = [(chain.presence_penalty, chain.frequency_penalty) for chain, _ in both]
    rows[:, 12:] = np.array(penalties, np.float64).view(np.int32)
    pieces: list[np.ndarray] = []
    end = rows.size
    for row, (chain, one) in zip(rows, both, strict=True):
        if one.dry is None and one.allowed is None and not (chain.logit_bias or one.recent or chain.is_shaped):
            continue
        if chain.is_shaped:  # at a temperature of 0 the first of equal tokens
            uniform = chain.xtc(one.uniform)[0] if chain.temperature else 0.0
            row[_UNIFORM] = min(np.float32(uniform), _BELOW_ONE).view(np.int32)
        lists, lengths = _lists(one)
        if lists:
            row[_LISTS : _LISTS + 6] = end, *lengths
            words = sum(map(len, lists))
            pieces += [*lists, np.zeros(-words % 4, np.int32)]
            end += words + -words % 4
    if not pieces:
        return SamplerInputs(rows, len(sampler_inputs), vocabulary)
    table = np.zeros(rows.size + list_room(end - rows.size), np.int32)
    np.concatenate([rows.reshape(-1), *pieces], out=table[:end])
    return SamplerInputs(table, len(sampler_inputs), vocabulary)


def list_room(words: int) -> int:
    """The int32 to allocate for lists of `words` int32: a power of two."""
    return max(_LEAST_LISTS, 1 << max(0, words - 1).bit_length())


def mask_room(rows: int, vocabulary: int) -> int:
    """The int32 to allocate for lists if every row has a mask and nothing else."""
    return list_room(rows * -(-mask_words(vocabulary) // 4) * 4)


def _lists(sampler_input: SamplerInput) -> tuple[list[np.ndarray], tuple[int, int, int, int, int]]:
    """The lists of a row as int32, in order; and the numbers of biases, recent tokens, DRY tokens, masks, shapes (the
    latter 0 or 1)."""
    chain, lists = sampler_input.sampling, []
    biases, dry = len(chain.logit_bias), 0 if sampler_input.dry is None else len(sampler_input.dry.ids)
    recent = 0 if chain.is_plain else len(sampler_input.recent)
    if chain.is_shaped:
        values = {option: getattr(chain, option) for option in _SHAPE}
        values["xtc_probability"] = chain.xtc(sampler_input.uniform)[1]
        lists.append(np.array([*values.values(), *[0] * (-len(values) % 4)], np.float32).view(np.int32))
    if sampler_input.dry is not None:
        lists += [sampler_input.dry.amounts.astype(np.float64).view(np.int32), sampler_input.dry.ids.astype(np.int32)]
    if biases:
        lists.append(np.fromiter(chain.logit_bias, np.int32, biases))
        lists.append(np.fromiter(chain.logit_bias.values(), np.float32, biases).view(np.int32))
    if recent:
        lists.append(np.asarray(sampler_input.recent, np.int32))
    if sampler_input.allowed is not None:
        lists.append(np.ascontiguousarray(sampler_input.allowed, np.uint32).view(np.int32))
    return lists, (biases, recent, dry, int(sampler_input.allowed is not None), int(chain.is_shaped))


_THREADS = 512  # per block of `cuda/sampling/logprobs.cu`
# Constants of `cuda/sampling/sample.cu`, which does not compile if its arrays have other sizes.
_NOTHING_LEFT = -2  # stands for an id if the chain leaves no token
_SAMPLE_THREADS, _PART = 256, 4096  # per block, and its logits
_PART_WORDS = 2 + _SAMPLE_THREADS // 32 * (32 + 1 / 2)  # uint64 of scratch per block: 32 tokens of each warp
_SIZES = {"THREADS": _SAMPLE_THREADS, "PART": _PART, "PART_WORDS": int(_PART_WORDS), "ROW_WORDS": ROW_WORDS}
SAMPLE = LaunchConfig({**_SIZES, "NOTHING_LEFT": _NOTHING_LEFT, "SHAPE": ", ".join(_SHAPE)}, _SAMPLE_THREADS)
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
        launch("sample_shaped", (count,), SAMPLE, ids, rows, table, vocabulary, stride, file="sample")
        launch("sample_restore", (count,), SAMPLE, rows, saved_logits, table, newest, stride, file="sample")
    return ids


def scratch_words(vocabulary: int) -> int:
    """uint64 of scratch for a row of `vocabulary` logits."""
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
    return [logprobs.get(row, token) if token >= 0 else _error(token, one) for row, (token, one) in rows]


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
