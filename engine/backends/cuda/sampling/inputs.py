"""Sampling parameters packed as int32 for `cuda/sampling/sample.cu`; see `engine.sampling.sample`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from polarlm.engine.backends.cuda.kv.cache import HostTable, with_rows
from polarlm.engine.sampling.constraints import mask_words
from polarlm.engine.sampling.sample import SamplerInput

ROW_WORDS = 16  # int32 of `Params` in `cuda/sampling/adjust.cuh`
_LISTS = 6  # index in a row of the offset of its lists
_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))
_LEAST_LISTS = 256  # least int32 for lists


@dataclass
class SamplerInputs(HostTable):
    """The sampling parameters of B rows.

    table: int32 (B, 16) if no row has a list, else (16·B + room for lists,): 16 parameters for each row, then the lists
    of all rows. `cuda/sampling/adjust.cuh` defines the parameters. The room for lists is a power of two, so that steps
    are recorded for few lengths of lists. rows: B. vocabulary: V.

    Bytes uploaded per row: 64, and for lists 8 per token with a bias, 4 per recent token if penalties are on, 12 per
    token that DRY penalises, V / 8 for a mask.
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
        if one.dry is None and one.allowed is None and not (chain.logit_bias or one.recent):
            continue
        lists, lengths = _lists(one)
        if lists:
            row[_LISTS : _LISTS + 5] = end, *lengths
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


def _lists(sampler_input: SamplerInput) -> tuple[list[np.ndarray], tuple[int, int, int, int]]:
    """The lists of a row as int32, in order; and the numbers of biases, recent tokens, DRY tokens, masks (0 or 1)."""
    chain, lists = sampler_input.sampling, []
    biases, dry = len(chain.logit_bias), 0 if sampler_input.dry is None else len(sampler_input.dry.ids)
    recent = 0 if chain.is_plain else len(sampler_input.recent)
    if sampler_input.dry is not None:
        lists += [sampler_input.dry.amounts.astype(np.float64).view(np.int32), sampler_input.dry.ids.astype(np.int32)]
    if biases:
        lists.append(np.fromiter(chain.logit_bias, np.int32, biases))
        lists.append(np.fromiter(chain.logit_bias.values(), np.float32, biases).view(np.int32))
    if recent:
        lists.append(np.asarray(sampler_input.recent, np.int32))
    if sampler_input.allowed is not None:
        lists.append(np.ascontiguousarray(sampler_input.allowed, np.uint32).view(np.int32))
    return lists, (biases, recent, dry, int(sampler_input.allowed is not None))
