"""Products at a level that multiplies matrices: of inputs and weights that are rounded to bfloat16, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from polarlm.engine.backends.native.kernels.linear.activations import Inputs
from polarlm.engine.backends.native.kernels.linear.matrix_sums import MOST_INPUTS, units_at_once
from polarlm.engine.backends.native.kernels.linear.product import Product, product
from polarlm.engine.backends.native.kernels.linear.tiling import largest_tiling
from polarlm.engine.backends.native.product_ops.products import ExpertOps, LinearOps
from polarlm.engine.backends.numpy.rows import apply_activation
from polarlm.engine.backends.ops import ExpertNetwork, Fusion, Routing
from polarlm.engine.jit.compile.target import levels
from polarlm.engine.jit.isa.levels import LEVELS
from polarlm.engine.jit.isa.x86 import Avx512Amx, Avx512Vbmi
from polarlm.engine.jit.lang import Level
from polarlm.engine.weight_formats import ExpertLinear, Linear, available, get
from tests import weights
from tests.backends.native.hot_loops import Loop
from tests.backends.native.launching import launcher
from tests.jit.emulated_matrices import EmulatedAmx
from tests.jit.levels import assembly
from tests.pairs import in_turn

FORMATS = [name for name in available() if name != "f32"]


HERE: list[Level] = [level for level in levels() if level.matrices is not None]
# A format of each kind; the slow tests have all.
FEW = ["q4_0", "q4_k", "q6_k", "q8_0", "iq4_xs", "iq3_s", "tq1_0", "f16", "bf16"]
if not HERE and any(type(level) is Avx512Vbmi for level in levels()):
    HERE, FEW = [EmulatedAmx()], ["q4_k", "tq1_0", "f16"]
with_levels = in_turn("level", HERE)


def rounded(x: np.ndarray, *, to_even: bool = True) -> np.ndarray:
    """float32 → the nearest bfloat16, float64; ties to even, or away from zero, as weights of codes."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    half = 0x7FFF + (bits >> 16 & 1) if to_even else 0x8000
    return ((bits + half) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def rounded_weights(file: weights.StoredBytes) -> np.ndarray:
    return rounded(file.values, to_even=file.format.unpack is None)


@contextmanager
def ops_of(level: Level, threads: int = 1) -> Iterator[LinearOps]:
    class Both(LinearOps, ExpertOps):
        pass

    launch = launcher(level, threads)
    launch.input_bits = "bf16"
    yield Both(launch)


def check(actual: np.ndarray, x: np.ndarray, values: np.ndarray, want: np.ndarray, slope: float = 1) -> None:
    """float32 sums of K products in any order are within K · 2⁻²⁴ of the sum of their magnitudes. slope: of what is
    applied to the sums, at most."""
    magnitudes = np.abs(rounded(x)) @ np.abs(rounded(values)).T
    most = slope * (magnitudes.max(-1, keepdims=True) * x.shape[1] * 2.0**-24 + 1e-6)
    assert (np.abs(actual - want) <= most).all(), np.abs(actual - want).max()


def check_product(level: Level, name: str) -> None:
    """An odd number of tiles, the last with outputs that do not exist; a last matrix with rows that do not; inputs for
    a strip and a part of another, and of numbers some that are no multiple of 32; more rows than a strip is for."""
    rng = np.random.default_rng(0)
    columns = MOST_INPUTS + 256 + (7 if get(name).unpack is None else 0)
    file = weights.random_matrix(rng, name, 36, columns)
    bias, x = (rng.standard_normal(shape).astype(np.float32) for shape in (36, (297, columns)))
    with ops_of(level) as ops:
        w = Linear(ops.load([file]), bias)
        whole, *parts = (ops.linear(x[:rows], w, residual=np.full((rows, 36), 7, np.float32)) for rows in (297, 2, 41))
    check(whole, x, file.values, rounded(x) @ rounded_weights(file).T + bias + 7)
    for part in parts:  # a row's result does not depend on the others
        np.testing.assert_array_equal(part, whole[: len(part)])


test_products_of_bfloat16 = in_turn("level name", [(level, name) for level in HERE for name in FEW])(check_product)
ALL = [(level, name) for level in HERE for name in FORMATS]
test_products_with_all_formats = pytest.mark.slow(in_turn("level name", ALL)(check_product))


@with_levels
def test_the_gate_is_applied_to_sums(level: Level) -> None:
    """Also where gate and up have more inputs than a strip."""
    rng = np.random.default_rng(1)
    for columns in (544, MOST_INPUTS + 32):
        file = weights.random_matrix(rng, "q4_1", 64, columns)
        norm = rng.uniform(0.5, 1.5, columns).astype(np.float32), 1e-5
        x = rng.standard_normal((33, columns)).astype(np.float32)
        wide = x.astype(np.float64)
        normed = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + norm[1]) * norm[0]).astype(np.float32)
        both = rounded(normed) @ rounded_weights(file).T
        with ops_of(level) as ops:
            actual = ops.linear(x, Linear(ops.load([file])), Fusion(norm, "silu"))
        # A norm that is rounded to the other neighbour changes a product by 2⁻⁸ of it; few are.
        slope = 2 * np.abs(both).max() * (1 + 2.0**-8 * 2.0**24 / columns * 0.05)
        check(actual, normed, file.values, apply_activation(both, "silu"), slope)


@with_levels
def test_experts_have_any_number_of_rows(level: Level) -> None:
    rng, experts, width, hidden = np.random.default_rng(2), 5, 96, 64
    up, down = (
        [weights.random_matrix(rng, "q4_k" if columns == 256 else "q8_0", rows, columns) for _ in range(experts)]
        for rows, columns in ((hidden, width), (width, hidden))
    )
    x = rng.standard_normal((45, width)).astype(np.float32)
    ids = np.where(np.arange(45)[:, None] < 40, [[0, 3]], [[1, 3]]).astype(np.int32)  # 40, 5, 0, 45 and 0 rows
    shares = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    with ops_of(level) as ops:
        first, second = (ExpertLinear(experts, ops.load_experts([[one] for one in side])) for side in (up, down))
        actual = ops.experts(x, Routing(ids, shares), ExpertNetwork(first, second, Fusion(None, None)))  # type: ignore[attr-defined]
    want = np.zeros((45, width))
    for row, column in np.ndindex(ids.shape):
        own = rounded(x[row]) @ rounded_weights(up[ids[row, column]]).T
        want[row] += shares[row, column] * (rounded(own.astype(np.float32)) @ rounded_weights(down[ids[row, column]]).T)
    # Sums of the first product that are rounded to the other neighbour: 2⁻⁸ of one of the second's terms each.
    np.testing.assert_allclose(actual, want, atol=2.0**-8 * np.abs(want).max())


@with_levels
def test_what_is_not_finite_stays_so(level: Level) -> None:
    rng = np.random.default_rng(3)
    file = weights.random_matrix(rng, "q8_0", 32, 64)
    x = rng.standard_normal((20, 64)).astype(np.float32)
    x[3, 5], x[4, 40] = np.nan, np.inf
    x[5, 6:7].view(np.uint32)[:] = 0x7FFFFFFF  # NaN whose bits rounding must not carry over, here and in a scale
    file.raw[7, :2] = 0xFF, 0x7F
    with ops_of(level) as ops:
        y = ops.linear(x, Linear(ops.load([file])))
    assert np.isnan(y[:, 7]).all()
    y[:, 7] = 0
    y[[3, 4, 5], 7] = np.nan
    assert np.isnan(y[[3, 5]]).all()
    assert not np.isfinite(y[4]).any()
    assert np.isfinite(np.delete(y, [3, 4, 5], axis=0)).all()


@with_levels
def test_threads_share_the_units(level: Level) -> None:
    rng, found = np.random.default_rng(2), []
    file = weights.random_matrix(rng, "q5_k", 37 * 16, 256)
    x = rng.standard_normal((50, 256)).astype(np.float32)
    for threads in (1, 2, 3):
        with ops_of(level, threads) as ops:
            found.append(ops.linear(x, Linear(ops.load([file]))).copy())
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_threads_take_many_units_and_none_has_nothing_to_do() -> None:
    assert units_at_once(96, 2) == 16
    assert units_at_once(16, 4) == 2
    assert units_at_once(3, 4) == 1


@in_turn("level name", [(level, name) for level in LEVELS if level.matrices for name in ("q4_0", "q6_k", "bf16")])
def test_instructions(name: str, level: Level) -> None:
    """The loop that multiplies has a product for each matrix that it loads, makes a matrix of another strip for four
    parts of its own, and reads and writes no vectors on the stack."""
    kernel = product(Product(get(name), largest_tiling(level, Inputs.MATRICES), inputs=Inputs.MATRICES))
    text = assembly(kernel, level)
    assert text.count("tdpbf16ps") == 4 * 4 + 4 + 2  # beside what is made, the rest of parts, and of 16 rows alone
    assert Loop(kernel, level, share_of="vpermw").spilled == 0


@pytest.mark.parametrize("bits", ["8", "16"])
def test_matrices_are_for_bfloat16_alone(bits: str) -> None:
    """Where others are asked for, kernels of the level below serve."""
    level, name = Avx512Amx(), "q4_0"
    kernel = product(Product(get(name), largest_tiling(level), inputs=Inputs.BYTES if bits == "8" else Inputs.CODES))
    assert "tdp" not in assembly(kernel, level)
