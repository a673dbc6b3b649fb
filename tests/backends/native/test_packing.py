"""Rows of files become tiles: every byte of what `packed_tiles` makes with NumPy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from polarlm.engine.backends.native.kernels.linear import packing
from polarlm.engine.backends.native.product_ops import loading
from polarlm.engine.backends.native.product_ops.linear import LinearOps
from polarlm.engine.jit.compile.target import levels
from polarlm.engine.jit.isa.levels import Level
from polarlm.engine.weight_formats import WeightFormat, available, get
from tests import weights
from tests.backends.native.launching import launcher
from tests.backends.native.packed_tiles import pack
from tests.jit.levels import SOME
from tests.pairs import each, in_turn, pairs


def stored(rng: np.random.Generator, name: str, rows: int, columns: int) -> weights.StoredBytes:
    """A matrix of random bytes: of all codes, of scales that are NaN, infinite and denormal."""
    return weights.StoredBytes(rng.integers(0, 256, (rows, get(name).size(columns)), np.uint8), name)


def check_tiles(level: Level, name: str) -> None:
    """Whole tiles and the rest of one, several matrices in one; columns that fill no vector, for plain numbers."""
    rng, ops = np.random.default_rng(0), LinearOps(launcher(level))
    for rows, blocks in (16, 1), (48, 3), (37, 2), (3, 5):
        columns = blocks * max(get(name).values, 27)
        matrices = [stored(rng, name, count, columns) for count in (32, rows)]
        (whole,) = ops.load(matrices)
        wanted = pack(np.concatenate([matrix.raw for matrix in matrices]), get(name))
        np.testing.assert_array_equal(whole.data.memory, wanted)


test_tiles_have_every_bit_of_the_file = in_turn("level name", each(SOME, available()[::3]))(check_tiles)
# Every format at every level: two minutes of compilation.
test_tiles_of_all_levels = pytest.mark.slow(in_turn("level name", pairs(levels(), available()))(check_tiles))


# Blocks of digits are packed byte by byte.
@in_turn("name", [name for name in available() if get(name).unpack and not get(name).runs])
def test_every_bit_of_a_block_is_used_once_and_the_rest_is_constant(name: str) -> None:
    format = get(name)
    used = np.concatenate([field.bits.ravel() for field in packing.origins(format).values()])
    bits, counts = np.unique(used[used >= 0], return_counts=True)
    power = 8 if name == "mxfp4" else 0  # the exponent, whose scale is found in a table
    assert len(bits) == 8 * format.nbytes - power
    # The sign of a number of 6 bits is three bits of a byte; that of a group of iq1_s is a bit of four indices.
    assert set(counts) <= {1, 2, 3, 4}


def test_a_format_whose_fields_are_no_moved_bits_is_refused() -> None:
    """A scale that is the sum of two stored bytes, say."""

    def unpack(raw: np.ndarray) -> SimpleNamespace:
        total = raw[:, :1] + raw[:, 1:2]
        return SimpleNamespace(codes=total, scale=raw.view("<f2"), sub_scale=None, offset=None, sub_offset=None)

    format = WeightFormat("sum", 32, 2, lambda raw, out: None, unpack=unpack, bits=8, group=32)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sum: a bit of codes depends on several stored bits"):
        packing.origins.__wrapped__(format)


def test_a_matrix_is_packed_in_several_launches_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_SLAB_BYTES", 1 << 14)
    matrix = stored(np.random.default_rng(1), "q4_k", 500, 1024)
    (packed,) = LinearOps(launcher(levels()[-1], threads=2)).load([matrix])
    np.testing.assert_array_equal(packed.data.memory, pack(matrix.raw, get("q4_k")))
