"""Trellis: like `ring`, but the table of a pair depends on the previous code, at no cost in bits.

    x = n·y,  n = rms(x);  (y₂ⱼ, y₂ⱼ₊₁) = point of the window (last two bits of code j − 1, all m bits of code j)

A window of m + 2 bits slides over the codes of a vector. It selects among four times as many points as m bits; the
previous code allows a quarter of them, and the encoder searches for the best path (Viterbi). Every vector starts with
two zero bits, so that each token can be decoded on its own, and all of its pairs at once.
Source: trellis-coded quantization: Marcellin & Fischer, IEEE Trans. Commun. 38(1), 1990; bit-shift trellises, whose
decoder is a window on the stream of codes: Tseng et al., "QTIP", 2024. Our own: pairs, states that negate the values of
one table, and these tables.
Bits per value: m/2 + 8/D for `trellis2.5`, `trellis3`, `trellis3.5` and `trellis4` with m = 5, 6, 7, 8, and m/2 + 16/D
with the option `norm16`. Mean squared error on Gaussian vectors of 128 values: .0460, .0233, .0118, .0059 per variance.
States that rotate the table by right angles have 2 % less, but exchange x and y, which takes three instructions more
for 64 pairs.
Decode, per value: a quarter of a lookup of four values (`trellis4`: half a lookup of two), one multiplication by the
norm. Kernels of a CPU look up x and y as for `ring`, and xor each with what the code before looks up.

**Codes.** The state s is the last two bits of the previous code. Code c stands for point c of the table, whose x is
negated by bit 0 of s, and whose y by bit 1. scripts/train_trellis.py of commit 9b83d5be has found the tables.

**Streams.** As `ring`: norm (N,), codes (N, D/2) of m bits.

>>> codec = create("trellis4", ("norm16",))
>>> codes = codec.encode(np.array([[3, 4, 0, 0, -5, 0, 0, 5]] * 4, np.float32))
>>> codes["norm"].tolist()  # √(75 / 8)
[3.0625, 3.0625, 3.0625, 3.0625]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from polarlm.engine.codecs.parts.cosets import STATES
from polarlm.engine.codecs.parts.pair_codec import PairStore, RotatedPairs, parse_options
from polarlm.engine.codecs.parts.trellis_points import THOUSANDTHS
from polarlm.engine.codecs.parts.viterbi import PathSearch, flip
from polarlm.engine.codecs.schema.streams import join_wide

NAMES = ("trellis2.5", "trellis3", "trellis3.5", "trellis4")


@cache
def points_of(bits: int) -> np.ndarray:
    """The point of each code in state 0, (2^bits, 2) float32, read-only."""
    points = np.array(THOUSANDTHS[bits].split(), np.float32).reshape(-1, 2) / np.float32(1000)
    points.flags.writeable = False
    return points


@cache
def _search(bits: int) -> PathSearch:
    return PathSearch(points_of(bits))


@cache
def _table(bits: int, pairs: int) -> np.ndarray:
    """The values of each window: a state in the top bits, then one or two codes; (4 · 2^(bits·pairs), 2·pairs)."""
    points = flip(points_of(bits), np.arange(STATES)[:, None])
    window = np.arange(STATES << bits * pairs)
    state, values = window >> bits * pairs, []
    for i in range(pairs):
        code = window >> bits * i & 2**bits - 1
        values.append(points[state, code])
        state = code % STATES
    return np.concatenate(values, axis=1)


class TrellisTable(PairStore):
    def best_path(
        self, unit: np.ndarray, feedback: np.ndarray | None = None, weights: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """unit (K, R, D) float32, rms 1 → codes (K, R, D/2) uint8, points (K, R, D) float32: see `PathRounding`."""
        return _search(self.bits)(unit, feedback, weights)


@dataclass(frozen=True)
class Trellis(RotatedPairs):
    store: TrellisTable

    @property
    def points(self) -> np.ndarray:
        return points_of(self.store.bits)

    @property
    def flips(self) -> bool:
        return True

    def choose(self, unit: np.ndarray) -> np.ndarray:
        return self.store.best_path(unit[None])[0][0]

    def lookup(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `PairCodec.lookup`. A window has two pairs, but only one of 8 bits: a table for two, with an index of 18
        bits, would not fit the cache."""
        bits, pairs = self.store.bits, 1 if self.store.bits == 8 else 2
        units = codes.astype(np.uint16) if pairs == 1 else join_wide(codes, bits)
        windows, flat = units.copy(), units.reshape(-1)
        windows.reshape(-1)[1:] |= (flat[:-1] >> bits * (pairs - 1) & STATES - 1) << bits * pairs
        windows[..., 0] = units[..., 0]
        return windows, _table(bits, pairs)


def create(name: str, options: tuple[str, ...]) -> Trellis:
    preconditioning, half_norms = parse_options(name, options)
    bits = round(2 * float(name.removeprefix("trellis")))
    reach = float(np.hypot(*points_of(bits).T).max())
    return Trellis("+".join((name, *options)), TrellisTable(bits, half_norms, reach), preconditioning)
