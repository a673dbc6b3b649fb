"""Products at a level that multiplies matrices: the same as products of few rows, to the bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from polarlm.engine.backends.native.kernels.linear.activations import Inputs
from polarlm.engine.backends.native.kernels.linear.matrix_sums import units_at_once
from polarlm.engine.backends.native.kernels.linear.product import Product, product
from polarlm.engine.backends.native.kernels.linear.tiling import Tiling, largest_tiling
from polarlm.engine.backends.native.product_ops.products import LinearOps
from polarlm.engine.jit.compile.target import levels
from polarlm.engine.jit.isa.levels import LEVELS
from polarlm.engine.jit.isa.x86 import Avx512Amx, Avx512Vbmi
from polarlm.engine.jit.lang import F32, I32, Emitter, Level, Value, Values, vector
from polarlm.engine.weight_formats import Linear, WeightFormat, available, get
from tests import weights
from tests.backends.native.hot_loops import Loop
from tests.backends.native.launching import launcher
from tests.backends.native.test_product import packed_tiles, product_arguments, quantized, stored
from tests.jit.levels import assembly, run
from tests.pairs import in_turn

CODES = [name for name in available() if get(name).unpack is not None]
KINDS = [Inputs.CODES, Inputs.BYTES]


class Emulated(Avx512Amx):
    """AMX's level for CPUs without AMX: its products of matrices are loops over what its instructions are said to
    read."""

    name = "avx512-amx-emulated"
    needs = Avx512Vbmi.needs

    def begin_tiles(self, e: Emitter, words: int) -> None:
        self._words = words

    def end_tiles(self, e: Emitter) -> None:
        pass

    def multiply_tiles(self, e: Emitter, left: Values, stride: int, right: Value, out: Value) -> None:
        lanes = vector(I32, 16)
        with e.loop(0, 16) as row:
            total = e.zero(vector(F32, 16) if stride == 64 else lanes)
            for at, word in itertools.product(left, range(self._words)):
                a, b = e.broadcast(at + row * stride, I32, 16, 4 * word), e.load(right, lanes, 64 * word)
                for shift in (16, 0) if stride == 64 else (24, 16, 8, 0):
                    if stride == 64:
                        x, y = ((half << shift & -65536).bits(total.type) for half in (a, b))
                        total = e.fma(x, y, total)
                    else:
                        total = total + (a << shift).ashr(24) * (b << shift).ashr(24)
            e.store(total, out + row * 64)


# Every format where AMX is, and elsewhere one of each kind with its instructions emulated.
CASES = list(itertools.product([level for level in levels() if level.matrix_rows], CODES))
if not CASES and any(type(level) is Avx512Vbmi for level in levels()):
    CASES = list(itertools.product([Emulated()], ["q4_0", "q4_k", "q6_k", "q8_0", "iq4_xs", "tq1_0"]))
with_matrices = in_turn("level name", CASES)


def multiplied(
    format: WeightFormat,
    packed: np.ndarray,
    x: np.ndarray,
    sizes: Tiling,
    level: Level,
    kind: Inputs,
    activation: str | None = None,
) -> np.ndarray:
    """x times the weights of all tiles, with a bias; with an activation, half of the tiles are the gate's."""
    count, (panels, *_) = len(packed) // (1 if activation is None else 2), quantized(x, sizes.rows, level, kind)
    y, bias = np.full((len(x), 16 * count), 3, np.float32), np.arange(16 * len(packed), dtype=np.float32)
    spec = Product(format, sizes, adds=activation is None, has_bias=True, activation=activation, inputs=kind)
    run(product(spec), level, count, product_arguments(spec, packed, panels, y, bias, x.shape[1], len(x)))
    return y


@with_matrices
def test_matrices_give_what_few_rows_give(name: str, level: Level) -> None:
    """More tiles than a run has, a last slice of fewer inputs than others, and a last panel with rows that are missing;
    of one format more panels than have their sums in the cache."""
    rng = np.random.default_rng(0)
    columns = 544 if get(name).values == 32 else 512
    format, packed, _ = stored(rng, name, 18 * 16, columns)
    x = rng.standard_normal((530 if name == "q4_0" else 41, columns)).astype(np.float32)
    few, many = Tiling(*level.code_tiles[0]), largest_tiling(level)
    for kind, activation in zip(KINDS, (None, "silu"), strict=True):
        np.testing.assert_array_equal(
            *(multiplied(format, packed, x, sizes, level, kind, activation) for sizes in (few, many))
        )


@with_matrices
def test_the_largest_sums_are_exact(name: str, level: Level) -> None:
    """All codes are the lowest or the highest, where the bits of both are equal, and all inputs have the largest
    magnitude, of one sign or of two in turn."""
    format, few = get(name), Tiling(*level.code_tiles[0])
    raw = weights.random_blocks(np.random.default_rng(1), name, 16, 256)
    blocks = raw.reshape(-1, format.nbytes)
    x = np.ones((32, 256), np.float32)
    x[1], x[2, ::2], x[3, 1::3] = -1, -1, 0.5
    for byte in (0, 0x7F, 0x80, 0xFF):
        blocks[:, bytes_of_codes(format)] = byte
        packed = packed_tiles(raw, name)
        for kind in KINDS:
            tilings = few, largest_tiling(level, kind)
            np.testing.assert_array_equal(*(multiplied(format, packed, x, sizes, level, kind) for sizes in tilings))


def bytes_of_codes(format: WeightFormat) -> list[int]:
    """The bytes of a stored block that no scale depends on."""
    assert format.unpack is not None
    stored = np.full((1 + format.nbytes, format.nbytes), 0x35, np.uint8)
    stored[1:] ^= np.eye(format.nbytes, dtype=np.uint8) * 0xFF
    depends = np.zeros(format.nbytes, bool)
    for name in ("scale", "sub_scale", "offset", "sub_offset"):
        field = getattr(format.unpack(stored), name, None)
        if field is not None:
            depends |= (field[1:] != field[:1]).reshape(format.nbytes, -1).any(1)
    return np.flatnonzero(~depends).tolist()


@in_turn("level", dict.fromkeys(level for level, _ in CASES))
def test_threads_share_the_units(level: Level) -> None:
    rng = np.random.default_rng(2)
    stored_ = weights.random_matrix(rng, "q5_k", 37 * 16, 256)
    x, found = rng.standard_normal((50, 256)).astype(np.float32), []
    for threads in (1, 2, 3):
        ops = LinearOps(launcher(level, threads))
        found.append(ops.linear(x, Linear(ops.load([stored_]))).copy())
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_threads_take_many_units_and_none_has_nothing_to_do() -> None:
    assert units_at_once(96, 1, 2) == 16
    assert units_at_once(96, 2, 2) == 8
    assert units_at_once(16, 1, 4) == 4
    assert units_at_once(3, 1, 4) == 1


@in_turn("level", [level for level in LEVELS if level.matrix_rows])
@pytest.mark.parametrize(("name", "products", "sums"), [("q4_0", 2, 1), ("q5_1", 2, 1), ("q8_0", 2, 2), ("q6_k", 4, 2)])
def test_instructions(name: str, products: int, sums: int, level: Level) -> None:
    """For 32 inputs of 16 rows and outputs a product with each part of the inputs, and one sum of both that is written;
    a sum for each where codes have 8 bits, and two of each where 16 inputs have a scale. At most one vector goes to the
    stack. Inputs of 8 bits are one part."""
    kernel = product(Product(get(name), largest_tiling(level)))
    text = assembly(kernel, level)
    assert text.count("tdpbf16ps") == products
    assert text.count("tilestored") == sums
    assert Loop(kernel, level, product=True).spilled <= 1
    of_bytes = product(Product(get(name), largest_tiling(level, Inputs.BYTES), inputs=Inputs.BYTES))
    text, scales = assembly(of_bytes, level), 32 // get(name).group
    assert text.count("tdpbssd") == text.count("tilestored") == scales
    assert "tdpbf16ps" not in text
    assert Loop(of_bytes, level, product=True).spilled <= 1
