"""Products with weights in tiles, at every level of CPU features, against the dequantized weights in float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from polarlm.engine.backends.native import tiles
from polarlm.engine.backends.native.kernels.linear import packing
from polarlm.engine.backends.native.kernels.linear.activations import (
    GROUP,
    Inputs,
    RowArguments,
    are_paired,
    inputs_for,
    interleave_rows,
    number_bytes,
    panel_bytes,
    quantize_rows,
    splits,
)
from polarlm.engine.backends.native.kernels.linear.dequantize import DequantizeArguments, dequantize_rows
from polarlm.engine.backends.native.kernels.linear.product import Product, ProductArguments, product, units
from polarlm.engine.backends.native.kernels.linear.tiling import Tiling, are_unsigned, largest_tiling, tiling
from polarlm.engine.backends.native.product_ops import loading
from polarlm.engine.backends.native.product_ops.products import LinearOps
from polarlm.engine.backends.numpy.rows import apply_activation
from polarlm.engine.jit.compile.target import best, levels
from polarlm.engine.jit.lang import Level
from polarlm.engine.weight_formats import WeightFormat, available, get
from tests import weights
from tests.backends.native.launching import launcher
from tests.jit.levels import SOME, run, some_levels
from tests.pairs import each, in_turn, pairs

FEW = ["q4_1", "q4_k", "q6_k", "q8_0", "iq3_s", "mxfp4", "tq1_0", "f16", "bf16"]  # each is unpacked in its own way


def packed_tiles(raw: np.ndarray, name: str, level: Level | None = None) -> np.ndarray:
    """Rows of a file in tiles, which kernels of a level pack, or of the best one."""
    (matrix,) = LinearOps(launcher(level or best())).load([weights.StoredBytes(raw, name)])
    return matrix.data.memory


def stored(
    rng: np.random.Generator, name: str, rows: int, columns: int, level: Level | None = None
) -> tuple[WeightFormat, np.ndarray, np.ndarray]:
    """A random matrix: its format, its tiles, and its values, float32."""
    file = weights.random_matrix(rng, name, rows, columns)
    return file.format, packed_tiles(file.raw, name, level), file.values


def _rows(x: np.ndarray, out: np.ndarray, weight: np.ndarray | None = None) -> RowArguments:
    return RowArguments(x=x, weight=weight, out=out, columns=x.shape[1], stride=x.strides[0], eps=1e-5)


def product_arguments(
    spec: Product, packed: np.ndarray, x: np.ndarray, y: np.ndarray, bias: np.ndarray, columns: int, rows: int
) -> ProductArguments:
    """With as many tiles as there are outputs for."""
    return ProductArguments(
        weights=packed,
        x=x,
        y=y,
        bias=bias,
        blocks=columns // spec.block_inputs,
        tile_bytes=packed.shape[1],
        x_stride=x.strides[0],
        y_stride=y.strides[0],
        rows=rows,
        outputs=y.shape[1],
        tiles=-(-y.shape[1] // 16),
    )


def quantized(
    x: np.ndarray, row_tile: int, level: Level, inputs: Inputs = Inputs.CODES, *, is_unsigned: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x in panels of `quantize_rows`, its words (rows, groups, 32), and their numbers (rows, groups, 4 or 8) int32: the
    bits of a float32, three sums, and three of products of pairs."""
    count, columns = x.shape
    out = np.zeros((-(-count // row_tile), panel_bytes(columns, row_tile, level, inputs)), np.uint8)
    run(quantize_rows(False, row_tile, inputs=inputs, is_unsigned=is_unsigned), level, count, _rows(x, out))
    groups, size = out.reshape(len(out), columns // 32, -1), 32 * inputs.size * row_tile
    own = np.ascontiguousarray(groups[..., :size])
    if inputs is Inputs.BYTES:
        own = own ^ 128 if is_unsigned else own
        words = in_order(own.view(np.int8), row_tile, paired=are_paired(level, row_tile, inputs))
    else:
        own = own.reshape(len(out), -1, row_tile, 64).swapaxes(1, 2)
        words = joined(own) if splits(level, row_tile, inputs) else np.ascontiguousarray(own).view(np.int16)
    numbers = np.ascontiguousarray(groups[..., size:]).view(np.int32)
    each = number_bytes(level, inputs) // 4
    numbers = numbers.reshape(len(out), -1, row_tile, each).swapaxes(1, 2)
    return out, words.reshape(-1, columns // 32, 32)[:count], numbers.reshape(-1, columns // 32, each)[:count]


def in_order(own: np.ndarray, row_tile: int, *, paired: bool) -> np.ndarray:
    """The int8 of panels (panels, groups, 32 R), with paired rows or without → (panels, R, groups, 32)."""
    panels, groups, _ = own.shape
    if paired:
        own = own.reshape(panels, groups, row_tile // 2, 4, 2, 8).swapaxes(3, 4)
    fours = own.reshape(panels, groups, row_tile, 8, 4)[..., [0, 2, 1, 3]]
    return fours.reshape(panels, groups, row_tile, 32).swapaxes(1, 2)


def joined(split: np.ndarray) -> np.ndarray:
    """The int16 of a group, as they lie in a panel where words are split into bytes, (…, 64) uint8 → (…, 32)."""
    eights = split.view(np.int8).astype(np.int16).reshape(*split.shape[:-1], 4, 2, 2, 4)
    return (256 * eights[..., 0, :, :] + eights[..., 1, :, :])[..., [0, 2, 1, 3]].reshape(*split.shape[:-1], 32)


def interleaved(x: np.ndarray, row_tile: int, level: Level) -> np.ndarray:
    count, columns = x.shape
    out = np.full((-(-count // row_tile), columns, row_tile), 9, np.float32)
    run(interleave_rows(False, row_tile), level, count, _rows(x, out))
    return out


def as_words(values: np.ndarray) -> np.ndarray:
    """Numbers (rows, columns) as `ExpandedNumbers` rounds them, float64: in integers of a power of two for 32 numbers,
    so that their magnitudes add up to less than 2¹⁷, and eight times the largest is."""
    groups = values.astype(np.float64).reshape(len(values), -1, GROUP)
    magnitudes = np.abs(groups)
    bound = np.maximum(magnitudes.sum(-1, keepdims=True), 8 * magnitudes.max(-1, keepdims=True))
    unit = np.exp2(np.floor(np.log2(bound)) - 16)
    words = np.rint(groups / unit)
    assert (np.abs(words).sum(-1) * Inputs.WORDS.value < 2**31).all()
    return (words * unit).reshape(values.shape)


def given(
    x: np.ndarray, values: np.ndarray, sizes: Tiling, level: Level, kind: Inputs
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Panels of x, and what a product multiplies exactly: x (rows, columns) and the weights `values`, float64."""
    if kind is Inputs.FLOATS:
        return interleaved(x, sizes.rows, level), x.astype(np.float64), values.astype(np.float64)
    panels, *parts = quantized(x, sizes.rows, level, kind, is_unsigned=are_unsigned(sizes, level, kind))
    return panels, read_back(*parts), as_words(values) if kind is Inputs.WORDS else values.astype(np.float64)


def read_back(words: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The values of rows that have been quantized, float64."""
    return (words * numbers[..., :1].view(np.float32).astype(np.float64)).reshape(len(words), -1)


@some_levels
@pytest.mark.parametrize("row_tile", [1, 2])
@pytest.mark.parametrize("kind", [Inputs.CODES, Inputs.BYTES])
def test_rows_are_quantized_to_the_nearest_integer(level: Level, row_tile: int, kind: Inputs) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 128)).astype(np.float32)
    x[1, :32] = 0
    _, words, numbers = quantized(x, row_tile, level, kind)
    step = np.abs(x.reshape(3, -1, 32)).max(-1) / kind.value
    errors = np.abs(read_back(words, numbers) - x).reshape(3, -1, 32)
    assert (errors <= 0.51 * step[..., None]).all()
    np.testing.assert_array_equal(numbers[..., 1], -words.sum(-1, dtype=int))
    np.testing.assert_array_equal(numbers[..., 2:4], -words.reshape(3, -1, 2, 16).sum(-1, dtype=int))
    if numbers.shape[-1] > 4:
        pairs_of_fours = words.astype(np.int64).reshape(3, -1, 2, 4, 2, 2)
        halves = -pairs_of_fours.prod(-2).sum((-1, -2)).astype(np.int32)
        np.testing.assert_array_equal(numbers[..., 5:7], halves)
        np.testing.assert_array_equal(numbers[..., 4], halves.sum(-1, dtype=np.int32))


@some_levels
def test_rows_are_normed_and_interleaved(level: Level) -> None:
    for columns in (48, 43):
        rng = np.random.default_rng(5)
        x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, columns), columns))
        out = np.zeros((2, columns, 2), np.float32)
        run(interleave_rows(True, 2), level, 3, _rows(x, out, weight))
        wide = x.astype(np.float64)
        want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
        np.testing.assert_allclose(out.swapaxes(1, 2).reshape(4, columns)[:3], want, rtol=1e-5, atol=1e-6)


def check_product(name: str, level: Level, count: int, bits: str = "16") -> None:
    """36 outputs: the last tile has rows that do not exist, and no neighbour. Up to 40 rows: more than the panels for
    which weights are unpacked once, and than the matrices of a level have."""
    rng = np.random.default_rng(1)
    format, packed, values = stored(rng, name, 36, 512)
    x = rng.standard_normal((count, 512)).astype(np.float32)
    kind = inputs_for(format, 512, level, waits=count == 1, bits=bits)
    sizes = tiling(count, level, kind)
    panels, exact, values = given(x, values, sizes, level, kind)
    bias = rng.standard_normal(36).astype(np.float32)
    y = np.full((count + 1, 36), 7, np.float32)
    kernel = product(spec := Product(format, sizes, adds=True, has_bias=True, inputs=kind))
    run(kernel, level, units(spec, len(packed)), product_arguments(spec, packed, panels, y, bias, 512, count))
    want = 7 + bias + exact @ values.T
    scale = np.linalg.norm(exact, axis=1)[:, None] * np.linalg.norm(values, axis=1)
    assert (np.abs(y[:count] - want) <= 1e-6 * scale + 1e-5).all()
    assert (y[count] == 7).all()


COUNTS = [1, 3, 5, 9, 20, 40]
test_product = in_turn("level name count", each(SOME, FEW, COUNTS))(check_product)
OF_CODES = [name for name in FEW if get(name).unpack is not None]
OF_BYTES = each(SOME, OF_CODES, [1, 2, 6, 20, 40], ["8"])
test_product_with_bytes = in_turn("level name count bits", OF_BYTES)(check_product)
# Every format at every level, with every number of rows: minutes of compilation.
test_products_of_all_levels = pytest.mark.slow(
    in_turn("level name count bits", pairs(levels(), available(), COUNTS, ["8", "16"]))(check_product)
)


@in_turn("level activation count name", each(SOME, ["silu", "gelu_tanh"], [1, 3, 7, 17, 33], FEW[:5]))
def test_gated_product(name: str, level: Level, activation: str, count: int) -> None:
    """The gate and the up projection are multiplied together, or one after the other where registers have no room for
    the sums of both. The test above unpacks every format at every level."""
    rng = np.random.default_rng(4)
    format, packed, values = stored(rng, name, 64, 256)
    x = rng.standard_normal((count, 256)).astype(np.float32)
    kind = inputs_for(format, 256, level, waits=True)
    sizes = tiling(count, level, kind)
    panels, exact, values = given(x, values, sizes, level, kind)
    bias, y = rng.standard_normal(64).astype(np.float32), np.empty((count, 32), np.float32)
    kernel = product(spec := Product(format, sizes, has_bias=True, activation=activation, inputs=kind))
    run(kernel, level, 2, product_arguments(spec, packed, panels, y, bias, 256, count))
    both = bias + exact @ values.T
    want = apply_activation(both, activation)
    scale = np.linalg.norm(exact, axis=1)[:, None] * np.linalg.norm(values, axis=1).max()
    assert (np.abs(y - want) <= 1e-6 * scale * (1 + np.abs(both).max()) + 1e-5).all()


@in_turn("level name", each(SOME, available()))
def test_rows_of_a_matrix_are_those_of_the_file(name: str, level: Level) -> None:
    """To the bit: of whole tiles, and of a tile with rows that do not exist. Kernels of the level pack the matrix."""
    rng = np.random.default_rng(2)
    format, packed, values = stored(rng, name, 36, 256, level)
    ids = np.array([35, 0, 17, 17], np.int32)
    out = np.empty((4, 256), np.float32)
    sizes = {"blocks": 256 // format.values, "tile_bytes": packed.shape[1], "columns": 256}
    arguments = DequantizeArguments(weights=packed, ids=ids, y=out, factor=1.0, **sizes)
    run(dequantize_rows(format), level, 4, arguments)
    np.testing.assert_array_equal(out, values[ids])


@in_turn("level name bits", each(SOME, ["iq3_s", "iq1_m", "q4_1", "q6_k", "mxfp4", "f16"], ["8", "16"]))
def test_rows_of_a_long_prompt_are_multiplied_as_one_row(name: str, level: Level, bits: str) -> None:
    """To the bit, beyond the panels for which a block is expanded once, and where the last block of codes that become
    words is alone."""
    rng = np.random.default_rng(6)
    columns = 512 if get(name).values == 256 else 544
    format, packed, values = stored(rng, name, 16, columns)
    count = 35 * largest_tiling(level).rows
    x = rng.standard_normal((count, columns)).astype(np.float32)
    outputs, kind = [], inputs_for(format, columns, level, waits=False, bits=bits)
    for rows in (count, 1):
        sizes = tiling(rows, level, kind)
        panels, exact, rounded = given(x, values, sizes, level, kind)
        y, spec = np.empty((count, 16), np.float32), Product(format, sizes, inputs=kind)
        for first in range(0, count, rows):
            arguments = product_arguments(spec, packed, panels[first // sizes.rows :], y[first:], y, columns, rows)
            run(product(spec), level, 1, arguments)
        outputs.append(y)
    np.testing.assert_array_equal(*outputs)
    want = exact @ rounded.T
    scale = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(values, axis=1)
    assert (np.abs(outputs[0] - want) <= 1e-6 * scale + 1e-5).all()


@in_turn("name", available())
def test_tiles_take_the_bytes_that_are_planned(name: str) -> None:
    rng = np.random.default_rng(3)
    format, packed, _ = stored(rng, name, 36, 256)
    assert packed.nbytes == tiles.tile_bytes(format, 36, 256)
    if format.unpack is not None:  # the file's bytes; an exponent becomes a scale, a sign a bit of four indices
        more = {"mxfp4": 1, "iq1_s": 4, "iq1_m": 2}.get(name, 0)
        assert tiles.block_bytes(format) == tiles.ROWS * (format.nbytes + more)


def test_a_format_whose_fields_are_no_moved_bits_is_refused() -> None:
    """A scale that is the sum of two stored bytes, say."""

    def unpack(raw: np.ndarray) -> SimpleNamespace:
        total = raw[:, :1] + raw[:, 1:2]
        return SimpleNamespace(codes=total, scale=raw.view("<f2"), sub_scale=None, offset=None, sub_offset=None)

    format = WeightFormat("sum", 32, 2, lambda raw, out: None, unpack=unpack, bits=8, group=32)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sum: a bit of codes depends on several stored bits"):
        packing.origins.__wrapped__(format)


def test_matrices_are_packed_together_in_several_launches_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, size = np.random.default_rng(1), get("q4_k").size(1024)
    matrices = [weights.StoredBytes(rng.integers(0, 256, (n, size), np.uint8), "q4_k") for n in (32, 500)]
    whole = weights.StoredBytes(np.concatenate([matrix.raw for matrix in matrices]), "q4_k")
    (wanted,) = LinearOps(launcher(best())).load([whole])
    monkeypatch.setattr(loading, "_SLAB_BYTES", 1 << 14)
    (packed,) = LinearOps(launcher(best(), threads=2)).load(matrices)
    np.testing.assert_array_equal(packed.data.memory, wanted.data.memory)
