"""Blocks are encoded with the codes, norms and means of NumPy on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polarlm.engine import codecs, records
from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.kv.store import ALL, candidates
from polarlm.engine.backends.cuda.launch import LaunchConfig
from polarlm.engine.backends.kv import FilledBlocks, KVLocation
from polarlm.engine.backends.numpy.kv import encoding as numpy_encoding
from polarlm.engine.codecs import NotFinite
from polarlm.engine.codecs.parts.nearest import NearestPoint
from polarlm.engine.codecs.ring import RINGS, points_of
from polarlm.engine.quantization.metric import remove_feedback
from tests.codecs.data import TABLED
from tests.ops.backends import BEST, CUDA, EVERY_LEVEL, NUMPY, backend_cases, backends
from tests.ops.encoding import Case, Shape, bits, case_of, edges, metrics_of, vectors
from tests.pairs import each, in_turn, mostly_slow

# Kernels of a CPU multiply floats only: levels with the same registers have the same code.
_BY_REGISTERS = {(one.level.lanes, one.level.registers): one for one in reversed(EVERY_LEVEL)}
FLOAT_LEVELS = [*_BY_REGISTERS.values()][::-1]


def use_tokens(monkeypatch: pytest.MonkeyPatch, tokens: int, warps: int = 4) -> None:
    """In shared memory at once, of fewer warps than the engine has for encode_blocks, for the emulator's sake."""

    def config(keys: records.Layout, values: records.Layout) -> LaunchConfig:
        shared = max(launch_configs.encode_bytes(side, tokens) for side in (keys, values))
        defines = {"WARPS": warps, "TOKENS": tokens, "SHARED": shared, **launch_configs.LARGEST}
        return LaunchConfig(defines, 32 * warps, shared)

    monkeypatch.setattr(launch_configs, "encode_blocks", config)


def one_sided(name: str, values: bool, dim: int, size: int, mean_bits: int = 0, heads: int = 2) -> Shape:
    """The other side is in half precision."""
    types = ("f16", name) if values else (name, "f16")
    return Shape(types, dim, size, mean_bits if codecs.is_quantized(codecs.get(types[0])) else 0, heads)


# -- as NumPy, to the bit ------------------------------------------------------------------------------------------

OF_CPU = [
    Shape(("f16", "f16"), 24, 64, 0),
    Shape(("polarquant", "polarquant+none"), 40, 32, 16),
    Shape(("f16", "polarquant"), 96, 16, 0),
]


@backend_cases(
    "ops shape",
    each(FLOAT_LEVELS or [NUMPY], OF_CPU),
    slow=[(backend, shape) for backend in FLOAT_LEVELS for shape in OF_CPU],
)
def test_tiles_without_a_metric_are_those_of_numpy(ops: Any, monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    """From a buffer, zeros, tiny values and values beyond half precision included, and from slots. Kernels encode."""
    monkeypatch.setattr("polarlm.engine.backends.native.kv.encoding.encode_side", None)
    x = vectors(np.random.default_rng(12), shape, 3)
    x[:, 2, 0, :, : shape.dim // 2] = 0.5 * np.random.default_rng(1).integers(-254, 255, (shape.size, shape.dim // 2))
    case_of(ops, shape, x).check_same()  # with ties
    for side in x:
        side[0, 0, 0], side[0, 0, 1], side[0, 1, 2], side[1, 1, 1, 3] = 0, side[0, 0, 1] * 1e-30, 1e-42, 3e38
    case_of(ops, shape, x, in_buffer=True).check_same()


GPU_SHAPES = [
    (16, 16, 16, 8),
    (64, 32, 32, 16),
    (72, 16, 16, 8),
    (80, 32, 16, 0),
]  # D, N, tokens at once, bits of means


FAST_CODECS = ["f16", "polarquant", "ring3.5", "polarpair-m4n2+minmax-radius+g16"]
OF_GPU = [*enumerate([*FAST_CODECS, *(name for name in [*TABLED, "ring4+norm16"] if name not in FAST_CODECS)])]


@backends(CUDA)
@mostly_slow("number, name", OF_GPU, OF_GPU[: len(FAST_CODECS)])
def test_codes_of_every_codec_on_a_gpu(ops: Any, monkeypatch: pytest.MonkeyPatch, number: int, name: str) -> None:
    """Each codec rounds in its own way, its search ends in its own way, and it packs its codes in another order for
    keys, which have a mean."""
    dim, size, tokens, mean_bits = GPU_SHAPES[number % len(GPU_SHAPES)]
    use_tokens(monkeypatch, tokens)
    ops._device.seed = number % 3
    for values in (False, True):
        if values and "v" not in codecs.get(name).serves:
            continue
        shape = one_sided(name, values, dim, size, mean_bits)
        for x in (vectors(np.random.default_rng(0), shape, 2, bias=2.0), edges(shape)):
            case_of(ops, shape, x).check_same()


@pytest.mark.slow
@backends(CUDA)
@pytest.mark.parametrize(
    ("name", "size", "dim", "warps"),
    [
        ("ring4", 64, 128, 12),
        ("turbo4", 64, 64, 12),
        ("linear8", 64, 128, 12),
        ("ring2.5", 64, 128, 12),
        ("ring4", 128, 128, 10),
        ("ring4", 64, 256, 10),
    ],
)
def test_the_engine_s_launch_gives_the_codes_of_numpy(ops: Any, name: str, size: int, dim: int, warps: int) -> None:
    """It rounds larger blocks a part at a time, with fewer warps."""
    shape = Shape((name, name), dim, size, 8, 1)
    x = vectors(np.random.default_rng(0), shape, 1)
    case = case_of(ops, shape, x)
    assert launch_configs.encode_blocks(*case.cache.layouts).defines["WARPS"] == warps
    case.check_same()


# -- with a metric, on a GPU ---------------------------------------------------------------------------------------

SMALL = [  # keys are tilted where they are rounded with several norms
    (one_sided("ring3.5", True, 32, 32), False),
    (one_sided("turbo4", True, 24, 32), False),  # codes of single values
    (one_sided("ring4", False, 24, 16, 8), False),
    (one_sided("ring4", False, 16, 16, 8), True),
    (one_sided("ring3.5", False, 72, 48, 16), True),  # targets in registers in two parts; three passes
    (one_sided("turbo4", False, 24, 32), True),  # codes of single values, no means
]
OF_MODELS = [
    (Shape(("ring3", "ring3"), 256, 128, 8), False),  # not all tokens at once
    *(
        (one_sided(name, values, dim, size, 8), False)
        for name, size, dim in (("ring3.5", 64, 128), ("ring5", 128, 128), ("turbo4", 64, 80))
        for values in (False, True)
    ),
    *(
        (one_sided(name, False, dim, size, 8), True)
        for name, size, dim in (("ring4", 64, 128), ("ring5", 128, 128), ("ring3.5", 64, 256), ("turbo4", 64, 128))
    ),
]


@backends(CUDA)
@mostly_slow("shape, tilted", SMALL + OF_MODELS, SMALL)
def test_codes_with_a_metric_on_a_gpu(ops: Any, shape: Shape, tilted: bool) -> None:
    ops._device.seed = 2
    x = vectors(np.random.default_rng(0), shape, 1 + (shape.size < 64))
    case_of(ops, shape, x, metrics_of(shape, tilted=tilted)).check_as_good()


@backends(CUDA)
def test_codes_without_feedback_on_a_gpu(ops: Any) -> None:
    values, keys = one_sided("ring3.5", True, 32, 32), one_sided("ring4", False, 16, 16, 8)
    for shape, metrics in (
        (one, [metric and remove_feedback(metric) for metric in metrics_of(one)]) for one in (values, keys)
    ):
        case_of(ops, shape, metrics=metrics).check_as_good()


@backends(CUDA, *BEST)
@pytest.mark.parametrize(("number", "most"), [(0, 1e-3), (1, 1e-3), (3, 1e-4)])
def test_exceptional_blocks_with_a_metric(ops: Any, number: int, most: float) -> None:
    """A token next to one that is 10^12 times as long, zeros, equal ones, and values in the middle between two levels,
    which may become either. The buffers of a CPU hold values beyond half precision."""
    shape, on_cpu = SMALL[number][0]._replace(heads=1), ops.backend != "cuda"
    shape = shape._replace(dim=32 if number == 1 else shape.dim)
    x = edges(shape)
    x[:, 0, 0, 1] = 3e38 if on_cpu else 0
    case_of(ops, shape, x, metrics_of(shape), in_buffer=on_cpu).check_as_good(most)


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


# -- with a metric, in compiled kernels ----------------------------------------------------------------------------


def points(case: Case, side: int, fields: Any) -> np.ndarray:
    """The points that the codes of keys or values stand for, float32 (K, B, N, D)."""
    codec = (case.cache.format.codec_k, case.cache.format.codec_v)[side]
    norms = codec.rounding.norms.unpack(fields["norm"])[..., None]
    return codec.decode(fields) / np.where(norms > 0, norms, 1)


def compared(case: Case) -> list[tuple[float, float, float]]:
    """Of each side: the share of blocks all of whose codes are NumPy's, what its errors cost, and what NumPy's do.

    A sum in another order puts one value in some hundred thousand on the other side of an edge. Feedback then changes
    other codes of its block."""
    case.encode()
    stored, wanted = case.fields(), case.wanted()
    results = []
    for side in (0, 1):
        pairs = [points(case, side, fields[side]) for fields in (stored, wanted)]
        same = float(np.isclose(*pairs, atol=1e-3).all((-2, -1)).mean())
        results.append((same, *(float(case.costs(side, fields[side], fields[2]).sum()) for fields in (stored, wanted))))
    for name, mean in wanted[2].items():
        np.testing.assert_array_equal(bits(stored[2][name]), bits(mean))
    return results


WITH_METRIC = ["ring3.5", "ring5+norm16", "turbo3"]


@backend_cases(
    "ops name",
    each(FLOAT_LEVELS or [NUMPY], WITH_METRIC),
    slow=[(backend, name) for backend in FLOAT_LEVELS for name in WITH_METRIC],
)
def test_codes_with_a_metric_in_compiled_kernels(ops: Any, name: str) -> None:
    shape = Shape((name, name), 32, 32, 8)
    x = vectors(np.random.default_rng(1), shape, 4, bias=3)
    for same, cost, wanted in compared(case_of(ops, shape, x, metrics_of(shape))):
        assert same >= 0.75
        assert cost == pytest.approx(wanted, rel=0.03)


@backend_cases("ops name", each(FLOAT_LEVELS or [NUMPY], ["ring3", "ring5", "turbo4"]))
def test_without_feedback_codes_are_equal(ops: Any, name: str) -> None:
    shape = Shape((name, name), 40, 48, 16)
    metrics = [metric and remove_feedback(metric) for metric in metrics_of(shape)]
    x = vectors(np.random.default_rng(1), shape, 3, bias=3)
    assert [same for same, *_ in compared(case_of(ops, shape, x, metrics))] == [1, 1]


@pytest.mark.slow
@pytest.mark.skipif(not BEST, reason="no kernel is compiled here")
@given(
    st.sampled_from(TABLED),
    st.sampled_from(TABLED),
    st.integers(1, 32),
    st.sampled_from([16, 32, 48, 64, 80]),
    st.sampled_from([0, 8, 16]),
    st.integers(0, 2**16),
)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_shape(k: str, v: str, eighths: int, size: int, mean_bits: int, seed: int) -> None:
    shape = Shape((k, v), 8 * eighths, size, mean_bits)
    x = vectors(np.random.default_rng(1), shape, 1, bias=3)
    for same, cost, wanted in compared(case_of(BEST[0].open(), shape, x, metrics_of(shape, seed))):
        assert same == 1 or cost == pytest.approx(wanted, rel=0.3)


@in_turn("name largest", each(TABLED, [0, 1e4, 3e38]))
@backends(*BEST)
def test_without_a_metric_points_are_nearest(ops: Any, name: str, largest: float) -> None:
    """Norms may differ in their last bit, and a code with them; those beyond the largest saturate."""
    shape = Shape((name, name), 24, 32, 8)
    x = vectors(np.random.default_rng(1), shape, 2, bias=3)
    x[:, 0, :, 3], x[:, 1, 1, 4] = 0, np.linspace(-1, 1, 24) * largest
    case = case_of(ops, shape, x, in_buffer=True)
    case.encode()
    for side, (fields, expected) in enumerate(zip(case.fields()[:2], case.wanted()[:2], strict=True)):
        same = np.isclose(points(case, side, fields), points(case, side, expected), atol=1e-3)
        assert same.mean() > 0.999
        assert same[1, 1, 4].all()
        np.testing.assert_allclose(fields["norm"].astype(float), expected["norm"].astype(float), rtol=2e-2)


@backends(*BEST)
def test_codecs_without_a_kernel_are_encoded_in_numpy(ops: Any) -> None:
    """In a layer that kernels read, and in one that they do not: 20 tokens do not fill vectors."""
    shape = Shape(("ring4", "ring4"), 16, 20, 8)
    case_of(ops, shape, metrics=metrics_of(shape)).check_same()
    case = case_of(ops, Shape(("polarpair-m4n4", "f16"), 64, 32, 8))
    assert "keys" in "".join(ops.numpy_fallbacks(case.cache))
    case.check_same()


NAMES = ["linear8", "f16", "polarquant", "ring4", "turbo3"]


@backend_cases("ops name side bad", each(FLOAT_LEVELS or [NUMPY], NAMES, [0, 1], [np.nan, np.inf, -np.inf]))
def test_what_is_not_finite_is_refused(ops: Any, name: str, side: int, bad: float) -> None:
    shape = Shape((name, name), 32, 16, 8 if codecs.get(name).rounding else 0)
    case = case_of(ops, shape, metrics=metrics_of(shape))
    slot = case.places[1].block
    (case.cache.full_k, case.cache.full_v)[side][slot, 1, 3, 17] = bad
    case.ops.encode_blocks([FilledBlocks([case.cache], [0], case.places[:1])])
    with pytest.raises(NotFinite, match=name):
        case.ops.encode_blocks([FilledBlocks([case.cache], [0], case.places[1:])])


ROUND_TRIPS = [("ring4", 32), ("turbo3", 5), ("linear8", 32)]


@backend_cases(
    "ops name tokens",
    [
        *((backend, *of) for backend in BEST for of in ROUND_TRIPS),
        (CUDA, "ring4", 32),
        (CUDA, "ring4", 5),
    ],
)
def test_round_trip(ops: Any, name: str, tokens: int) -> None:
    """Tokens become what a block of them decodes to."""
    shape = Shape((name, name), 32, 32, 8)
    x, metrics = vectors(np.random.default_rng(1), shape, 2, bias=3), metrics_of(shape)
    cases = [case_of(one, shape, x, metrics) for one in (ops, NUMPY.open())]
    for case in cases:
        case.ops.round_trip(case.cache, case.places[1], tokens)
    read = [[case.ops.read_full(case.cache, place.block, 32) for place in case.places] for case in cases]
    for side, before in enumerate(x):
        actual, expected = (np.array(blocks[1][side], np.float32) for blocks in read)
        np.testing.assert_array_equal(read[0][0][side], before[0])
        if ops.backend != "cuda":  # which makes the rest zeros
            np.testing.assert_array_equal(actual[:, tokens:], before[1, :, tokens:])
        assert not np.array_equal(actual[:, :tokens], before[1, :, :tokens])
        errors = [np.square(y[:, :tokens] - before[1, :, :tokens]).sum() for y in (actual, expected)]
        assert errors[0] == pytest.approx(errors[1], rel=0.1)
        assert np.isclose(actual[:, :tokens], expected[:, :tokens], rtol=1e-5, atol=1e-5).mean() > 0.9


# -- blocks and layers together ------------------------------------------------------------------------------------

TYPES = [("ring4", "ring3.5"), ("polarquant", "f16"), ("ring4", "ring3.5"), ("ring4", "ring3.5")]  # of layers
MORE = [*[("ring4", "ring3.5")] * 5, *[("turbo3", "ring3")] * 2, ("ring4", "ring3.5"), ("f16", "turbo3")]
OF_LEVELS = [("ring5+norm16", "ring3"), ("ring3.5", "turbo4")]


@backend_cases(
    "ops types size has_metrics most",
    [
        *((NUMPY, MORE, 8, has, most) for has, most in [(0, 1), (1, 5 * 256), (1, 1 << 20), (1, 1), (0, 5 * 256)]),
        *((backend, [("ring4", "turbo3")] * 3, 16, 1, None) for backend in BEST),
        (CUDA, TYPES, 16, 0, None),
        (CUDA, TYPES, 16, 1, None),
    ],
)
def test_layers_and_blocks_together_have_the_codes_of_each_alone(
    ops: Any,
    monkeypatch: pytest.MonkeyPatch,
    types: list[tuple[str, str]],
    size: int,
    has_metrics: int,
    most: int | None,
) -> None:
    """To the last bit, in any order of blocks, whose others stay as they are. Layers have metrics of their own."""
    if most is not None:
        monkeypatch.setattr(numpy_encoding, "_VALUES", most)
    pairs = []
    for number, of_layer in enumerate(types):
        shape = Shape(of_layer, 16, size, 8)
        x, metrics = vectors(np.random.default_rng(number), shape, 3), metrics_of(shape, number)
        pairs.append([case_of(ops, shape, x, metrics if has_metrics else (None, None)) for _ in range(2)])
    first = pairs[0][0]
    ops.encode_blocks([FilledBlocks([case.cache for case, _ in pairs], first.ids, first.places)])
    for _, case in pairs:
        encode_alone(case)
    for case, other in pairs:
        stored, wanted = (ops.read_blocks(one.cache, range(5)) for one in (case, other))
        for name, array in wanted.items():
            np.testing.assert_array_equal(stored[name], array, err_msg=name)
            assert [bool(block.any()) for block in array] == [number in case.ids for number in range(5)]


def encode_alone(case: Case) -> None:
    for block, place in zip(case.ids, case.places, strict=True):
        case.ops.encode_blocks([FilledBlocks([case.cache], [block], [place])])


@backend_cases("ops types", each([*FLOAT_LEVELS[-1:], *FLOAT_LEVELS[:1]] or [NUMPY], OF_LEVELS))
def test_norms_of_large_blocks_saturate_alone_and_together(ops: Any, types: tuple[str, str]) -> None:
    """From half precision, and then from single precision."""
    shape = Shape(types, 40, 16, 8)
    x = 1e4 * vectors(np.random.default_rng(0), shape, 3)
    together, alone = (case_of(ops, shape, x, metrics_of(shape), in_buffer=True) for _ in range(2))
    together.encode()
    ops.encode_blocks([FilledBlocks([alone.cache], alone.ids[:1], [KVLocation(None, 0)])])
    encode_alone(alone)
    for stored, wanted in zip(together.fields(), alone.fields(), strict=True):
        for name, array in wanted.items():
            np.testing.assert_array_equal(bits(stored[name]), bits(array))
