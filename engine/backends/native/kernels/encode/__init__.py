"""Encoding of blocks with error feedback: the arithmetic of `engine.quantization.encode`, one unit per block and KV
head.

A row is a channel, its lanes are tokens, 16 per vector. Keys are rounded pair by pair, all tokens of the block at once,
with one norm after another.
With feedback along tokens, pair j of token t needs the errors of earlier pairs and of earlier tokens: then a row has
the pairs with the same t + j (`skewed`), and rows are rounded in order.
Codes of `trellis` are searched as paths, four tokens at once (`paths`).

Vector multiply-adds for N tokens of D channels, at two per cycle with AVX-512: error feedback D²N/32, the norm twice
that; both are products with a triangle. For N = D = 64 these are 24 600 for keys: 12 300 cycles. The search for the
nearest points takes about 45 ns for 16 pairs: 6 µs for a block. In skewed rows each lane has its own coefficients, so a
multiply-add loads two vectors, one of them across two cache lines: loads are the limit, not arithmetic.
Measured with N = D = 64 and AVX-512, one thread: keys of ring4 11 µs a block with one norm, values of ring3.5 29 µs:
about a tenth of NumPy's time. That keys are rounded with five norms makes both together 1.8 times as long.
Letters: N tokens in a block, D head dim, P pairs (or single values) of a vector.
"""

from __future__ import annotations

from polarlm.engine.backends.native.kernels.encode.load import ANY, load, measure
from polarlm.engine.backends.native.kernels.encode.norms import write_norms
from polarlm.engine.backends.native.kernels.encode.paths import in_order, round_to_paths
from polarlm.engine.backends.native.kernels.encode.rounding import (
    round_all_tokens,
    round_alone,
    round_with_best_norms,
    write_codes,
)
from polarlm.engine.backends.native.kernels.encode.skewed import round_skewed
from polarlm.engine.backends.native.kernels.encode.unit import EncodeArguments, Encoding, PackedTiles, Unit
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import Value
from polarlm.engine.quantization.encode import LARGEST


def encode(encoding: Encoding, tiles: PackedTiles) -> Kernel[EncodeArguments]:
    """The kernel that encodes blocks into tiles.

    blocks (units,): a `Block` each; dim: D; is_half: whether all x are float16, as in slots. damaged (units,) uint8: 1
    where x is not finite. Needs `scratch_bytes` of scratch.
    """

    def emit(e: Emitter, args: EncodeArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as number:
            unit = Unit(e, encoding, args, number, scratch)
            e.store(load(unit, LARGEST if encoding.has_metric else ANY), args.damaged + number)
            measure(unit)
            if encoding.tries_norms:
                round_with_best_norms(unit, round_to_paths if encoding.rounds else round_all_tokens)
            elif encoding.rounds:
                round_to_paths(unit)
            elif not encoding.has_metric:
                round_alone(unit)
            elif encoding.along_tokens:
                round_skewed(unit)
            else:
                round_all_tokens(unit)
            if encoding.has_metric and not encoding.tries_norms:
                write_norms(unit)
            if tiles.by_token and encoding.rounds:
                tiles.emit_pack(e, *in_order(unit), unit.block.tiles)
            elif tiles.by_token:
                write_codes(unit, unit.errors)  # reuses the memory of the errors
                tiles.emit_pack(e, unit.errors, unit.norms, unit.block.tiles)
            else:
                assert not encoding.along_tokens
                tiles.emit_pack(e, unit.codes, unit.norms, unit.block.tiles)

    return Kernel(f"{encoding.name}_{tiles.name}", emit, EncodeArguments)
