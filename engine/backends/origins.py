"""Where the bits of unpacked blocks of weights come from, for kernels that move them.

How a format stores its codes and scales is said in one place, `unpack` of its module. Blocks of a single bit are
unpacked to find out from which bit of a stored block each bit of a field comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from polarlm.engine.weight_formats import Grouped, WeightFormat


@dataclass(frozen=True, eq=False)
class Origins:
    """The bits of a field of an unpacked block: each is a bit of the stored block, that bit flipped, or constant.

    bits: int32 (bytes of the field, 8), the number of the stored bit, 8 · byte + bit; -1 where there is none.
    flips: uint8 (bytes of the field), the bits that are flipped, or the constants.
    """

    bits: np.ndarray
    flips: np.ndarray

    def __getitem__(self, part: slice) -> Origins:
        return Origins(self.bits[part], self.flips[part])

    def moves(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """The same as moves of whole bytes: (shift, bytes, masks). Byte i of the field has the bits masks[i] of the
        stored byte bytes[i], shifted right by `shift`, from each move; bytes[i] is -1 where masks[i] is 0."""
        moves: list[tuple[int, np.ndarray, np.ndarray]] = []
        for place, bit in np.argwhere(self.bits >= 0):
            byte, shift = int(self.bits[place, bit]) // 8, int(self.bits[place, bit]) % 8 - int(bit)
            for move in moves:
                if move[0] == shift and move[1][place] in (-1, byte):
                    break
            else:
                moves.append(move := (shift, np.full(len(self.bits), -1), np.zeros(len(self.bits), np.uint8)))
            move[1][place] = byte
            move[2][place] |= np.uint8(1 << int(bit))
        return moves


Fields = dict[str, np.ndarray]  # field → its bytes, uint8 (blocks, n)


def grouped_fields(format: WeightFormat, raw: np.ndarray) -> Fields:
    """The fields of `Grouped` of stored blocks, raw (blocks, bytes of a block) uint8; without scales that are powers of
    two."""
    grouped, by_field = _unpack(format, raw), {}
    for name in ("scale", "offset", "sub_scale", "sub_offset", "codes"):
        field = getattr(grouped, name)
        if field is not None and field.dtype != np.float32:
            by_field[name] = np.ascontiguousarray(field).view(np.uint8).reshape(len(field), -1)
    return by_field


def find_origins(
    format: WeightFormat, fields: Callable[[WeightFormat, np.ndarray], Fields] = grouped_fields
) -> dict[str, Origins]:
    """Field → the origins of its bytes in a block. Raises ValueError if a bit does not come from one stored bit."""
    single = np.packbits(np.eye(8 * format.nbytes, dtype=np.uint8), axis=1, bitorder="little")
    by_field = {}
    for name, content in fields(format, np.concatenate([np.zeros((1, format.nbytes), np.uint8), single])).items():
        changes = np.unpackbits(content[1:] ^ content[0], axis=1, bitorder="little")
        if (changes.sum(axis=0) > 1).any():
            raise ValueError(f"{format.name}: a bit of {name} depends on several stored bits.")
        bits = np.where(changes.any(axis=0), changes.argmax(axis=0), -1).astype(np.int32)
        by_field[name] = Origins(bits.reshape(-1, 8), content[0])
    return by_field


def power_scales(format: WeightFormat) -> tuple[int, np.ndarray]:
    """The byte of a block that is the exponent of its scale, and the scale of each exponent as bfloat16, uint16 (256,).

    Raises ValueError if the scale depends on more than one byte.
    """

    def scales(blocks: np.ndarray) -> np.ndarray:
        return (_unpack(format, blocks).scale[:, 0].view(np.uint32) >> 16).astype(np.uint16)

    ones = scales(np.eye(format.nbytes, dtype=np.uint8)) != scales(np.zeros((1, format.nbytes), np.uint8))
    (byte,) = np.flatnonzero(ones)
    exponents = np.zeros((256, format.nbytes), np.uint8)
    exponents[:, byte] = np.arange(256)
    return int(byte), scales(exponents)


def empty_block(format: WeightFormat) -> Grouped:
    """A block of zeros: which fields a format has."""
    return _unpack(format, np.zeros((1, format.nbytes), np.uint8))


def _unpack(format: WeightFormat, raw: np.ndarray) -> Grouped:
    assert format.unpack is not None
    return cast(Grouped, format.unpack(raw))
