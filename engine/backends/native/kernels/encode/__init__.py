"""Encoding of blocks with error feedback: the arithmetic of `engine.quantization.encode`, one unit per block and KV
head.

A row is a channel, its lanes are tokens, 16 per vector. Vectors are rounded pair by pair, all tokens of the block at
once, with one norm after another.

Letters: N tokens in a block, D head dim, P pairs (or single values) of a vector.
"""

from __future__ import annotations

from polarlm.engine.backends.native.kernels.encode.load import ANY, cover, load, measure
from polarlm.engine.backends.native.kernels.encode.rounding import (
    round_with_best_norms,
    round_without_metric,
    write_codes,
)
from polarlm.engine.backends.native.kernels.encode.unit import EncodeArguments, Encoding, PackedTiles, Unit, encoder
from polarlm.engine.jit.lang import Kernel
from polarlm.engine.quantization.encode import LARGEST


def encode(encoding: Encoding, tiles: PackedTiles) -> Kernel[EncodeArguments]:
    def write(unit: Unit) -> None:
        unit.report(load(unit, LARGEST if encoding.has_metric else ANY))
        (cover if encoding.is_linear else measure)(unit)
        if encoding.has_metric:
            round_with_best_norms(unit)
        else:
            round_without_metric(unit)
        codes = unit.codes
        if tiles.by_token:
            codes = unit.errors  # reuses the memory of the errors
            write_codes(unit, codes)
        tiles.emit_pack(unit.e, codes, unit.norms, unit.block.tiles)

    return encoder(f"{encoding.name}_{tiles.name}", encoding, write)
