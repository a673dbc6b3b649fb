"""Fragment order: codes in a record have the order of the registers that a CUDA kernel loads them into.

A warp loads the codes of a record as A operands of the matrix instruction m16n8k16: the codes of each lane are
contiguous, so that 16-byte loads of 32 lanes read 512 contiguous bytes. The top of `cuda/fragments.cuh` describes the
bytes; this module has their order.

Letters: N tokens of a block, D head dim, DP = D rounded up to 16. Lane 4·g + tg has g < 8 and tg < 4. A tile is one A
operand: 16 × 16 values, in four registers of two float16 per lane; pair codes are numbered r = 0 … 3 like the
registers. Channels D … DP − 1 have codes and values of zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polarlm.engine.codecs.schema.planes import Planes
from polarlm.engine.codecs.schema.sections import PackedStreams, Section, arrange, numbered
from polarlm.engine.codecs.schema.streams import Stream

LANES = 32
ALIGNMENT = 16  # bytes, of every section of a record
_CHUNK = 4  # words of 4 bytes that a lane loads at a time


class Record(ABC):
    """The sections of one codec's record. Its twin is the struct template `codec` in `cuda/codecs/<codec>.cuh`; of
    a codec of pairs without that file, `PairTable`.

    codec: the name of the file and of the struct. geometry: side, N and D of the block. takes_metric: whether a metric
    may choose among `points`.
    """

    codec: str
    geometry: Geometry
    takes_metric = False

    @property
    def points(self) -> np.ndarray | None:
        """The value or pair of each code, (P, 1 or 2) float32, if the kernel encodes by a search among them."""
        return None

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows of 128 bytes that the codec's tables take in shared memory."""

    @property
    @abstractmethod
    def sections(self) -> tuple[PackedStreams, ...]:
        """The sections of a record, in order."""

    @property
    @abstractmethod
    def constants(self) -> dict[str, int]:
        """Constants of the C++ struct, besides the geometry's."""

    @property
    def tables(self) -> np.ndarray:
        """Tables in global memory, (bytes,) uint8, a multiple of 16 bytes; `constants` has offsets into them."""
        return np.zeros(0, np.uint8)

    def from_streams(self, streams: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The codec's streams → the sections' streams."""
        return streams

    def to_streams(self, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The inverse of `from_streams`."""
        return stored


@dataclass(frozen=True)
class Geometry:
    """Side, N and D of a block, and the order of its tiles. values: whether the block has values, not keys."""

    values: bool
    block_size: int
    head_dim: int

    @property
    def padded(self) -> int:
        """DP, which is D rounded up to a multiple of 16."""
        return -(-self.head_dim // 16) * 16

    @property
    def part(self) -> int:
        """Tokens of a part, whose codes a warp holds in registers at the same time."""
        return min(self.block_size, 64 if self.padded <= 128 else 32)

    @property
    def parts(self) -> int:
        return self.block_size // self.part

    @property
    def tiles(self) -> int:
        """Tiles per part."""
        return self.part // 16 * self.padded // 16

    @property
    def constants(self) -> dict[str, int]:
        """The constants of the C++ layout structs."""
        return {
            "N": self.block_size,
            "D": self.head_dim,
            "DP": self.padded,
            "PART": self.part,
            "PARTS": self.parts,
            "PT": self.part // 16,
            "STEPS": self.padded // 16,
            "TILES": self.tiles,
            "VALUES": int(self.values),
        }

    def pairs(self, codes: np.ndarray) -> np.ndarray:
        """codes (N, D/2) → (PARTS, TILES, 32, 4): the codes of each lane and tile."""
        rows, steps = self.part // 16, self.padded // 16
        if self.values:  # part, u, r >> 1, tg, r & 1; j, g
            ordered = arrange(codes, ((self.parts, rows, 2, 4, 2), (steps, 8)), (0, 1, 5, 6, 3, 2, 4))
        else:  # part, i, r & 1, g; s, r >> 1, tg
            ordered = arrange(codes, ((self.parts, rows, 2, 8), (steps, 2, 4)), (0, 4, 1, 3, 6, 5, 2))
        return ordered.reshape(self.parts, self.tiles, LANES, 4)

    def halves(self, x: np.ndarray) -> np.ndarray:
        """x (N, D) → (PARTS · TILES · 32 · 8,): the values in registers 0, 2, 1, 3 of each lane and tile."""
        rows, steps = self.part // 16, self.padded // 16
        if self.values:  # part, u, r >> 1, tg, half; j, g, r & 1
            return arrange(x, ((self.parts, rows, 2, 4, 2), (steps, 8, 2)), (0, 1, 5, 6, 3, 7, 2, 4)).reshape(-1)
        # part, i, r & 1, g; s, r >> 1, tg, half
        return arrange(x, ((self.parts, rows, 2, 8), (steps, 2, 4, 2)), (0, 4, 1, 3, 6, 2, 5, 7)).reshape(-1)

    def tokens(self, x: np.ndarray) -> np.ndarray:
        """x (N,), one value per token → for each part [g][2i + h]: token 16i + 8h + g of the part."""
        return arrange(x, ((self.parts, self.part // 16, 2, 8),), (0, 3, 1, 2)).reshape(-1)

    def channels(self, x: np.ndarray) -> np.ndarray:
        """x (D,), one value per channel → (DP,) as [tg][s][4]: channels 16s + 2tg + {0, 1, 8, 9}."""
        return arrange(x, ((self.padded // 16, 2, 4, 2),), (2, 0, 1, 3)).reshape(-1)

    def pair_codes(self, stream: Stream, bits: int) -> Section:
        """The section of pair codes (N, D/2) as words of lanes: the top bits of byte r of word t are tile t's code."""
        order = self.pairs(numbered(*stream.shape)).reshape(self.parts, self.tiles, LANES * 4)
        return Section("codes", stream, order, Planes(bits, self.tiles, top=True))


@dataclass(frozen=True, eq=False)
class LaneWords:
    """Sections whose vectors are words of 32 lanes. The words of all sections in a part are stored together, in chunks
    of four words per lane; the last chunk may have fewer."""

    sections: tuple[Section, ...]

    @property
    def count(self) -> int:
        """LaneWords per lane and part."""
        return sum(section.vectors for section in self.sections)

    @property
    def nbytes(self) -> int:
        return sum(section.nbytes for section in self.sections)

    def pack(self, streams: Mapping[str, np.ndarray]) -> np.ndarray:
        vectors = np.concatenate([section.pack_vectors(streams) for section in self.sections], -2)
        *lead, parts, count, _ = vectors.shape
        words = vectors.view(np.uint32).reshape(*lead, parts, count * LANES)
        return np.take(words, self._chunks, axis=-1).view(np.uint8).reshape(*lead, self.nbytes)

    def unpack(self, raw: np.ndarray) -> dict[str, np.ndarray]:
        words = np.ascontiguousarray(raw).view(np.uint32).reshape(*raw.shape[:-1], -1, self.count * LANES)
        apart = np.take(words, np.argsort(self._chunks), axis=-1).view(np.uint8)
        vectors = apart.reshape(*words.shape[:-1], self.count, LANES * 4)
        ends = np.cumsum([section.vectors for section in self.sections])[:-1]
        streams: dict[str, np.ndarray] = {}
        for section, part in zip(self.sections, np.split(vectors, ends, axis=-2), strict=True):
            streams |= section.unpack_vectors(part)
        return streams

    @cached_property
    def _chunks(self) -> np.ndarray:
        """The indices of a part's words, (count · 32,), in the order in which they are stored."""
        words = np.arange(self.count * LANES).reshape(self.count, LANES)
        return np.concatenate([words[at : at + _CHUNK].T.reshape(-1) for at in range(0, self.count, _CHUNK)])
