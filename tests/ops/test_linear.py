"""Products with matrices on every backend, against float64; `tests.ops.products` has what each may be off by."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from itertools import product as combinations
from typing import Any

import numpy as np
import pytest

from polarlm.engine import weight_formats
from polarlm.engine.backends.cuda import packed
from polarlm.engine.backends.cuda.launch_configs import GEMV_ROWS
from polarlm.engine.backends.cuda.wide import WIDE_ROWS
from polarlm.engine.backends.ops import Fusion
from polarlm.engine.errors import EngineError
from polarlm.engine.weight_formats import Linear, get
from tests.cuda.emulated import EmulatedDevice
from tests.cuda.formats import EPS32, STEP
from tests.ops.backends import BEST, CUDA, EVERY_LEVEL, MATRICES, NUMPY, SOME, Backend, backend_cases, backends
from tests.ops.products import EPS, product, width_of
from tests.pairs import each, in_turn, mostly_slow, pairs
from tests.weights import BLOCKS, StoredArray, StoredBytes, load, pack, random_matrix

FORMATS = tuple(name for name in BLOCKS if packed.is_packed(get(name)))  # those that a GPU has packed


def launches(ops: Any, *prefixes: str) -> list[str] | None:
    """What has been launched since the last call, of kernels with these prefixes; None on a GPU, which does not say."""
    if not isinstance(ops._device, EmulatedDevice):
        return None
    noted, ops._device.launches = ops._device.launches, []
    return [kernel for kernel in noted if kernel.startswith(prefixes or "")]


# -- matrices ------------------------------------------------------------------------------------------------------


def test_every_format_of_codes_and_scales_is_packed() -> None:
    """The others become q8_0 before they come to the device."""
    without = {name for name in weight_formats.available() if get(name).grid or get(name).runs}
    assert set(FORMATS) == {name for name in weight_formats.available() if get(name).unpack} - without


@backends(CUDA)
@mostly_slow("name", FORMATS, ["q4_k", "q5_0", "q8_0"])
def test_tiles_hold_the_file_s_values_exactly(
    ops: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Matrices are joined, and none ends with a tile; a few rows are uploaded at a time, and rows are embedded from
    them. Each format has code of its own."""
    monkeypatch.setattr("polarlm.engine.backends.cuda.linear._UPLOAD_BYTES", 3 * 4 * 256)
    width = width_of(name, 3)
    files = [random_matrix(rng, name, rows, width) for rows in (5, 23, 9)]
    values = np.concatenate([file.values for file in files])
    (held,) = ops.load(files)
    assert held.format is get(name)
    assert held.data.nbytes == ops.matrix_bytes(held.format, 48 * width)
    np.testing.assert_array_equal(ops.rows(held), values)
    np.testing.assert_array_equal(ops.rows(held, slice(4, 30)), values[4:30])
    x = ops.embed(held, ops.to_device([36, 0, 17]), 0.5)
    np.testing.assert_array_equal(ops.to_host(x), values[[36, 0, 17]] * np.float32(0.5))


@backends(CUDA)
@pytest.mark.parametrize("stored", ["f16", "bf16"])
def test_matrices_of_16_bits_keep_the_file_s_format_on_the_device(
    ops: Any, rng: np.random.Generator, stored: str
) -> None:
    file = StoredArray(rng.standard_normal((5, 24)), stored)
    (held,) = ops.load([file])
    assert held.format.name == stored
    np.testing.assert_array_equal(ops._device.to_host(held.data), file.raw)
    np.testing.assert_array_equal(ops.rows(held, slice(1, 3)), file.values[1:3])
    assert ops.stored_format(get(stored)) is get(stored)


@backends(CUDA)
def test_a_float32_matrix_is_rounded_to_half_precision(ops: Any) -> None:
    """Values beyond half precision become its largest number."""
    x = np.array([[1e6, -1e6, 65504, 65520, np.nan, 0, -0.0, 1 + 2**-11]], np.float32)
    held = load(ops, x, "f32")
    assert held.format.name == "f16"
    np.testing.assert_array_equal(ops.rows(held), [[65504, -65504, 65504, 65504, np.nan, 0, 0, 1]])


@backends(CUDA)
def test_rows_that_kernels_cannot_read_are_refused(ops: Any) -> None:
    with pytest.raises(EngineError, match=r"rows of 12 numbers.*device=cpu"):
        load(ops, np.zeros((8, 12), np.float32), "f16")


@backends(CUDA)
def test_weights_that_do_not_fit_are_refused(ops: Any) -> None:
    free, total = ops._device.memory()
    assert ops.memory_left(free // 2) < free // 2
    with pytest.raises(EngineError, match=r"weights take .* GiB .* only .* GiB of its .* GiB are free") as caught:
        ops.memory_left(2 * total)
    assert caught.value.code == "out_of_memory"


# -- products ------------------------------------------------------------------------------------------------------

# Rows, inputs and outputs; a GPU's multiprocessors, which decide with these how blocks and warps share a product; the
# matrix's format; what else there is.
PRODUCTS = [
    (1, 4104, 33, 1, "f16", "norm bias added"),
    (2, 264, 21, 6, "bf16", ""),
    (2, 2104, 10, 6, "f16", "norm silu"),  # several warps for an output
    (1, 72, 3, 6, "f32", "bias added"),
    (4, 48, 40, 1, "f16", "bias added"),
    (3, 72, 1, 6, "bf16", "bias added recorded"),
    (9, 1032, 40, 1, "f16", "norm bias added"),
    (50, 328, 260, 1, "bf16", "bias added"),
    (9, 776, 48, 1, "bf16", "norm silu"),
    (70, 48, 48, 6, "bf16", "norm bias silu"),
    (100, 48, 40, 6, "f16", "norm bias added recorded"),
    (20, 8192, 20, 6, "q4_k", "bias added"),  # with few rows of weights, blocks share the inputs
    (70, 768, 300, 1, "q4_k", "bias added"),  # several tiles and groups of rows
    # The activation is in the product where gate and up are whole tiles, and follows it where they share one.
    *((rows, width_of(name, 4), out, 6, name, "norm silu") for rows, out, name in [(1, 32, "q8_0"), (3, 48, "q4_k")]),
    *((rows, width_of(name, 4), 160, 6, name, "norm silu") for rows, name in [(8, "q8_0"), (20, "q4_k")]),
    (12, width_of("q4_k", 4), 32, 6, "q4_k", "norm silu"),
]
OF_CPU = [
    (1, 256, 64, 0, "q4_1", "norm"),
    (5, 256, 64, 0, "q6_k", "norm added"),
    (40, 256, 64, 0, "iq4_xs", "norm silu"),
]


@backend_cases(
    "ops rows columns out processors name options",
    [*((CUDA, *case) for case in PRODUCTS), *((backend, *case) for backend in (NUMPY, *BEST) for case in OF_CPU)],
)
def test_linear_is_the_product(
    ops: Any, rows: int, columns: int, out: int, processors: int, name: str, options: str
) -> None:
    """Rows for a GPU's own kernels and for the library, recorded or not."""
    case = product(ops, [(name, out)], columns, rows, options)
    if ops.backend == "cuda":
        ops._device.processors = processors
        launches(ops)
    case.check(case.result(is_recorded="recorded" in options))
    if ops.backend == "cuda" and get(name).unpack:
        follows = "silu" in options and out % 32 != 0
        assert launches(ops, "activate_mul", "add_parts") in (
            None,
            ["activate_mul_kernel"] * follows + ["add_parts_kernel"] * (columns == 8192),
        )


ROWS = (1, 2, 3, 9, 16, 17, 40, 48, 64, WIDE_ROWS, WIDE_ROWS + 1)


@backends(CUDA)
@mostly_slow(
    "name, rows", combinations(FORMATS, ROWS), [("q4_k", 1), ("q6_k", 2), ("q8_0", 3), ("q4_k", 9), ("q5_0", 40)]
)
def test_products_with_every_format(ops: Any, monkeypatch: pytest.MonkeyPatch, name: str, rows: int) -> None:
    """Each format has code of its own, in each of the kernels that rows choose, with much shared memory and little; of
    many rows, a few rows of weights are dequantized at a time."""
    ops._device.shared_memory = (228 if rows % 3 else 100) << 10
    monkeypatch.setattr("polarlm.engine.backends.cuda.linear.DEQUANTIZED_BYTES", 2 * width_of(name, 3) * 20)
    case = product(ops, [(name, 37)], width_of(name, 11 if rows <= WIDE_ROWS else 3), rows, "bias added")
    case.check(case.result())


@pytest.mark.slow
@backends(CUDA)
@pytest.mark.parametrize(
    ("rows", "name"),
    [(1, "q2_k"), (2, "q4_k"), (2, "q8_0"), (3, "q4_1"), (13, "q3_k"), (40, "q4_0"), (70, "q4_k"), (100, "q8_0")],
)
def test_blocks_of_a_small_gpu_multiply_several_sets_of_tiles(ops: Any, rows: int, name: str) -> None:
    """A GPU of one multiprocessor has fewer blocks than sets, whose last tiles are not all there. Warps take several
    units, and the last one is a part: slots of shared memory are used again. Blocks of more than two rows have seven
    warps for gate and up."""
    ops._device.processors = 1
    if rows <= GEMV_ROWS:
        config, blocks, _ = packed.gemv_packed(rows, 1, 228 << 10, (packed.rows_of(get(name), 300),))
        assert 3 * blocks < -(-300 // (16 * config.defines["TILES"]))
    shapes = [(300, width_of(name, 11), "bias added"), (70, 18 * 256 + get(name).values, "bias added")]
    for out, columns, options in [*shapes, (224, width_of(name, 4), "norm silu")]:
        case = product(ops, [(name, out)], columns, rows, options)
        case.check(case.result())


# Outputs and formats of the parts of a matrix.
MIXED = [("bf16", 20), ("f16", 12), ("f32", 20), ("bf16", 12), ("f32", 16)]


@backend_cases(
    "ops matrices columns rows options",
    [
        *((backend, MIXED, 48, 3, "norm bias added") for backend in (NUMPY, *BEST)),
        *((CUDA, MIXED, 48, rows, "norm bias silu") for rows in (1, 6, 70)),
        *((CUDA, MIXED, 48, rows, "norm bias added") for rows in (3, 20)),
        # Inputs that become words.
        *((backend, [("q4_1", 64), ("q4_1", 64)], 256, 1, "norm") for backend in BEST),
        *((backend, [("q6_k", 64), ("q8_0", 64)], 256, 5, "norm") for backend in BEST),
        *((backend, [("iq4_xs", 64), ("q5_k", 64)], 256, 40, "norm") for backend in BEST),
    ],
)
def test_parts_may_have_different_formats(
    ops: Any, matrices: list[tuple[str, int]], columns: int, rows: int, options: str
) -> None:
    case = product(ops, matrices, columns, rows, options)
    if ops.backend == "cuda":
        kept = ["f16" if name == "f32" else name for name, _ in MIXED]  # float32 becomes half
        assert [part.format.name for part in case.w.parts] == [name for name, _ in itertools.groupby(kept)]
    case.check(case.result())
    held = ops.rows(case.w)
    np.testing.assert_array_equal(ops.rows(case.w, slice(15, 40)), held[15:40])
    np.testing.assert_allclose(held, np.concatenate([file.values for file in case.files]), rtol=2**-11, atol=1e-6)


TWO = ("q4_k", "q6_k")


@backends(CUDA)
@pytest.mark.parametrize(
    ("rows", "formats", "gated", "processors"),
    [
        (1, TWO, False, 6),
        (2, ("q5_0", "q8_0"), False, 6),
        (1, TWO, False, 1),  # fewer blocks than sets of tiles, of both formats
        (16, ("q5_0", "q8_0"), False, 6),
        (70, TWO, False, 6),
        (5, ("q4_k", "q5_k"), True, 6),  # an activation follows the product, since no block has both formats
        (1, ("q4_k", "q5_k", "q6_k"), False, 6),  # the third one has a launch of its own
    ],
)
def test_formats_in_one_launch_give_the_results_of_single_launches(
    ops: Any, monkeypatch: pytest.MonkeyPatch, rows: int, formats: tuple[str, ...], gated: bool, processors: int
) -> None:
    """To the bit. With a norm before, and with a bias and a sum after it; matrices end within a tile unless they are
    gated."""
    ops._device.processors = processors
    matrices = [*zip(formats, (80, 48, 32) if gated else (70, 37, 21), strict=False)]
    cases = [product(ops, matrices, 3 * 256, rows, options) for options in ("norm" + " silu" * gated, "bias added")]
    launches(ops)
    together = [case.result() for case in cases]
    kernel = "gemv_packed_kernel" if rows <= GEMV_ROWS else "gemm_wide_kernel"
    assert launches(ops, "gemv", "gemm") in (None, [kernel] * 2 * (len(formats) - 1))
    monkeypatch.setattr(packed, "joins", lambda *args: False)
    np.testing.assert_equal(together, [case.result() for case in cases])
    assert launches(ops, "gemv", "gemm") in (None, [kernel] * 2 * len(formats))


@backends(CUDA)
def test_parts_of_the_inputs_of_two_formats_are_added(ops: Any) -> None:
    case = product(ops, [("q4_k", 70), ("q6_k", 37)], 1024, 5)
    launches(ops)
    together, x = case.result(), ops.to_device(case.x)
    assert launches(ops, "gemv", "gemm") in (None, ["gemm_wide_kernel"])
    apart = [ops.to_host(ops.linear(x, Linear((part,)))) for part in case.w.parts]
    np.testing.assert_array_equal(together, np.concatenate(apart, axis=1))


@backends(CUDA)
def test_matrices_that_are_not_packed_and_many_rows_take_a_launch_each(ops: Any) -> None:
    plain, larger, smaller = product(ops, [("f16", 32), ("q6_k", 32), ("q4_k", 32)], 256, 1).w.parts
    assert not packed.joins(plain, larger)
    assert not packed.joins(larger, plain)
    assert packed.joins(larger, smaller)
    ops.linear(ops.to_device(np.zeros((WIDE_ROWS + 1, 256), np.float32)), Linear((larger, smaller)))
    assert launches(ops, "dequantize") in (None, ["dequantize_kernel"] * 2)


@backends(CUDA)
@pytest.mark.parametrize(
    ("rows", "rounded", "name", "half", "blocks", "following"),
    [
        (2, False, "q4_k", 512, 8, "f16"),
        (3, True, "q8_0", 24, 4, "bf16"),
        (12, True, "f16", 32, 4, "q8_0"),
        (40, True, "q4_k", 16, 256, "bf16"),
        (130, True, "q8_0", 24, 4, "bf16"),
    ],
)
def test_an_activation_comes_in_the_type_of_the_next_product(
    ops: Any, rows: int, rounded: bool, name: str, half: int, blocks: int, following: str
) -> None:
    """To the bit as `narrow` would make it; infinities are clipped as well, and NaN stays."""
    half = -(-half // get(following).values) * get(following).values
    gate_up = product(ops, [(name, 2 * half)], width_of(name, blocks), rows)
    down = product(ops, [(following, 40)], half, 1).w
    gate_up.x[0], gate_up.x[1, 3] = 3e4, np.nan
    x = ops.to_device(gate_up.x)
    plain = ops.linear(x, gate_up.w, Fusion(activation="silu"))
    launches(ops)
    y = ops.linear(x, gate_up.w, Fusion(activation="silu", consumer=down))
    assert y.dtype == (np.float32 if not rounded else np.uint16 if following == "bf16" else np.float16)
    out = ops.to_host(ops.linear(y, down))
    noted = launches(ops)
    if noted is not None:
        assert noted.count("narrow_kernel") == rounded  # x is
        if blocks == 256 and rows == 40:  # with few rows of weights, blocks share the inputs
            assert "add_parts_kernel" in noted
    np.testing.assert_array_equal(out, ops.to_host(ops.linear(plain, down)))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[2:]).all()


# -- a row, whatever the number of other rows ------------------------------------------------------------------

BATCHES = (1, 2, 3, 9, 17, 64, 70, 128, 130)


@pytest.mark.slow
@backends(CUDA)
@pytest.mark.parametrize(("name", "options"), pairs(["f16", "bf16", "q8_0", "q4_k"], ["", "norm", "silu", "norm silu"]))
def test_other_rows_change_only_the_order_of_sums(ops: Any, name: str, options: str) -> None:
    """Kernels round x to the same numbers, and gemm_wide adds them in the same order. The exceptions are one and two
    rows: bf16 weights take x unrounded, and packed ones are not rounded themselves.

    Within what float32 sums in two orders differ by, which is less than rounding x changes; and nothing at all with
    packed weights, from three rows on, up to as many as are multiplied as they are."""
    case = product(ops, [(name, 48)], 1024, max(BATCHES), options)
    x, norm = ops.to_device(2 * case.x), case.norm
    results = {rows: ops.to_host(ops.linear(x[:rows], case.w, Fusion(norm, case.activation)))[0] for rows in BATCHES}
    weights, values = ops.rows(case.w).astype(np.float64), 2 * case.x[0].astype(np.float64)
    if case.gain is not None:
        values *= case.gain / np.sqrt((values**2).mean() + EPS)
    root = np.sqrt(weights**2 @ values**2)  # the root of the sum of squares of what is summed
    same = [results[rows] for rows in BATCHES if rows > (GEMV_ROWS if name != "f16" else 0)]
    order, rounding = 4 * EPS32 * np.sqrt(1024) * root, STEP["__half"] / 4 * root
    assert (order < rounding / 4).all()
    if case.activation is not None:
        gate, up = np.split(weights @ values, 2)
        (gate_order, up_order), silu = np.split(order, 2), gate / (1 + np.exp(-gate))
        order = 1.1 * gate_order * (np.abs(up) + up_order) + np.abs(silu) * up_order + 16 * EPS32 * np.abs(gate * up)
    for other in same[1:]:
        assert (np.abs(other - same[0]) <= order).all()
    if get(name).unpack:
        wide = [results[rows] for rows in BATCHES if GEMV_ROWS < rows <= WIDE_ROWS]
        np.testing.assert_equal(wide, wide[:1] * len(wide))


@backends(CUDA)
def test_inputs_of_any_size_are_normalised_before_they_are_rounded(ops: Any) -> None:
    """Residual streams of some models leave the range of half precision."""
    case = product(ops, [("q8_0", 40)], 1024, 9)
    norm = ops.to_device(np.full(1024, 30, np.float32)), 0.0
    for rows in (1, 2, 3, 9):
        small, large = (ops.linear(ops.to_device(scale * case.x[:rows]), case.w, Fusion(norm)) for scale in (1, 2**17))
        np.testing.assert_array_equal(ops.to_host(large), ops.to_host(small))


@backends(CUDA)
@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_beyond_half_precision_saturate(ops: Any, rows: int) -> None:
    x = np.zeros((3, 8), np.float32)
    x[0, 1], x[1, 2], x[2, 3] = 1e6, -1e6, np.nan
    w = Linear((load(ops, np.ones((1, 8), np.float32), "f16"),))
    parts = [ops.to_host(ops.linear(ops.to_device(x[i : i + rows]), w)) for i in range(0, 3, rows)]
    np.testing.assert_array_equal(np.concatenate(parts)[:, 0], [65504, -65504, np.nan])


# -- compiled kernels, whose inputs become words -------------------------------------------------------------------

OF_EACH_KIND = ["q4_1", "q4_k", "q6_k", "q8_0", "iq3_s", "mxfp4", "tq1_0", "f16", "bf16"]  # of ways to be unpacked
COUNTS = [1, 3, 5, 9, 20, 40, 210]  # also more panels of rows than those for which weights are unpacked once
OPTIONS = ["norm", "bias added", "silu", "norm bias silu"]


def check_compiled(backend: Backend, name: str, rows: int, bits: str, options: str) -> None:
    """The last tile has outputs that do not exist, and the last group of 32 inputs no neighbour. Inputs are integers,
    which are exact in words and in bytes, unless a norm changes them."""
    ops = backend.open(1 + rows % 3)  # threads
    ops._launch.input_bits = bits
    columns = 512 if get(name).values == 256 else 544
    if bits == "bf16":  # more than a strip has, and of numbers no whole groups
        columns += 2048 if get(name).unpack else 2048 + 7
    case = product(ops, [(name, 64 if "silu" in options else 36)], columns, rows, options)
    x = np.random.default_rng(1).integers(-127, 128, case.x.shape).astype(np.float32)
    x[:, ::32] = 127
    case = replace(case, x=x / 64)
    case.result()
    ops._launch.library.wait([*ops._launch.library._futures])  # the kernels of so few rows
    actual = case.result()
    case.check(actual)
    if get(name).unpack is not None or bits == "bf16":  # to the bit what rows have without others
        few = slice(-2 if bits == "bf16" else -1, None)
        without = replace(case, x=case.x[few], before=None if case.before is None else case.before[few])
        np.testing.assert_array_equal(without.result(), actual[few])


OF_CODES = [name for name in weight_formats.available() if get(name).unpack]
OF_MATRICES, MANY = ["q4_k", "tq1_0", "f16", "q6_k", "q8_0", "bf16"], [297, 41, 2]  # more than a strip is for, and few
INPUTS = [("16", options) for options in OPTIONS] + [("8", options) for options in OPTIONS if "norm" not in options]
test_products_at_some_levels = in_turn(
    "backend name rows bits options",
    [
        *((*of, rows, *inputs) for of, rows, inputs in each(pairs(SOME, OF_EACH_KIND), COUNTS, INPUTS)),
        *((*of, rows, "bf16", options) for of, rows, options in each(pairs(MATRICES, OF_MATRICES), MANY, OPTIONS)),
    ],
)(check_compiled)
# Every format at every level, with every number of rows: minutes of compilation.
test_products_of_all_levels = pytest.mark.slow(
    in_turn(
        "backend name rows bits options",
        [(*of, *inputs) for *of, inputs in pairs(EVERY_LEVEL, weight_formats.available(), COUNTS, INPUTS)]
        + [(*of, "bf16", options) for of, options in each(pairs(MATRICES, OF_CODES, MANY), OPTIONS)],
    )(check_compiled)
)


@in_turn("backend name", each(SOME or [NUMPY], weight_formats.available()))
def test_rows_of_a_matrix_are_those_of_the_file(backend: Backend, name: str) -> None:
    """To the bit: of whole tiles, and of a tile with rows that do not exist. Kernels of the level pack the matrix."""
    ops, file = backend.open(), random_matrix(np.random.default_rng(2), name, 36, 256)
    (held,) = ops.load([file])
    np.testing.assert_array_equal(ops.embed(held, np.array([35, 0, 17, 17], np.int32)), file.values[[35, 0, 17, 17]])


@in_turn("backend most", pairs(SOME, [2**7, 2**15]))
def test_inputs_are_rounded_to_the_nearest(backend: Backend, most: int) -> None:
    """Errors are as those of numbers that are anywhere in a step; what is cut off instead makes twice as much."""
    ops, rows = backend.open(), 20
    ops._launch.input_bits = "8" if most == 2**7 else "16"
    case = product(ops, [("q4_k", 48)], 512, rows)
    weights = case.files[0].values.astype(np.float64)
    steps = np.abs(case.x.reshape(rows, -1, 32)).max(-1).repeat(32, axis=1) / most
    usual = np.sqrt(steps**2 / 12 @ weights.T**2)
    assert np.linalg.norm(case.result() - case.x @ weights.T) < 1.15 * np.linalg.norm(usual)


@backends(*BEST, *MATRICES)
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_damaged_numbers_and_zeros_are_seen_in_words(ops: Any, rng: np.random.Generator, name: str) -> None:
    """A number that is not finite makes the outputs of its row so, and no other one; zeros make zeros."""
    values = rng.standard_normal((64, 256)).astype(np.float32)
    values[3], values[4, 64:96] = 0, 0
    sound = pack(values, name)
    damaged = sound.reshape(64, -1, 2).copy()
    damaged[5, 70], damaged[6, 255] = ([0, 0x7C], [1, 0xFE]) if name == "f16" else ([0x80, 0x7F], [0xC1, 0xFF])
    x = rng.standard_normal((7, 256)).astype(np.float32)
    matrices = [StoredBytes(raw.reshape(64, -1), name) for raw in (sound, damaged)]
    of_sound, of_damaged = (ops.linear(x, Linear(ops.load([matrix]))).copy() for matrix in matrices)
    assert not np.isfinite(of_damaged[:, 5:7]).any()
    others = [output for output in range(64) if output not in (5, 6)]
    np.testing.assert_array_equal(of_damaged[:, others], of_sound[:, others])
    assert not of_sound[:, 3].any()
    allowed = 0.2 if ops._launch.input_bits == "bf16" else 1e-2
    np.testing.assert_allclose(of_sound[:, 4], x.astype(np.float64) @ matrices[0].values[4], rtol=1e-3, atol=allowed)


@backends(*SOME, *MATRICES)
def test_a_row_with_a_number_that_is_not_finite_has_no_finite_result(ops: Any) -> None:
    """And no other row is touched."""
    case = product(ops, [("q4_k", 32)], 256, 3)
    for norm in (None, (np.ones(256, np.float32), 1e-5)):
        sound = ops.linear(case.x, case.w, Fusion(norm)).copy()
        for value in (np.nan, -np.nan, np.inf, -np.inf, np.uint32(0x7FFFFFFF).view(np.float32)):
            damaged = case.x.copy()
            damaged[1, 77] = value
            actual = ops.linear(damaged, case.w, Fusion(norm))
            assert not np.isfinite(actual[1]).any(), (value, norm)
            np.testing.assert_array_equal(actual[[0, 2]], sound[[0, 2]])


@backends(*SOME)
def test_inputs_of_any_size_are_multiplied_rightly(ops: Any, rng: np.random.Generator) -> None:
    """In a group whose largest input is at most 1e-34 all count as 0: words for them would take an infinite factor."""
    case, x = product(ops, [("q4_k", 48)], 256, 1), rng.uniform(-1, 1, (7, 256))
    x[:, ::32] = 1  # the largest of each group
    x = (x * np.float64([[1e30], [1e-30], [1.1e-34], [1e-40], [0.9e-34], [1e-37], [0]])).astype(np.float32)
    x[3, 32:] = rng.uniform(-1, 1, 224)  # with groups of usual size
    actual = ops.linear(x, case.w).astype(np.float64)
    wanted = x.astype(np.float64) @ case.files[0].values.astype(np.float64).T
    error, size = (np.linalg.norm(rows, axis=1) for rows in (actual - wanted, wanted))
    assert (error[:4] < 1e-4 * size[:4]).all()
    assert not actual[4:].any()


@backends(*BEST)
@pytest.mark.parametrize("bits", ["8", "16", "bf16"])
def test_products_are_repeated_with_other_rows(ops: Any, rng: np.random.Generator, bits: str) -> None:
    """To the bit what a product is that nothing was kept of: with other rows, their number and results, parts in two
    formats, a norm and a bias."""
    ops = BEST[0].open(2)
    ops._launch.input_bits = bits
    stored = [random_matrix(rng, name, 64, 256) for name in ("q4_k", "q6_k", "q4_k")]
    bias, norm = rng.standard_normal(192).astype(np.float32), (rng.standard_normal(256).astype(np.float32), 1e-5)
    whole, first = Linear(ops.load(stored), bias), Linear(ops.load(stored[:1]))
    for rows in (40, 40, 41, 7, 1, 100, 1, 40):
        x, y = (rng.standard_normal((rows, size)).astype(np.float32) for size in (256, 64))
        other = BEST[0].open(2)
        other._launch.input_bits = bits
        sums = [y.copy(), y.copy()]
        for number, one in enumerate((ops, other)):
            assert one.linear(x, first, residual=sums[number]) is sums[number]
        np.testing.assert_array_equal(*sums)
        np.testing.assert_array_equal(ops.linear(x, whole, Fusion(norm)), other.linear(x, whole, Fusion(norm)))
        np.testing.assert_array_equal(*(one.linear(x, first, Fusion(activation="silu")).copy() for one in (ops, other)))


@backends(*BEST)
def test_products_do_not_wait_for_the_kernels_of_their_number_of_rows(
    ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of prompts and steps take the kernels of many rows meanwhile, with the same results."""
    from polarlm.engine.backends.native.kernels.linear.tiling import largest_tiling
    from polarlm.engine.jit.compile.compiler import compile_object
    from polarlm.engine.jit.compile.library import Library

    launch = ops._launch
    if launch.level.lanes < 8:
        pytest.skip("kernels of this level take one row or two, which are the most")
    may_compile = threading.Event()
    (most, tiles, _), rows = largest_tiling(launch.level), {16: 5, 8: 2}[launch.level.lanes]

    def slow(*args: Any) -> bytes:
        assert may_compile.wait(120)
        return compile_object(*args)

    launch.library = Library(launch.level, None)
    case = product(ops, [("q5_1", 48)], 64, rows)
    ops.linear(np.zeros((48, 64), np.float32), case.w)
    with monkeypatch.context() as patch:
        patch.setattr("polarlm.engine.jit.compile.library.compile_object", slow)
        early = [case.result()]
        with launch.graph():
            early.append(case.result())
        compiled = {name for name in launch.library.names if not name.startswith("pack_")}
        assert compiled == {f"quantize_{most}", f"product_q5_1_{most}" + f"x{tiles}" * (tiles > 1)}
        may_compile.set()
        launch.library.wait([*launch.library._futures])
    assert f"product_q5_1_{rows}" in launch.library.names
    late = case.result()
    for one in early:
        np.testing.assert_array_equal(one, late)
