"""How the next tokens are drawn, as words for `cuda/sampling/sample.cu`; see `engine.sampling.sample`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.backends.cuda.cache import HostTable
from engine.sampling.constraints import mask_words
from engine.sampling.sample import Draw

ROW_WORDS = 16  # of `Params` in `cuda/sampling/adjust.cuh`
_LEAST_LISTS = 256  # words


@dataclass
class Draws(HostTable):
    """How the tokens of B rows are drawn.

    table: int32 on the host, (B, 16) where no row has a list, else (16·B + room for lists,): a row's parameters in 16
    words, and the lists of all rows behind those of the last. `cuda/sampling/adjust.cuh` has the words. The room is a
    power of two, so that a step is recorded for few lengths of lists.
    vocabulary: ids that there are, the same in all rows.

    Bytes of a row that are brought to the device: 64; 8 for each token with a bias, 4 for each of the last tokens where
    penalties are on, 12 for each token that DRY is against, V / 8 for a mask; and the room, at most as much again or
    1 KiB. A row without any of these has 64.
    """

    vocabulary: int

    @property
    def has_lists(self) -> bool:
        return self.table.ndim == 1


def pack_draws(draws: Sequence[Draw]) -> Draws:
    """What the kernel needs to know of `draws`."""
    (vocabulary,) = {draw.vocabulary for draw in draws}
    rows = np.zeros((len(draws), ROW_WORDS), np.int32)
    rows[:, :6] = np.array([_params(draw) for draw in draws], np.float32).view(np.int32)
    penalties = [(draw.sampling.presence_penalty, draw.sampling.frequency_penalty) for draw in draws]
    rows[:, 12:] = np.array(penalties, np.float64).view(np.int32)
    pieces: list[np.ndarray] = []
    end = rows.size
    for row, draw in zip(rows, draws, strict=True):
        lists, lengths = _lists(draw)
        if lists:
            row[6:11] = end, *lengths
            words = sum(map(len, lists))
            pieces += [*lists, np.zeros(-words % 4, np.int32)]
            end += words + -words % 4
    if not pieces:
        return Draws(rows, vocabulary)
    table = np.zeros(rows.size + list_room(end - rows.size), np.int32)
    np.concatenate([rows.reshape(-1), *pieces], out=table[:end])
    return Draws(table, vocabulary)


def list_room(words: int) -> int:
    """Words to make room for where lists take so many: a power of two."""
    return max(_LEAST_LISTS, 1 << max(0, words - 1).bit_length())


def mask_room(rows: int, vocabulary: int) -> int:
    """Words to make room for where every row has a mask."""
    return list_room(rows * -(-mask_words(vocabulary) // 4) * 4)


def _params(draw: Draw) -> tuple[float, ...]:
    chain = draw.sampling
    below_one = min(np.float32(draw.uniform), np.nextafter(np.float32(1), np.float32(0)))
    top_k = float(min(chain.top_k, draw.vocabulary))
    return chain.temperature, top_k, chain.top_p, chain.min_p, float(below_one), chain.repeat_penalty


def _lists(draw: Draw) -> tuple[list[np.ndarray], tuple[int, int, int, int]]:
    """The lists of a row, one after the other, as int32, and how many tokens are in them; the last one is the mask."""
    chain, lists = draw.sampling, []
    biases, dry = len(chain.logit_bias), 0 if draw.dry is None else len(draw.dry.ids)
    recent = 0 if chain.is_plain else len(draw.recent)
    if draw.dry is not None:
        lists += [draw.dry.amounts.astype(np.float64).view(np.int32), draw.dry.ids.astype(np.int32)]
    if biases:
        lists.append(np.fromiter(chain.logit_bias, np.int32, biases))
        lists.append(np.fromiter(chain.logit_bias.values(), np.float32, biases).view(np.int32))
    if recent:
        lists.append(np.asarray(draw.recent, np.int32))
    if draw.allowed is not None:
        lists.append(np.ascontiguousarray(draw.allowed, np.uint32).view(np.int32))
    return lists, (biases, recent, dry, int(draw.allowed is not None))
