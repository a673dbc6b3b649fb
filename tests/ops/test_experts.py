"""The choice of experts, and products with them, on every backend: against NumPy's choice, and float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.numpy.rows import apply_activation
from polarlm.engine.backends.ops import ExpertNetwork, Fusion, Routing
from polarlm.engine.errors import EngineError
from polarlm.engine.weight_formats import Deltas, ExpertLinear
from polarlm.model_loaders.config import Activation, Experts, is_gated
from tests.cuda.emulated import EmulatedDevice
from tests.cuda.formats import EPS32, STEP
from tests.cuda.test_warm_up import Watched
from tests.ops.backends import BEST, CUDA, EVERY_LEVEL, MATRICES, NUMPY, SOME, backend_cases, backends
from tests.ops.products import input_kind
from tests.pairs import each, pairs
from tests.weights import StoredArray, StoredBytes, random_matrix

PLAIN = NumpyOps(1)
EPS = 1e-5


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


# -- the choice ----------------------------------------------------------------------------------------------------


def check_choice(ops: Any, rule: Experts, logits: np.ndarray, bias: Any = None, factors: Any = None) -> None:
    """A bias changes which scores are chosen, and not their weights."""
    wanted = PLAIN.route(logits, rule, bias, factors)
    numbers = (None if x is None else ops.to_device(x) for x in (bias, factors))
    ids, weights = (np.array(x) for x in on_host(ops, ops.route(ops.to_device(logits), rule, *numbers)))
    np.testing.assert_array_equal(ids, wanted.ids)
    np.testing.assert_allclose(weights, wanted.weights, rtol=(64 if ops.backend == "cuda" else 16) * EPS32, atol=1e-30)


def on_host(ops: Any, routing: Routing) -> list[np.ndarray]:
    return [ops._device.to_host(x) for x in routing] if ops.backend == "cuda" else [*routing]


def hard_logits(rng: np.random.Generator, count: int) -> np.ndarray:
    logits = 3 * normal(rng, 9, count)
    logits[1] = 0.25  # all are equal
    logits[2, -1] = 80
    logits[3] *= 20
    return logits


@backends(*SOME, CUDA)
def test_the_experts_of_a_row_are_those_of_numpy(ops: Any, rng: np.random.Generator) -> None:
    for count, top_k, scoring, renormalize, has_bias, has_factors in pairs(
        [1, 3, 37, 256], [1, 3, 33], ["softmax", "sigmoid"], [False, True], [False, True], [False, True]
    ):
        rule = Experts(count, min(top_k, count), 1, scoring=scoring, renormalize=renormalize, scale=1.5)
        is_hard = ops.backend != "cuda" and top_k < 33  # of many, some would have no weight in float32
        logits = hard_logits(rng, count) if is_hard else 3 * normal(rng, 6, count)
        check_choice(ops, rule, logits, *(normal(rng, count) if has else None for has in (has_bias, has_factors)))


@backends(NUMPY, *SOME, CUDA)
def test_experts_are_chosen_from_the_best_groups(ops: Any, rng: np.random.Generator) -> None:
    for scoring, groups, top_groups in (("softmax", 4, 2), ("softmax", 40, 7), ("sigmoid", 8, 4), ("sigmoid", 5, 1)):
        rule = Experts(80, 5, 1, scoring=scoring, renormalize=True, groups=groups, top_groups=top_groups)
        logits, bias = 3 * normal(rng, 20, 80), normal(rng, 80) if scoring == "sigmoid" else None
        ids, weights = on_host(
            ops, ops.route(ops.to_device(logits), rule, None if bias is None else ops.to_device(bias))
        )
        wide = logits.astype(np.float64)
        scores = 1 / (1 + np.exp(-wide)) if bias is not None else np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
        for row, chosen, weight in zip(scores, ids, weights, strict=True):
            ranks = row if bias is None else row + bias
            by_group = ranks.reshape(groups, -1)
            largest = [sum(sorted(group)[-2:]) if scoring == "sigmoid" else max(group) for group in by_group]
            best = np.argsort(largest)[-top_groups:]
            allowed = [expert for expert in range(80) if expert // (80 // groups) in best]
            expected = sorted(allowed, key=lambda expert: -ranks[expert])[:5]
            assert chosen.tolist() == expected
            np.testing.assert_allclose(weight, row[expected] / row[expected].sum(), rtol=1e-5)


@backends(NUMPY, *BEST, CUDA)
def test_of_equal_scores_the_lowest_number_is_chosen(ops: Any) -> None:
    logits = np.zeros((2, 70), np.float32)
    logits[1, [69, 5, 37]] = 1
    ids, weights = on_host(ops, ops.route(ops.to_device(logits), Experts(70, 4, 16, renormalize=True)))
    assert ids.tolist() == [[0, 1, 2, 3], [5, 37, 69, 0]]
    np.testing.assert_allclose(weights[0], 0.25, rtol=0 if ops.backend == "cuda" else EPS32)


@backends(NUMPY, *SOME, CUDA)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_row_with_a_logit_that_is_not_finite_has_no_weights(ops: Any, rng: np.random.Generator, scoring: Any) -> None:
    """Its experts exist, so that what follows reads no other memory; other rows have their weights."""
    logits, rule = normal(rng, 5, 40), Experts(40, 4, 16, scoring=scoring, renormalize=scoring == "softmax")
    sound = on_host(ops, ops.route(ops.to_device(logits), rule))[1].copy()
    logits[0, 39], logits[1, 3], logits[2, 7] = np.nan, np.inf, -np.inf
    ids, weights = on_host(ops, ops.route(ops.to_device(logits), rule))
    assert np.isnan(weights[:3]).all()
    assert ((ids >= 0) & (ids < 40)).all()
    if ops.backend == "cuda":
        assert all(sorted(set(row)) == sorted(row) for row in ids.tolist())
    np.testing.assert_array_equal(weights[3:], sound[3:])


# -- their results -------------------------------------------------------------------------------------------------


class Layer:
    """The matrices of `count` experts with sizes E and F. formats: of gate, up and down. gated: whether they have a
    gate."""

    def __init__(
        self,
        rng: np.random.Generator,
        formats: Sequence[str],
        count: int,
        e: int,
        f: int,
        bias: bool = False,
        gated: bool = True,
    ):
        *ups, down = formats if gated else formats[1:]
        self.gate_up = [[random_matrix(rng, up, f, e) for up in ups] for _ in range(count)]
        self.down = [[random_matrix(rng, down, e, f)] for _ in range(count)]
        sizes = (len(ups) * f, e)
        self.biases = [normal(rng, count, n) if bias else None for n in sizes]

    def on(self, ops: Any, activation: str = "silu", norm: Any = None) -> ExpertNetwork:
        """The network on a device."""
        gate_up, down = (
            ExpertLinear(len(stored), ops.load_experts(stored), None if bias is None else ops.to_device(bias))
            for stored, bias in zip((self.gate_up, self.down), self.biases, strict=True)
        )
        return ExpertNetwork(gate_up, down, Fusion(norm, activation))

    def exact(self, x: np.ndarray, routing: Routing, activation: str, *, halves: bool) -> np.ndarray:
        """The weighted sum of the results of each row's experts, float64. halves: float32 is kept in half precision."""

        def matrix(stored: list[StoredBytes]) -> np.ndarray:
            values = np.concatenate([one.values for one in stored])
            return (values.astype(np.float16) if halves and stored[0].format.name == "f32" else values).astype(float)

        out = np.zeros((len(x), self.down[0][0].shape[0]))
        for row, number in np.ndindex(*routing.ids.shape):
            expert = routing.ids[row, number]
            up, down = (0 if bias is None else bias[expert] for bias in self.biases)
            inner = apply_activation((matrix(self.gate_up[expert]) @ x[row] + up)[None], activation)[0]
            out[row] += routing.weights[row, number] * (matrix(self.down[expert]) @ inner + down)
        return out


# Formats of gate, up and down. On a GPU with two formats, or whole tiles that are not pairs, an activation follows.
FORMATS = [
    *(("q4_k", "q4_k", "q6_k"), ("q8_0", "q4_0", "q5_0"), ("mxfp4",) * 3),
    *(("f16", "f16", "bf16"), ("f32",) * 3, ("iq2_xxs",) * 3),
]
OF_GPU = [("f16", "f16", "bf16"), ("f32",) * 3, ("q8_0", "q8_0", "q4_0"), ("mxfp4",) * 3, ("q8_0", "f16", "f16")]
ACTIVATION: list[Activation] = ["silu", "gelu_tanh", "swiglu_clamped", "relu_squared"]
# Formats with and without codes, few and many rows, with and without a bias, one or two of gate and up, a norm, a sum
AXES: list[list[Any]] = [FORMATS, [1, 5, 33], [False, True], ACTIVATION, [False, True], [False, True]]


def check_experts(
    ops: Any, formats: Sequence[str], rows: int, bias: bool, activation: str, has_norm: bool, adds: bool
) -> None:
    """One of the experts is chosen by no row. Sizes are no whole tiles on a CPU.

    A GPU rounds the inputs of both products to half precision; inputs of compiled kernels become words."""
    rng, count = np.random.default_rng(2), 7
    e, f = (256, 256) if set(formats) & {"q4_k", "iq2_xxs"} else (48, 24) if formats[0] == "f32" else (64, 96)
    e, f = (64, 32) if ops.backend == "cuda" else (e, f)
    gated = is_gated(activation)
    layer = Layer(rng, formats, count, e, f if gated or ops.backend != "cuda" else 2 * f, bias, gated)
    x, before, gain, logits = (normal(rng, *shape) for shape in ((rows, e), (rows, e), (e,), (rows, count)))
    logits[:, 3] = -100
    rule = Experts(count, 3, f, activation, renormalize=True)  # type: ignore[arg-type]
    wide = x.astype(np.float64)
    wide = wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS) * gain if has_norm else wide
    wanted = layer.exact(wide, PLAIN.route(logits, rule), activation, halves=ops.backend == "cuda")
    into = ops.to_device(before.copy()) if adds else None
    norm = (ops.to_device(gain), EPS) if has_norm else None
    routing = ops.route(ops.to_device(logits), rule)
    y = ops.experts(ops.to_device(x), routing, layer.on(ops, activation, norm), into)
    assert (y is into) == adds
    error = ops.to_host(y) - (wanted + before if adds else wanted)
    if ops.backend == "cuda":
        assert np.abs(error).max() <= 4 * STEP["__half"] * np.abs(wanted).max()
    else:
        allowed = 1e-5 if ops.backend == "numpy" else 3e-4
        allowed = 2**-6 if ops.backend == "native" and ops._launch.input_bits == "bf16" else allowed
        assert np.linalg.norm(error) < allowed * np.linalg.norm(wanted + before if adds else wanted)


LAYERS: list[tuple[Any, ...]] = [  # rows, biased, activation, normed, added
    (1, False, "silu", True, True),
    (2, True, "swiglu_clamped", True, True),
    (7, True, "gelu_tanh", False, False),
    (70, True, "swiglu_clamped", True, True),
    (66, False, "silu", False, False),
    (2, False, "relu_squared", True, True),
    (70, True, "relu_squared", False, False),
]


@backend_cases(
    "ops case",
    [
        *((backend, case) for backend, *case in each(SOME or [NUMPY], *AXES)),
        *((backend, case) for backend in MATRICES for case in each(*AXES)),
        (NUMPY, (FORMATS[0], *LAYERS[1])),
        *((CUDA, (formats, *layer)) for formats, layer in each(OF_GPU, LAYERS[:5])),
    ],
    slow=[(CUDA, (formats, *layer)) for formats, layer in product(OF_GPU, LAYERS)],
)
def test_results_of_experts(ops: Any, case: Sequence[Any]) -> None:
    """Any two of a level, formats, rows and the rest are together somewhere: every case has kernels of its own. On a
    GPU steps, prompts, and batches of few rows: formats and rows decide together which kernels multiply."""
    check_experts(CUDA.open(checked=False) if ops.backend == "cuda" and case[1] > 60 else ops, *case)


@pytest.mark.slow
@backends(*EVERY_LEVEL)
def test_results_of_experts_at_a_level(ops: Any) -> None:
    """Any two of formats, rows and the rest are together at each level."""
    for case in pairs(*AXES):
        check_experts(ops, *case)


ADAPTERS = pairs(["f32", "f16", "bf16"], [1, 6, 33], [8, 24, 64], [1, 3])


@backend_cases(
    "ops name rows rank count",
    [
        *((backend, *case) for backend in (NUMPY, *SOME) for case in ADAPTERS),
        *((CUDA, *case) for case in [("f16", 1, 8, 1), ("f32", 2, 24, 3), ("bf16", 7, 16, 2), ("f16", 70, 64, 1)]),
    ],
)
def test_without_an_activation_results_are_the_products_of_both(
    ops: Any, rng: np.random.Generator, name: str, rows: int, rank: int, count: int
) -> None:
    """As for adapters: few outputs of the first product, and rows with the weight 0, to which nothing is added."""
    if rows > 60:
        ops = CUDA.open(checked=False)
    shapes = (rank, 72), (48, rank)
    stored = [[[StoredArray(normal(rng, *shape) / 8, name)] for _ in range(count)] for shape in shapes]
    for one, shape in zip(stored, shapes, strict=True):
        one.append([StoredArray(np.full(shape, np.nan, np.float32), name)])
    ids, scales = rng.integers(0, count, (rows, 1)).astype(np.int32), normal(rng, rows, 1)
    ids[rows // 2 :: 3], scales[rows // 2 :: 3] = count, 0
    x, before = normal(rng, rows, 72), normal(rng, rows, 48)
    wanted = before.astype(np.float64)
    for row in np.flatnonzero(scales):
        a, b = (matrices[ids[row, 0]][0].values.astype(np.float64) for matrices in stored)
        wanted[row] += scales[row] * (b @ (a @ x[row]))
    a, b = (ExpertLinear(count + 1, ops.load_experts(one)) for one in stored)
    into, routing = ops.to_device(before.copy()), Routing(*map(ops.to_device, (ids, scales)))
    assert ops.experts(ops.to_device(x), routing, ExpertNetwork(a, b), into) is into
    allowed = 1e-3 if ops.backend == "native" and name != "f32" and rank == 64 and rows > 1 else 2e-5  # words
    if ops.backend == "cuda":  # x and the first product are rounded
        allowed = 4 * STEP[input_kind(name)] * np.abs(wanted - before).max() + 1e-6
    assert np.abs(ops.to_host(into) - wanted).max() <= allowed


CHANGED: list[Any] = [FORMATS, [1, 5, 33], [(True, True), (True, False), (False, True)], [8, 24], ["f32", "f16"]]


@backend_cases("ops case", [(backend, case) for backend, *case in each([NUMPY, *SOME], *CHANGED)])
def test_adapters_of_experts_are_changes_of_their_matrices(ops: Any, rng: np.random.Generator, case: list[Any]) -> None:
    """Of the first product, of the second, or of both, with a norm before and an activation between. A row in three has
    no adapter; no row has the third one, whose numbers are NaN."""
    formats, rows, changed, rank, name = case
    count, e, f = 5, 256, 256
    layer, rule = Layer(rng, formats, count, e, f, bias=True), Experts(count, 2, f, "silu", renormalize=True)
    x, gain, logits, before = (normal(rng, *shape) for shape in ((rows, e), (e,), (rows, count), (rows, e)))
    ids, scales = rng.integers(0, 2, (rows, 1)).astype(np.int32), normal(rng, rows, 1)
    scales[2::3] = 0
    shapes = [((rank, e), (2 * f, rank)), ((rank, f), (e, rank))]
    stored = [
        [[[StoredArray(normal(rng, *shape) / 8, name)] for _ in range(2 * count)] for shape in pair] for pair in shapes
    ]
    routing = PLAIN.route(logits, rule)
    wide = x / np.sqrt((x.astype(float) ** 2).mean(1, keepdims=True) + EPS) * gain
    wanted = before.astype(float)
    for row, number in np.ndindex(*routing.ids.shape):
        expert = routing.ids[row, number]
        gate_up, down = (
            np.concatenate([one.values for one in matrices[expert]]).astype(float)
            + bool(is_changed)
            * scales[row]
            * np.matmul(*(one[ids[row, 0] * count + expert][0].values for one in (b, a)))
            for matrices, (a, b), is_changed in zip((layer.gate_up, layer.down), stored, changed, strict=True)
        )
        inner = apply_activation((gate_up @ wide[row] + layer.biases[0][expert])[None], "silu")[0]
        wanted[row] += routing.weights[row, number] * (down @ inner + layer.biases[1][expert])
    for factors in itertools.chain(*stored):
        factors += [[StoredArray(np.full(factors[0][0].shape, np.nan, np.float32), name)] for _ in range(count)]
    network = layer.on(ops, norm=(gain, EPS))
    deltas = [Deltas(*(ExpertLinear(3 * count, ops.load_experts(one)) for one in pair)) for pair in stored]
    gate_up, down = (
        replace(w, deltas=added if is_changed else None)
        for w, added, is_changed in zip(network[:2], deltas, changed, strict=True)
    )
    network = network._replace(gate_up=gate_up, down=down)
    found = ops.experts(x, routing, network, before.copy(), Routing(ids, scales))
    assert np.linalg.norm(found - wanted) < (1e-3 if ops.backend == "native" else 1e-5) * np.linalg.norm(wanted)
    without = ops.experts(x, routing, network, before.copy())
    np.testing.assert_array_equal(without, ops.experts(x, routing, layer.on(ops, norm=(gain, EPS)), before.copy()))


@backends(*BEST)
def test_a_row_gives_the_same_alone_as_among_others(ops: Any, rng: np.random.Generator) -> None:
    ops = BEST[0].open(2)
    network, rule = Layer(rng, ("q4_k",) * 3, 5, 256, 256).on(ops), Experts(5, 2, 256)
    x, logits = normal(rng, 40, 256), normal(rng, 40, 5)
    together = ops.experts(x, ops.route(logits, rule), network).copy()
    for row in range(0, 40, 7):
        own = slice(row, row + 1)
        alone = ops.experts(x[own], ops.route(logits[own], rule), network)
        np.testing.assert_array_equal(alone[0], together[row])


@backends(*BEST)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_changes_no_other(ops: Any, rng: np.random.Generator, value: float) -> None:
    network, rule = Layer(rng, ("q8_0",) * 3, 4, 64, 64).on(ops), Experts(4, 2, 64)
    x, logits = normal(rng, 6, 64), normal(rng, 6, 4)
    sound = ops.experts(x, ops.route(logits, rule), network).copy()
    x[2, 5], logits[4, 1] = value, value
    actual = ops.experts(x, ops.route(logits, rule), network)
    assert not np.isfinite(actual[[2, 4]]).any()
    np.testing.assert_array_equal(actual[[0, 1, 3, 5]], sound[[0, 1, 3, 5]])


@backend_cases(
    "ops formats rows words",
    [
        *((backend, ("q8_0", "q4_0"), 32, r"different formats.*weight_type") for backend in BEST),
        (CUDA, ("q8_0", "q4_0"), 16, r"in several formats \(q4_0, q8_0\).*run it with device=cpu"),
        (CUDA, ("q8_0", "q8_0"), 8, r"matrices of 8 rows in q8_0.*run it with device=cpu"),
    ],
)
def test_experts_without_kernels_are_refused(
    ops: Any, rng: np.random.Generator, formats: Sequence[str], rows: int, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        ops.load_experts([[random_matrix(rng, name, rows, 64)] for name in formats])


# -- which products are launched -----------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, np.ndarray]]:
    """The products that compiled kernels are launched for, and for which experts: entries of `ExpertRows` with rows."""
    from polarlm.engine.backends.native.product_ops.multiplication import Multiplication, with_rows

    products: list[tuple[Any, np.ndarray]] = []

    def product(self: Multiplication, spec: Any, *rest: Any) -> Any:
        products.append((spec, with_rows(rest[-1])))
        return launch(self, spec, *rest)

    launch = Multiplication._product
    monkeypatch.setattr(Multiplication, "_product", product)
    return products


@backends(*BEST)
def test_few_rows_of_an_expert_fill_small_panels(ops: Any, launched: list[tuple[Any, np.ndarray]]) -> None:
    """Once their kernels are compiled: prompts take those for many rows meanwhile, with the same results. No other test
    needs these kernels."""
    from polarlm.engine.backends.native.kernels.linear.tiling import SINGLE, expert_tiling

    network = Layer(np.random.default_rng(4), ("q5_k",) * 3, 8, 256, 256).on(ops)

    def run(rows: int) -> np.ndarray:
        x, logits = (normal(np.random.default_rng(5), rows, size) for size in (256, 8))
        routing = ops.route(logits, Experts(8, 2, 256))
        launched.clear()
        return ops.experts(x, routing, network).copy()

    few, most = (expert_tiling(rows, ops._launch.level) for rows in (3, 100))
    assert few.rows <= most.rows or few == most
    run(400)
    assert [spec.tiling for spec, _ in launched] == [most] * 2
    early = run(12)
    assert [spec.tiling for spec, _ in launched] == [most] * 2
    library = ops._launch.library
    library.wait([*library._futures])
    np.testing.assert_array_equal(run(12), early)
    assert [spec.tiling for spec, _ in launched] == [few] * 2
    run(2)
    assert [spec.tiling for spec, _ in launched] == [SINGLE] * 2


@backends(*BEST)
@pytest.mark.parametrize("rows", [1, 6, 70])
def test_a_product_reads_an_expert_once_for_all_rows_that_chose_it(
    ops: Any, rng: np.random.Generator, rows: int, launched: list[tuple[Any, np.ndarray]]
) -> None:
    routing = ops.route(normal(rng, rows, 9), Experts(9, 3, 64))
    ops.experts(normal(rng, rows, 64), routing, Layer(rng, ("q8_0",) * 3, 9, 64, 64).on(ops))
    experts, counts = np.unique(routing.ids, return_counts=True)
    assert len(launched) == 2, "gate and up together, and down"
    for _, chosen in launched:
        rows_of = {int(expert): int(count) for expert, _, count in chosen}
        assert len(rows_of) == len(chosen)
        assert rows_of == dict(zip(experts.tolist(), counts.tolist(), strict=True))


@backends(CUDA)
@pytest.mark.parametrize("formats", [("f16", "f16", "bf16"), ("q8_0", "q8_0", "q4_0"), ("q8_0", "f16", "q8_0")])
def test_steps_and_prompts_launch_what_the_warm_up_has_launched(
    ops: Any, rng: np.random.Generator, formats: tuple[str, str, str]
) -> None:
    """Formats with a kernel each."""
    if not isinstance(ops._device, EmulatedDevice):
        pytest.skip("a real GPU does not list its launches")
    device, rule, layer = Watched(), Experts(5, 1, 32), Layer(rng, formats, 5, 64, 32)
    ops = type(ops)(device)
    device.computes = False

    def run(one: Any, rows: int) -> None:
        routing = one.route(one.to_device(np.zeros((rows, 5))), rule)
        one.experts(one.to_device(np.zeros((rows, 64))), routing, layer.on(one))

    warm_up = ops.warm_up()
    for rows in (1, *warm_up.rows):
        run(warm_up.ops, rows)
    for rows in (1, 2, 3, 8, 11, 20, 40, 50, 64, 65, 149, 5000):
        run(ops, rows)
    assert not device.unexpected() - {"repack_kernel"}
