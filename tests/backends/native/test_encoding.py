"""Encoding with kernels against the encoder in NumPy: the same codes, at every level of CPU features."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polarlm.engine import codecs
from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, KVLocation
from polarlm.engine.backends.native.kv import encoding
from polarlm.engine.backends.native.kv.cache import CacheOps, TileCache
from polarlm.engine.backends.native.kv.encoding import EncodingOps
from polarlm.engine.backends.numpy.kv.cache import LayerCache, Sides
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.codecs import NotFinite
from polarlm.engine.jit.compile.target import levels
from polarlm.engine.jit.lang import Level
from polarlm.engine.quantization.conditioning import read_mean
from polarlm.engine.quantization.metric import Metric, key_metric, remove_feedback, value_metric
from polarlm.engine.quantization.statistics import output_second
from tests.backends.native.launching import launcher
from tests.pairs import each, in_turn

WITH_KERNELS = [
    "linear8",
    "ring2.5",
    "ring3",
    "ring3.5",
    "ring4",
    "ring5",
    "trellis2.5",
    "trellis3",
    "trellis3.5",
    "trellis4",
    "turbo2",
    "turbo3",
    "turbo4",
]
HEADS = 2
HIGHEST = levels()[-1]

# These kernels multiply floats only: levels with the same registers have the same code.
FLOAT_LEVELS = list({(level.lanes, level.registers): level for level in reversed(levels())}.values())[::-1]
every_float_level = in_turn("level", FLOAT_LEVELS)


def covariance(rng: np.random.Generator, dim: int, decay: float = 0.9) -> np.ndarray:
    axes, _ = np.linalg.qr(rng.standard_normal((HEADS, dim, dim)))
    spread = decay ** (np.arange(dim) % 40)
    return axes * spread @ axes.swapaxes(1, 2)


def metrics(rng: np.random.Generator, k: str, v: str, dim: int, tokens: int | None) -> tuple[Metric, Metric]:
    """Metrics of keys and values; tokens: of a block, None for no feedback along tokens."""
    mean, smoothing = 0.3 * rng.standard_normal((HEADS, dim)), np.exp(0.3 * rng.standard_normal((HEADS, dim)))
    rounding = codecs.get(k).rounding, codecs.get(v).rounding
    output = rng.standard_normal((40, 2 * HEADS * dim)) * 0.97 ** np.arange(2 * HEADS * dim)
    along = None if tokens is None else (0.9 ** np.arange(tokens)).astype(np.float32)
    return (
        key_metric(covariance(rng, dim) + mean[:, :, None] * mean[:, None], mean, smoothing, None, rounding[0]),
        value_metric(output_second(output.astype(np.float32), HEADS, dim), None, rounding[1], along),
    )


def encoding_ops(level: Level = HIGHEST, threads: int = 1) -> EncodingOps:
    return EncodingOps(launcher(level, threads))


def cache(format: CacheFormat, blocks: int, seed: int) -> LayerCache:
    """A layer of `blocks` blocks and as many slots, which hold keys with a bias and values."""
    made = CacheOps().cache(format, blocks, blocks)
    rng = np.random.default_rng(seed)
    shape = made.full_k.shape
    for full in made.full_k, made.full_v:
        full[...] = rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:3], 1)))
    made.full_k[...] += 3 * rng.standard_normal((shape[1], 1, shape[3]))
    return made


def formats(
    seed: int, k: str, v: str, dim: int, size: int, mean_bits: int, layers: int = 1, along: bool = True
) -> list[CacheFormat]:
    rng = np.random.default_rng(seed)
    both = codecs.get(k), codecs.get(v)
    return [
        CacheFormat(*both, *metrics(rng, k, v, dim, size if along else None), mean_bits, size, HEADS, dim)
        for _ in range(layers)
    ]


def slots(*numbers: int) -> list[KVLocation]:
    return [KVLocation(None, number) for number in numbers]


def in_buffer(k: np.ndarray, v: np.ndarray) -> list[KVLocation]:
    """Where blocks k, v (B, K, N, D) lie in a buffer: as float32, which holds more than slots do."""
    buffer = [x.astype(np.float32).swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in (k, v)]
    return [KVLocation(tuple(buffer), number) for number in range(len(k))]


def stored(cache: LayerCache) -> Sides:
    return cache.read(np.arange(len(cache.full_k)))


def points(cache: LayerCache, side: int) -> np.ndarray:
    """The points that the codes of keys or values stand for, float32 (K, B, N, D)."""
    codec, fields = (cache.format.codec_k, cache.format.codec_v)[side], stored(cache)[side]
    norms = codec.rounding.norms.unpack(fields["norm"])[..., None]
    return codec.decode(fields) / np.where(norms > 0, norms, 1)


def arrays(cache: LayerCache) -> dict[str, np.ndarray]:
    return {f"{side}.{name}": x for side, fields in stored(cache)._asdict().items() for name, x in fields.items()}


def share_of_equal_blocks(a: LayerCache, b: LayerCache, side: int) -> float:
    """Blocks all of whose codes are equal.

    A sum in another order puts one value in some hundred thousand on the other side of an edge. Feedback then changes
    other codes of its block.
    """
    return float(np.isclose(points(a, side), points(b, side), atol=1e-3).all((-2, -1)).mean())


def cost(cache: LayerCache, side: int) -> float:
    """What the errors of keys or values cost by the metric, if block i has been encoded from slot i."""
    format = cache.format
    codec, metric, full = (
        (format.codec_k, format.metric_k, cache.full_k),
        (format.codec_v, format.metric_v, cache.full_v),
    )[side]
    decoded = codec.decode(stored(cache)[side])
    if side == 0 and format.mean_bits:
        decoded = decoded + read_mean(cache.mean)[:, :, None]
    errors = (full.swapaxes(0, 1) - decoded).astype(np.float64)
    if metric.token_feedback is not None:
        size = format.block_size
        errors = (np.eye(size) + metric.token_feedback[0].reshape(size, size)) @ errors
    return float(np.einsum("kbnd,kde,kbne->", errors, metric.matrix.astype(np.float64), errors))


def both(format: CacheFormat, level: Level, blocks: int = 3, threads: int = 1) -> tuple[LayerCache, LayerCache]:
    """The same blocks encoded by kernels and in NumPy."""
    caches, places = [cache(format, blocks, seed=1) for _ in range(2)], slots(*range(blocks))
    encoding_ops(level, threads).encode_blocks([FilledBlocks(caches[:1], list(range(blocks)), places)])
    NumpyOps(1).encode_blocks([FilledBlocks(caches[1:], list(range(blocks)), places)])
    return caches[0], caches[1]


@every_float_level
@pytest.mark.parametrize(
    ("name", "along"),
    [("ring3.5", True), ("ring5+norm16", False), ("turbo3", True), ("trellis3", True), ("trellis3.5", False)],
)
def test_codes_are_those_of_numpy(name: str, along: bool, level: Level) -> None:
    (format,) = formats(0, name, name, 32, 32, 8, along=along)
    compiled, plain = both(format, level, blocks=4)
    for side in (0, 1):
        assert share_of_equal_blocks(compiled, plain, side) >= 0.75
        assert cost(compiled, side) == pytest.approx(cost(plain, side), rel=0.03)
    for field, mean in plain.mean.items():
        np.testing.assert_array_equal(compiled.mean[field], mean)


@in_turn("level name", each(FLOAT_LEVELS, ["ring3", "ring5", "turbo4", "trellis4"]))
def test_without_feedback_codes_are_equal(name: str, level: Level) -> None:
    (format,) = formats(1, name, name, 40, 48, 16, along=False)
    assert format.metric_k is not None
    assert format.metric_v is not None
    format = replace(format, metric_k=remove_feedback(format.metric_k), metric_v=remove_feedback(format.metric_v))
    compiled, plain = both(format, level)
    for side in (0, 1):
        assert share_of_equal_blocks(compiled, plain, side) == 1
    np.testing.assert_array_equal(compiled.mean["mean"].view(np.int16), plain.mean["mean"].view(np.int16))


@pytest.mark.slow
@given(
    st.sampled_from(WITH_KERNELS),
    st.sampled_from(WITH_KERNELS),
    st.integers(1, 32),
    st.sampled_from([16, 32, 48, 64, 80]),
    st.sampled_from([0, 8, 16]),
    st.booleans(),
    st.integers(0, 2**16),
)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_shape(k: str, v: str, eighths: int, size: int, mean_bits: int, along: bool, seed: int) -> None:
    (format,) = formats(seed, k, v, 8 * eighths, size, mean_bits, along=along)
    compiled, plain = both(format, HIGHEST, blocks=1)
    for side in (0, 1):
        equal, costs = share_of_equal_blocks(compiled, plain, side), [cost(made, side) for made in (compiled, plain)]
        assert equal == 1 or costs[0] == pytest.approx(costs[1], rel=0.3)


@pytest.mark.parametrize(
    ("k", "v", "dim", "size", "along", "level"),
    [
        ("ring5+norm16", "ring3", 16, 16, False, FLOAT_LEVELS[-1]),
        ("ring3.5", "turbo4", 72, 16, True, FLOAT_LEVELS[0]),
        ("trellis3+norm16", "trellis4", 40, 48, True, FLOAT_LEVELS[-1]),
    ],
)
def test_blocks_are_those_that_are_encoded_alone(
    k: str, v: str, dim: int, size: int, along: bool, level: Level
) -> None:
    """In any order of blocks; other blocks stay as they are."""
    (format,) = formats(11, k, v, dim, size, 8, along=along)
    ops = encoding_ops(level)
    together, alone = (cache(format, 4, seed=1) for _ in range(2))
    large = (full[[0, 2, 1]].astype(np.float32) * 1e4 for full in (alone.full_k, alone.full_v))  # half norms saturate
    places = in_buffer(*large)
    ops.encode_blocks([FilledBlocks([together], [3, 1, 0], places)])
    ops.encode_blocks([FilledBlocks([alone], [3], slots(1))])  # from half precision, and then from single precision
    for block, place in zip([3, 1, 0], places, strict=True):
        ops.encode_blocks([FilledBlocks([alone], [block], [place])])
    for name, array in arrays(alone).items():
        np.testing.assert_array_equal(arrays(together)[name].view(np.uint8), array.view(np.uint8))
    assert isinstance(together, TileCache)
    for memory in together.memory:
        assert memory.any(axis=(0, 2)).tolist() == [True, True, False, True]


@every_float_level
@pytest.mark.parametrize(
    ("k", "v", "dim", "size", "mean_bits"),
    [
        *[("q8_0", "q4_0", 64, 48, 8), ("q4_0", "q8_0", 96, 16, 16), ("f16", "f16", 24, 64, 8)],
        *[("polarquant", "polarquant+none", 40, 32, 16), ("f16", "polarquant", 96, 16, 0)],
    ],
)
def test_tiles_without_a_metric_are_those_of_numpy(
    k: str, v: str, dim: int, size: int, mean_bits: int, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a buffer, zeros, tiny values and values beyond half precision included, and from slots. Kernels encode."""
    monkeypatch.setattr(encoding, "encode_side", None)
    format = CacheFormat(codecs.get(k), codecs.get(v), None, None, mean_bits, size, HEADS, dim)
    compiled, plain = (CacheOps().cache(format, 3, 3) for _ in range(2))
    rng, given_ = np.random.default_rng(12), []
    for full, same in (compiled.full_k, plain.full_k), (compiled.full_v, plain.full_v):
        x = rng.standard_normal(full.shape) * np.exp(rng.standard_normal((*full.shape[:3], 1)))
        x[2, 0, :, : dim // 2] = 0.5 * rng.integers(-254, 255, (size, dim // 2))  # ties
        full[...] = same[...] = x
        x[0, 0, 0], x[0, 0, 1], x[0, 1, 2], x[1, 1, 1, 3] = 0, x[0, 0, 1] * 1e-30, 1e-42, 3e38
        given_.append(x)
    for places in in_buffer(*given_), slots(0, 2, 1):
        encoding_ops(level).encode_blocks([FilledBlocks([compiled], [2, 0, 1], places)])
        NumpyOps(1).encode_blocks([FilledBlocks([plain], [2, 0, 1], places)])
        for name, array in arrays(plain).items():
            np.testing.assert_array_equal(arrays(compiled)[name].view(np.uint8), array.view(np.uint8), err_msg=name)


@in_turn("name largest", each(WITH_KERNELS, [0, 1e4, 3e38]))
def test_without_a_metric_points_are_nearest(name: str, largest: float) -> None:
    """Norms may differ in their last bit, and a code with them; those beyond the largest saturate."""
    (metric,) = formats(14, name, name, 24, 32, 8)
    format = replace(metric, metric_k=None, metric_v=None)
    compiled, plain = (cache(format, 2, seed=1) for _ in range(2))
    k, v = plain.full_k.astype(np.float32), plain.full_v.astype(np.float32)
    for x in k, v:
        x[0, :, 3] = 0
        x[1, 1, 4] = np.linspace(-1, 1, 24) * largest
    places = in_buffer(k, v)
    encoding_ops().encode_blocks([FilledBlocks([compiled], [0, 1], places)])
    NumpyOps(1).encode_blocks([FilledBlocks([plain], [0, 1], places)])
    for side, (fields, expected) in enumerate(zip(stored(compiled)[:2], stored(plain)[:2], strict=True)):
        same = np.isclose(points(compiled, side), points(plain, side), atol=1e-3)
        assert same.mean() > 0.999
        assert same[1, 1, 4].all()
        np.testing.assert_allclose(fields["norm"].astype(float), expected["norm"].astype(float), rtol=2e-2)


@in_turn(
    "level name side bad",
    each(FLOAT_LEVELS, ["q8_0", "q4_0", "f16", "polarquant", "ring4", "turbo3"], [0, 1], [np.nan, np.inf, -np.inf]),
)
def test_what_is_not_finite_is_refused(name: str, side: int, bad: float, level: Level) -> None:
    if codecs.get(name).rounding is None:
        format = CacheFormat(codecs.get(name), codecs.get(name), None, None, 0, 16, HEADS, 32)
    else:
        (format,) = formats(7, name, name, 32, 16, 8)
    made = cache(format, 2, seed=1)
    (made.full_k, made.full_v)[side][1, 1, 3, 17] = bad
    ops = encoding_ops(level)
    ops.encode_blocks([FilledBlocks([made], [0], slots(0))])
    with pytest.raises(NotFinite, match=name):
        ops.encode_blocks([FilledBlocks([made], [0], slots(1))])


@pytest.mark.parametrize(
    ("name", "tokens"), [("ring4", 32), ("turbo3", 5), ("trellis3", 5), ("q4_0", 32), ("kivi4", 5)]
)
def test_round_trip(name: str, tokens: int) -> None:
    if codecs.get(name).rounding is None:
        format = CacheFormat(codecs.get(name), codecs.get(name), None, None, 8, 32, HEADS, 32)
    else:
        (format,) = formats(13, name, name, 32, 32, 8)
    compiled, plain = (cache(format, 2, seed=1) for _ in range(2))
    before = plain.full_k.copy(), plain.full_v.copy()
    encoding_ops().round_trip(compiled, KVLocation(None, 1), tokens)
    NumpyOps(1).round_trip(plain, KVLocation(None, 1), tokens)
    for x, full, expected in zip(before, (compiled.full_k, compiled.full_v), (plain.full_k, plain.full_v), strict=True):
        np.testing.assert_array_equal(full[0], x[0])
        np.testing.assert_array_equal(full[1, :, tokens:], x[1, :, tokens:])
        assert not np.array_equal(full[1, :, :tokens], x[1, :, :tokens])
        errors = [np.square(y[1, :, :tokens] - x[1, :, :tokens]).sum() for y in (full, expected)]
        assert errors[0] == pytest.approx(errors[1], rel=0.1)
        assert np.isclose(full, expected, rtol=1e-5, atol=1e-5).mean() > 0.9


def test_blocks_of_layers_from_slots() -> None:
    """Blocks and slots in any order; the layers have their own metrics."""
    layers = [cache(format, 5, seed) for seed, format in enumerate(formats(4, "ring4", "turbo3", 16, 16, 8, layers=3))]
    alone = [cache(layer.format, 5, seed) for seed, layer in enumerate(layers)]
    ops = encoding_ops(threads=2)
    ops.encode_blocks([FilledBlocks(layers, [4, 1], slots(2, 0))])
    for layer, single in zip(layers, alone, strict=True):
        NumpyOps(1).encode_blocks([FilledBlocks([single], [4, 1], slots(2, 0))])
        for side in (0, 1):
            assert share_of_equal_blocks(layer, single, side) >= 0.5
        assert not np.array_equal(stored(layer).k["codes"][:, 4], stored(layer).k["codes"][:, 1])


def test_extreme_values() -> None:
    """A vector of zeros, values beyond half precision, values that are almost 0."""
    (format,) = formats(8, "ring4", "ring3.5", 16, 16, 0)
    compiled, plain = (cache(format, 1, seed=1) for _ in range(2))
    k, v = plain.full_k.astype(np.float32), plain.full_v.astype(np.float32)
    for x in k, v:
        x[0, :, 0], x[0, 0, 1], x[0, 1, 3] = 0, 3e38, x[0, 1, 3] * 1e-30
    encoding_ops().encode_blocks([FilledBlocks([compiled], [0], in_buffer(k, v))])
    NumpyOps(1).encode_blocks([FilledBlocks([plain], [0], in_buffer(k, v))])
    for fields, expected in zip(stored(compiled)[:2], stored(plain)[:2], strict=True):
        np.testing.assert_array_equal(fields["norm"], expected["norm"])


def test_codecs_without_a_kernel_are_encoded_in_numpy() -> None:
    (format,) = formats(9, "ring4", "ring4", 16, 20, 8)  # 20 tokens do not fill vectors
    compiled, plain = both(format, HIGHEST)
    for name, array in arrays(plain).items():
        np.testing.assert_array_equal(arrays(compiled)[name], array)
