"""Weight matrices in tiles of 16 rows, so that the lanes of a vector are rows and no sum runs across lanes.

A tile is a run of blocks of `values` inputs. A block has its scales first and then its codes, because the hardware
prefetches only ascending addresses. A vector of codes has 64 bytes: an int32 for each of the 16 rows, whose two int16
belong to two consecutive inputs, a pair. Codes are cut into planes of 8, 4, 2 or 1 bits. For 32 inputs, 16 pairs, a
plane of b bits has b vectors; pair p is in place s = p // 2 + 8 · (p % 2), which is in vector s % b, shifted by
b · (s // b) bits in its int16. So bytes at the same shift are four consecutive inputs, a quad, in the order 0, 2, 1, 3:
kernels read words of a pair, or bytes of a quad. Codes of 8 bits are signed: 128 is subtracted from them.

    scale        (16,) float16, or bfloat16 for scales that are powers of two
    offset       (16,) float16                  if the format has it
    subs         sub-scales and sub-offsets     if the format has them
    codes        values / 32 times: the vectors of each plane, low bits first

Subs are the sub-scales of a row and then its sub-offsets, of as many bits as in the file, so that a block is as small:
a step waits for its bytes. Subs of 6 or 4 bits are cut into planes, too. Of n numbers, a plane of b bits has
v = n · b / 8 vectors of a byte for each of the 16 rows; number i is in vector i % v, shifted by b · (i // v) bits.

A block of a lattice has integers of 4 to 32 bits for each 32 inputs of a row. Integers of 4 bits share bytes by twos.

    scale        (16,) float16
    signs        (values / 32, 16) uint32       if signs are stored: a byte for each 8 inputs. If it has only 7 signs,
                                                its highest bit is one of the 4 bits of the first group's scale
    sub_scale    the other groups' scales, 4 bits each
    high         the bits of indices above the lowest 8
    low          values / 32 times: a byte of each index, (cells / 4, 16) uint32

A block of digits has its bytes as they are stored, each four in the order of a quad:

    scale        (16,) float16
    packed       (bytes / 4, 16) uint32

A tile of a format without codes is its numbers, (inputs, 16). Rows are padded with zeros to a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from polarlm.engine.backends.origins import empty_block, find_origins
from polarlm.engine.weight_formats import Lattice, WeightFormat

ROWS = 16  # rows of a tile
QUAD = 0, 2, 1, 3  # the inputs of a lane
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # bits per code → bits of each plane


@dataclass(frozen=True)
class Subs:
    """Sub-scales and sub-offsets of fewer than 8 bits.

    start: offset in bytes in a block. count: of a row. is_signed: whether the highest bit is a sign.
    """

    start: int
    count: int
    planes: tuple[int, ...]
    is_signed: bool


@dataclass(frozen=True)
class TileLayout:
    """Offsets in bytes of the fields of a block of 16 rows after its scales; None for fields that the format lacks.

    sub_scale, sub_offset: of bytes, (values / group, 16) int8 and uint8. With `subs` they are offsets in the memory
    where these become bytes, else in the block.
    """

    format: WeightFormat
    planes: tuple[int, ...]
    offset: int | None
    sub_scale: int | None
    sub_offset: int | None
    subs: Subs | None
    codes: int
    nbytes: int  # bytes of a block
    is_power: bool  # whether scales are powers of two, stored as bfloat16

    @staticmethod
    def place(pair: int) -> int:
        """The place of a pair among the pairs of 32 inputs: s above."""
        return pair // 2 + 8 * (pair % 2)

    @property
    def part_bytes(self) -> int:
        """Bytes of the codes of 32 inputs of 16 rows."""
        return 64 * sum(self.planes)


@cache
def layout(format: WeightFormat) -> TileLayout:
    """The layout of a format that has codes and scales."""
    one = empty_block(format)
    planes, groups = _PLANES[format.bits], format.values // format.group
    offset, end = (None, 2 * ROWS) if one.offset is None else (2 * ROWS, 4 * ROWS)
    sub_scale, sub_offset, subs = None, None, None
    if one.sub_scale is not None:
        count, bits = groups * (1 if one.sub_offset is None else 2), _sub_bits(format)
        subs = Subs(end, count, _PLANES[bits], bool((one.sub_scale < 0).any())) if bits < 8 else None
        sub_scale = end if subs is None else 0
        sub_offset = None if one.sub_offset is None else sub_scale + ROWS * groups
        end += ROWS * count * bits // 8
    nbytes = end + format.values // 32 * 64 * sum(planes)
    is_power = one.scale.dtype == np.float32
    return TileLayout(format, planes, offset, sub_scale, sub_offset, subs, end, nbytes, is_power)


def _sub_bits(format: WeightFormat) -> int:
    """Bits of a sub-scale, and as many of a sub-offset: the stored bits that it depends on."""
    return max(len(set(byte) - {-1}) for byte in find_origins(format)["sub_scale"].bits.tolist())


@dataclass(frozen=True)
class LatticeField:
    """A field of a block of a lattice, for 16 rows: (count, 16) integers of `size` bytes at offset `start`.

    bits: of the field for 32 inputs of a row.
    """

    start: int
    size: int
    count: int
    bits: int


@cache
def lattice_layout(format: WeightFormat) -> dict[str, LatticeField]:
    """Field → its place in a block of a lattice; without fields that the format does not have."""
    end, places = 0, {}
    for name, field in lattice_fields(format, np.zeros((1, format.nbytes), np.uint8)).items():
        nbytes = field.shape[1]
        bits = 8 * nbytes // (format.values // 32)
        size = 2 if name == "scale" else min(4, max(1, bits // 8))
        places[name] = LatticeField(end, size, nbytes // size, bits)
        end += ROWS * nbytes
    return places


def lattice_fields(format: WeightFormat, raw: np.ndarray) -> dict[str, np.ndarray]:
    """Blocks of a lattice as in the file, raw (n, NBYTES) uint8 → field → its bytes in tiles, uint8 (n, bytes)."""
    assert format.unpack is not None
    blocks = format.unpack(raw)
    assert isinstance(blocks, Lattice)
    scales, rest = blocks.sub_scale.reshape(len(raw), format.values // 32, 32 // format.group), 0
    fields = {"scale": blocks.scale.view(np.uint8)}
    if blocks.signs is not None:
        signs = blocks.signs
        if blocks.grid.signs == 7:
            bits, rest = scales[:, :, :1] >> np.arange(4, dtype=np.uint8) & 1, 1
            signs = signs | bits.reshape(signs.shape) << 7
        fields["signs"] = signs
    fields["sub_scale"] = _pack_bits(scales[:, :, rest:], 4)
    fields["high"] = _pack_bits(blocks.indices >> 8, format.bits - 8)
    fields["low"] = (blocks.indices & 255).astype(np.uint8)
    return {name: field for name, field in fields.items() if field.size}


def _pack_bits(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers (blocks, …) of `bits` bits, the first in the lowest, as bytes (blocks, n) uint8."""
    single = numbers.reshape(len(numbers), -1, 1) >> np.arange(bits).astype(numbers.dtype) & 1
    return np.packbits(single.reshape(len(numbers), -1).astype(np.uint8), axis=1, bitorder="little")


def block_bytes(format: WeightFormat) -> int:
    """Bytes of a block of 16 rows, of a format that is not numbers."""
    if format.runs is not None:
        return ROWS * format.nbytes
    if format.grid is None:
        return layout(format).nbytes
    return ROWS * sum(field.size * field.count for field in lattice_layout(format).values())


def tile_bytes(format: WeightFormat, rows: int, columns: int) -> int:
    """Bytes that a matrix takes in tiles."""
    tiles = -(-rows // ROWS)
    if format.unpack is None:
        return tiles * ROWS * columns * format.nbytes
    return tiles * (columns // format.values) * block_bytes(format)
