"""Encoding of full-precision records, run by the emulator, gives the codes, norms and means of NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from polarlm.engine import codecs, records
from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device import Addresses
from polarlm.engine.backends.cuda.device.kernel_source import source
from polarlm.engine.backends.cuda.kv.cache import SideArrays
from polarlm.engine.backends.cuda.kv.candidates import ALL, candidates, path_candidates
from polarlm.engine.codecs import PathRounding
from polarlm.engine.codecs.parts.nearest import NearestPoint
from polarlm.engine.codecs.ring import RINGS, points_of
from polarlm.engine.quantization.conditioning import centre
from polarlm.engine.quantization.encode import encode_with_metric
from polarlm.engine.quantization.metric import Metric, key_metric, remove_tilt, value_metric
from polarlm.engine.quantization.statistics import output_second
from polarlm.engine.records import Layout
from polarlm.engine.records.fragments import Geometry
from polarlm.engine.records.pair_table import PairRecord
from tests.codecs.data import TABLED
from tests.cuda.programs import Program


@dataclass(frozen=True)
class BlockShape:
    """Head dim D, tokens N of a block, `tokens` of them in shared memory at once; bits of key means.

    warps: of a CTA.
    """

    dim: int
    size: int = 16
    tokens: int = 16
    mean_bits: int = 0
    warps: int = 4


@dataclass(frozen=True)
class Side:
    """The codec of keys, or of values, and where their records are."""

    values: bool
    name: str
    shape: BlockShape

    @property
    def layout(self) -> Layout:
        shape = self.shape
        return records.layout(codecs.get(self.name), self.values, shape.size, shape.dim, self.mean_bits)

    @property
    def mean_bits(self) -> int:
        return 0 if self.values else self.shape.mean_bits

    def expected(self, x: np.ndarray, metric: Metric | None) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """x (K, B, N, D) → NumPy's fields, and the fields of means."""
        mean: dict[str, np.ndarray] = {}
        if self.mean_bits:
            x, mean = centre(x, self.mean_bits)
        return encode_with_metric(codecs.get(self.name), x, metric), mean


@cache
def program(name: str, shape: BlockShape) -> Program:
    """It does not compile where `launch_configs.encode_bytes` is not RounderMemory::BYTES."""
    of_values = name if "v" in codecs.get(name).serves else codecs.FULL
    keys, values = Side(False, name, shape).layout, Side(True, of_values, shape).layout
    defines = {"WARPS": shape.warps, "TOKENS": shape.tokens, **launch_configs.ROUNDING}
    text = source("encode_blocks", keys, values, **defines)
    for side, layout in (("Key", keys), ("Value", values)):
        if isinstance(layout.record, PairRecord):
            size = launch_configs.encode_bytes(layout, shape.tokens, shape.warps)
            text += f'static_assert(RounderMemory<{side}Layout, {side}Codec>::BYTES == {size}, "");\n'
    return Program(text)


@cache
def near(name: str) -> np.ndarray | None:
    record = records.record_of(codecs.get(name), Geometry(False, 16, 16))
    if not isinstance(record, PairRecord) or record.points.shape[1] == 1:
        return None
    return path_candidates(record.points) if record.searches_paths else candidates(record.points)


def arrays(side: Side, metric: Metric | None, quantized: np.ndarray, full: np.ndarray) -> SideArrays:
    """The row of a side in the kernel's table."""
    beside = quantized, full, side.layout.record.tables if side.layout.record.tables.size else None, near(side.name)
    if metric is None:
        return SideArrays(*beside)
    feedback, fed = np.ascontiguousarray(metric.feedback.swapaxes(1, 2)), metric.token_feedback
    along = None if fed is None else np.ascontiguousarray(fed[0].reshape(side.shape.size, -1).T)
    return SideArrays(*beside, feedback, metric.weights, metric.matrix, metric.tilt_mean, along)


def encoded(side: Side, x: np.ndarray, metric: Metric | None, seed: int = 0) -> np.ndarray:
    """x (K, B, N, D), halves as float32 → the kernel's records (K, B, bytes); slots and block ids are in any order."""
    heads, blocks = x.shape[:2]
    rng = np.random.default_rng(seed)
    layout = side.layout
    slots, ids = rng.permutation(blocks + 1)[:blocks], rng.permutation(blocks + 2)[:blocks]
    exact = np.full((blocks + 1, heads, layout.full.nbytes), 255, np.uint8)  # 0xffff is NaN
    exact[slots] = layout.full.pack(codecs.get("f16").encode(x)).swapaxes(0, 1)
    out = np.full((blocks + 2, heads, layout.nbytes), 0xA5, np.uint8)
    jobs = np.stack([np.zeros(blocks), slots, ids], axis=1).astype(np.int32)
    table = Addresses([arrays(side, metric, out, exact)], written=1)
    args: list[Any] = [table, jobs, np.int32(not side.values), np.int32(heads)]
    shape, kernel = side.shape, "encode_blocks_kernel"
    shared = launch_configs.encode_bytes(layout, shape.tokens, shape.warps)
    program(side.name, shape).launch(kernel, (blocks, heads), (32 * shape.warps,), *args, shared=shared, seed=seed)
    untouched = np.setdiff1d(np.arange(blocks + 2), ids)
    assert (out[untouched] == 0xA5).all()
    return out[ids].swapaxes(0, 1)


def halves(rng: np.random.Generator, *shape: int, bias: float = 0.0) -> np.ndarray:
    """Vectors of different lengths, around a bias of the channels, as full-precision records hold them; float32."""
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:-1], 1)))
    return (x + bias * rng.standard_normal(shape[-1])).astype(np.float16).astype(np.float32)


def assert_same(side: Side, x: np.ndarray, seed: int = 0) -> None:
    """Without a metric: every field is NumPy's."""
    fields, mean = side.layout.unpack(encoded(side, x, None, seed))
    wanted, wanted_mean = side.expected(x, None)
    for name, field in {**wanted, **wanted_mean}.items():
        np.testing.assert_array_equal({**fields, **mean}[name], field, err_msg=name)
        assert {**fields, **mean}[name].dtype == field.dtype


# Head dims of whole and of half tiles, blocks of one part and of several, all tokens in shared memory or some of them.
SHAPES = [
    BlockShape(16, 16, 16, 8),
    BlockShape(64, 32, 32, 16),
    BlockShape(72, 16, 16, 8),
    BlockShape(80, 32, 16, 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), list(enumerate([*TABLED, "ring4+norm16"])))
def test_codes_of_every_codec_equal_those_of_numpy(rng: np.random.Generator, number: int, name: str) -> None:
    """Each codec rounds in its own way, and packs its codes in another order for keys, which have a mean."""
    for values in (False, True):
        side = Side(values, name, SHAPES[number % len(SHAPES)])
        x = halves(rng, 2, 2, side.shape.size, side.shape.dim, bias=2.0)
        assert_same(side, x, seed=number % 3)
        if isinstance(codecs.get(name).rounding, PathRounding):
            x = halves(rng, 2, 2, side.shape.size, side.shape.dim, bias=0.5)
            assert_as_good(side, x, metric_of(side, 2), seed=number % 3)
            assert_as_good(side, x, metric_of(side, 2, tilt=False, tokens=False), seed=number % 3)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("f16", False),
        ("polarquant", False),
        ("polarquant", True),
        ("ring3.5", True),
        ("polarpair-m4n2+minmax-radius+g16", False),
    ],
)
def test_codes_without_a_metric_equal_those_of_numpy(rng: np.random.Generator, name: str, values: bool) -> None:
    for shape in (BlockShape(64, 16, 16, 8), BlockShape(80, 32, 16, 16)):
        assert_same(Side(values, name, shape), halves(rng, 1, 2, shape.size, shape.dim, bias=2.0))


def edges(shape: BlockShape) -> np.ndarray:
    """Blocks (1, B, N, D) of exceptional vectors: zeros, equal ones, the largest, spikes, ties."""
    size, dim, top = shape.size, shape.dim, np.float32(65504)
    signs = np.where(np.arange(size * dim).reshape(size, dim) * 7 % 3 == 1, -1, 1).astype(np.float32)
    spikes = np.zeros((size, dim), np.float32)
    spikes[np.arange(size), np.arange(size) * 5 % dim] = signs[:, 0] * top
    turns = np.array([[1, 0], [0, 1], [-1, 0], [0, -1], [1, 1], [-1, 1], [2, -2], [0, 0]], np.float32)
    mixed = np.zeros((size, dim), np.float32)
    mixed[::2] = np.float32(2.0**-24)
    mixed[1] = top
    blocks = [np.zeros((size, dim)), np.full((size, dim), 3.5), signs * top, spikes, signs * np.float32(2.0**-24)]
    return np.stack([*blocks, np.resize(turns, (size, dim)), mixed]).astype(np.float32)[None]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring5", "turbo3", "ring4+norm16", "trellis3.5", "polarquant"])
def test_exceptional_blocks_have_the_codes_of_numpy(name: str) -> None:
    """The searches of codecs end in different ways: the nearest point, a path, thresholds of angles."""
    for shape in (BlockShape(16, 16, 16, 8), BlockShape(64, 32, 32, 16)):
        for values in (False, True):
            assert_same(Side(values, name, shape), edges(shape))


@pytest.mark.parametrize("bits", [*RINGS][:3])
def test_the_nearest_point_is_among_the_candidates_of_its_cell(rng: np.random.Generator, bits: int) -> None:
    points = points_of(bits)
    corners = np.stack(np.meshgrid(np.arange(-32, 32), np.arange(-32, 32)), -1).reshape(-1, 2) / np.float32(8)
    nudges = np.float32(2.0) ** rng.integers(-20, -3, (4, len(corners), 2)) * rng.choice([-1, 1], (4, len(corners), 2))
    x = np.concatenate([rng.uniform(-4, 4, (20000, 2)), *(corners + nudges), corners]).astype(np.float32)
    x = x[(np.abs(x) < 4).all(1)]
    codes, _ = NearestPoint(points)(x)
    cells = (x * 8 + 32).astype(int)
    listed = candidates(points)[cells[:, 0], cells[:, 1]]
    assert ((listed == codes[:, None]).any(1) | (listed[:, 0] == ALL)).all()
    assert (listed[:, 0] == ALL).mean() < 0.01
    assert (np.diff(listed.astype(int), axis=1)[:, 0] >= 0).all()


# -- with a metric -----------------------------------------------------------------------------------------------


def metric_of(side: Side, heads: int, *, tilt: bool | None = None, tokens: bool = True) -> Metric:
    """Errors of some directions cost ten times what they cost in others, and tokens share attention. tilt: the norms of
    keys; by default those of paths, since `encode_keys` takes all others."""
    rng, dim = np.random.default_rng(5), side.shape.dim
    rounding = codecs.get(side.name).rounding
    rotation = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    spread = np.geomspace(1, 0.1, dim)
    if side.values:
        output = rng.standard_normal((3 * dim, heads, 2, dim)) * spread @ rotation
        correlation = 0.6 ** np.arange(side.shape.size) if tokens else None
        return value_metric(output_second(output.reshape(3 * dim, -1), heads, dim), None, rounding, correlation)
    queries = rng.standard_normal((heads, 4 * dim, dim)) * spread @ rotation + 0.2
    second = queries.swapaxes(1, 2) @ queries / (4 * dim)
    metric = key_metric(second, queries.mean(1), np.ones((heads, dim)), None, rounding)
    return metric if (isinstance(rounding, PathRounding) if tilt is None else tilt) else remove_tilt(metric)


def codes_of(side: Side, fields: dict[str, np.ndarray]) -> np.ndarray:
    """The fields of a codec of pairs but the norm → (K, B, N, D/2)."""
    return side.layout.schema["codes"].unpack(fields["codes"])


def cost(side: Side, x: np.ndarray, fields: dict[str, np.ndarray], metric: Metric) -> np.ndarray:
    """The cost Σ e·M·eᵀ of the decoded fields against x, for each KV head (K,)."""
    error = (x - codecs.get(side.name).decode(fields)).astype(np.float64)
    return np.einsum("kbnd,kde,kbne->k", error, metric.matrix.astype(np.float64), error)


def assert_as_good(side: Side, x: np.ndarray, metric: Metric, seed: int = 0) -> None:
    """Sums are added in another order than NumPy's, so that a code on the edge of a cell may change, and with it those
    that it feeds back to: .1 % of the codes, and of what errors cost."""
    fields, mean = side.layout.unpack(encoded(side, x, metric, seed))
    wanted, wanted_mean = side.expected(x, metric)
    for name, field in wanted_mean.items():
        np.testing.assert_array_equal(mean[name], field)
    same = codes_of(side, fields) == codes_of(side, wanted)
    assert same.mean() >= 0.999
    if side.mean_bits:
        x, _ = centre(x, side.mean_bits)
    assert cost(side, x, fields, metric) == pytest.approx(cost(side, x, wanted, metric), rel=1e-3)


@pytest.mark.slow
def test_exceptional_blocks_with_a_metric_have_the_codes_of_numpy() -> None:
    shape = BlockShape(64, 32, 32, 16)
    for values in (False, True):
        side, x = Side(values, "trellis4", shape), edges(shape)
        # Beside a token that is 10^12 times as long, targets of values are so far from all points that the order of
        # sums decides on a path.
        for block in range(x.shape[1] - values):
            assert_as_good(side, x[:, block : block + 1], metric_of(side, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "dim", "warps"),
    [
        ("ring4", 64, 128, 12),
        ("turbo4", 64, 64, 12),
        ("linear8", 64, 128, 12),
        ("ring2.5", 64, 128, 12),
        ("ring4", 128, 128, 10),
        ("ring4", 64, 256, 10),
        ("trellis3", 192, 64, 8),
    ],
)
def test_the_engine_s_launch_gives_the_codes_of_numpy(
    rng: np.random.Generator, name: str, size: int, dim: int, warps: int
) -> None:
    """It rounds larger blocks a part at a time, with fewer warps."""
    layouts = [records.layout(codecs.get(name), values, size, dim, 8 * (not values)) for values in (False, True)]
    plan = launch_configs.encode_blocks(*layouts)
    shape = BlockShape(dim, size, int(plan.defines["TOKENS"]), 8, int(plan.defines["WARPS"]))
    assert shape.warps == warps
    for values in (False, True):
        side, x = Side(values, name, shape), halves(rng, 1, 1, size, dim, bias=0.5)
        if plan.defines["WARPS"] == 8:  # paths
            assert_as_good(side, x, metric_of(side, 1))
        else:
            assert_same(side, x)


@pytest.mark.parametrize("values", [False, True], ids=["keys", "values"])
def test_paths_of_parts_of_a_block_equal_those_of_numpy(rng: np.random.Generator, values: bool) -> None:
    """Keys are searched for half a block at a time, values in four rounds, which read back earlier errors."""
    side = Side(values, "trellis4", BlockShape(64, 32, 16, 8))
    x = halves(rng, 2, 1, 32, 64, bias=0.5)
    assert_as_good(side, x, metric_of(side, 2), seed=2)
    assert_same(side, x, seed=1)
