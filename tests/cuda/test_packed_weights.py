"""Packed weight formats on the emulator: tiles, products and rows against gguf's dequantizers in float64."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from polarlm.engine import weight_formats
from polarlm.engine.backends.cuda import packed
from polarlm.engine.backends.cuda.launch_configs import GEMV_ROWS
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.cuda.wide import WIDE_ROWS
from polarlm.engine.weight_formats import Linear, get
from tests.cuda.emulated import EmulatedDevice, open_device
from tests.cuda.formats import EPS32
from tests.pairs import mostly_slow
from tests.weights import BLOCKS, random_matrix

HALF = float(np.finfo(np.float16).eps)
EPS = 1e-5
FORMATS = tuple(name for name in BLOCKS if packed.is_packed(get(name)))


@pytest.fixture
def ops() -> CudaOps:
    return CudaOps(open_device())


def test_every_format_of_codes_and_scales_is_packed() -> None:
    """Those without a struct become q8_0 before they come to the device."""
    without = {name for name in weight_formats.available() if get(name).grid or get(name).runs} | {"tq2_0"}
    assert set(FORMATS) == {name for name in weight_formats.available() if get(name).unpack} - without


def launched(ops: CudaOps, kernel: str) -> bool | None:
    """Whether this kernel has run; None on a GPU, which does not say."""
    return kernel in ops._device.launches if isinstance(ops._device, EmulatedDevice) else None


def width_of(name: str, blocks: int) -> int:
    """Inputs of a row of at least 32 · `blocks`."""
    values = get(name).values
    return -(-32 * blocks // values) * values


def allowed_of(raw: np.ndarray, name: str) -> np.ndarray:
    """How far weights in half precision may be from the file's (rows, in): scale, offset and result are rounded, each
    by at most half a unit, or by half the smallest number of half precision."""
    format = get(name)
    assert format.unpack
    grouped = format.unpack(raw)
    values = grouped.dequantize().astype(np.float64)
    offsets = np.zeros_like(values)
    if grouped.offset is not None:
        offsets += np.repeat(grouped.offset.astype(np.float64), format.values, axis=1)
    if grouped.sub_offset is not None:
        offsets *= np.repeat(grouped.sub_offset, format.group, axis=1)
    codes = np.abs(grouped.codes.astype(np.float64) - format.zero) if grouped.table is None else 127.0
    return HALF / 2 * (np.abs(values - offsets) + np.abs(offsets) + np.abs(values)) + 2.0**-25 * (codes + 2)


@mostly_slow("name", FORMATS, ["q4_k", "q5_0", "q8_0"])
def test_tiles_hold_the_file_s_values_exactly(
    ops: CudaOps, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str
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


ROWS = (1, 2, 3, 9, 16, 17, 40, 48, 64, WIDE_ROWS, WIDE_ROWS + 1)


@mostly_slow("name, rows", product(FORMATS, ROWS), [("q4_k", 1), ("q6_k", 2), ("q8_0", 3), ("q4_k", 9), ("q5_0", 40)])
def test_products_with_every_format(
    ops: CudaOps, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str, rows: int
) -> None:
    """Each format has code of its own, in each of the kernels that rows choose, with much shared memory and little; of
    many rows, a few rows of weights are dequantized at a time."""
    monkeypatch.setattr(EmulatedDevice, "shared_memory", (228 if rows % 3 else 100) << 10)
    monkeypatch.setattr("polarlm.engine.backends.cuda.linear.DEQUANTIZED_BYTES", 2 * width_of(name, 3) * 20)
    check_product(ops, rng, name, rows, 37, width_of(name, 11 if rows <= WIDE_ROWS else 3))


def test_products_of_parts_of_the_inputs(ops: CudaOps, rng: np.random.Generator) -> None:
    """With few rows of weights, blocks share the inputs."""
    check_product(ops, rng, "q4_k", 20, 20, 8192)
    assert launched(ops, "add_parts_kernel") in (True, None)


def test_products_of_several_tiles_and_groups_of_rows(
    ops: CudaOps, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmulatedDevice, "processors", 1)
    check_product(ops, rng, "q4_k", 70, 300, 768)


def check_product(ops: CudaOps, rng: np.random.Generator, name: str, rows: int, out: int, width: int) -> None:
    """x @ weightᵀ + bias, added to what is there, against float64; x is rounded to half precision."""
    file = random_matrix(rng, name, out, width)
    x = (rng.standard_normal((rows, width)) * rng.uniform(0.1, 4, (rows, 1))).astype(np.float32)
    bias, before = (rng.standard_normal(size).astype(np.float32) for size in ((out,), (rows, out)))
    y = ops.linear(ops.to_device(x), Linear(ops.load([file]), ops.to_device(bias)), residual=ops.to_device(before))
    rounded, weights = x.astype(np.float16).astype(np.float64), file.values.astype(np.float64)
    exact = rounded @ weights.T + bias + before
    allowed = np.abs(rounded) @ allowed_of(file.raw, name).T
    allowed += 4 * EPS32 * (np.sqrt(width) * np.sqrt(rounded**2 @ weights.T**2) + np.abs(exact))
    worst = np.abs(ops.to_host(y) - exact) - allowed
    assert (worst <= 0).all(), f"{(~(worst <= 0)).sum()} of {worst.size} are off, by up to {np.nanmax(worst)}"


@pytest.mark.parametrize(
    ("half", "rows", "name"), [(16, 1, "q8_0"), (24, 3, "q4_k"), (80, 8, "q8_0"), (16, 12, "q4_k"), (80, 20, "q4_k")]
)
def test_the_activation_of_gate_and_up(ops: CudaOps, rng: np.random.Generator, name: str, rows: int, half: int) -> None:
    """In the product where gate and up are whole tiles, and after it where they share one; with a norm before."""
    check_activation(ops, rng, name, rows, half)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "name"),
    [(1, "q2_k"), (2, "q4_k"), (2, "q8_0"), (3, "q4_1"), (13, "q3_k"), (40, "q4_0"), (70, "q4_k"), (100, "q8_0")],
)
def test_blocks_of_a_small_gpu_multiply_several_sets_of_tiles(
    ops: CudaOps, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str, rows: int
) -> None:
    """A GPU of one multiprocessor has fewer blocks than sets, whose last tiles are not all there. Warps take several
    units, and the last one is a part: slots of shared memory are used again. Blocks of more than two rows have seven
    warps for gate and up."""
    monkeypatch.setattr(EmulatedDevice, "processors", 1)
    if rows <= GEMV_ROWS:
        config, blocks, _ = packed.gemv_packed(rows, 1, 228 << 10, (packed.rows_of(get(name), 300),))
        assert 3 * blocks < -(-300 // (16 * config.defines["TILES"]))
    check_product(ops, rng, name, rows, 300, width_of(name, 11))
    check_product(ops, rng, name, rows, 70, 18 * 256 + get(name).values)
    check_activation(ops, rng, name, rows, 112)


def check_activation(ops: CudaOps, rng: np.random.Generator, name: str, rows: int, half: int) -> None:
    """activation(gate) * up, x normed, against float64."""
    width = width_of(name, 4)
    file = random_matrix(rng, name, 2 * half, width)
    x, norm = rng.standard_normal((rows, width)).astype(np.float32), rng.uniform(0.5, 2, width).astype(np.float32)
    w = Linear(ops.load([file]))
    y = ops.to_host(ops.linear(ops.to_device(x), w, norm=(ops.to_device(norm), EPS), activation="silu"))
    assert launched(ops, "activate_mul_kernel") in (half % 16 != 0, None)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + EPS) * norm
    gate, up = np.split(normed @ file.values.astype(np.float64).T, 2, axis=1)
    wanted = gate / (1 + np.exp(-gate)) * up
    off = np.abs(normed) @ (allowed_of(file.raw, name) + HALF * np.abs(file.values)).T
    off_gate, off_up = np.split(off + 1e-5, 2, axis=1)
    allowed = 1.1 * off_gate * (np.abs(up) + off_up) + np.abs(gate) * off_up
    assert (np.abs(y - wanted) <= allowed).all()


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
    ops: CudaOps, rng: np.random.Generator, rows: int, rounded: bool, name: str, half: int, blocks: int, following: str
) -> None:
    """To the bit as `narrow` would make it; infinities are clipped as well, and NaN stays."""
    half = -(-half // get(following).values) * get(following).values
    width = width_of(name, blocks)
    files = [random_matrix(rng, name, 2 * half, width), random_matrix(rng, following, 40, half)]
    gate_up, down = (Linear(ops.load([file])) for file in files)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    x[0], x[1, 3] = 3e4, np.nan
    on_device = ops.to_device(x)
    plain = ops.linear(on_device, gate_up, activation="silu")
    before = len(ops._device.launches) if isinstance(ops._device, EmulatedDevice) else 0
    y = ops.linear(on_device, gate_up, activation="silu", consumer=down)
    assert y.dtype == (np.float32 if not rounded else np.uint16 if following == "bf16" else np.float16)
    out = ops.to_host(ops.linear(y, down))
    if isinstance(ops._device, EmulatedDevice):
        assert ops._device.launches[before:].count("narrow_kernel") == rounded  # x is
        if blocks == 256 and rows == 40:  # with few rows of weights, blocks share the inputs
            assert "add_parts_kernel" in ops._device.launches[before:]
    np.testing.assert_array_equal(out, ops.to_host(ops.linear(plain, down)))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[2:]).all()
