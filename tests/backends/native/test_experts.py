"""The choice of experts, and products with them, against NumPy and against dequantized weights in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.native.kernels.linear.product import Product
from polarlm.engine.backends.native.kernels.linear.tiling import SINGLE, expert_tiling
from polarlm.engine.backends.native.launch import Launching
from polarlm.engine.backends.native.product_ops.experts import ExpertOps
from polarlm.engine.backends.native.product_ops.linear import LinearOps
from polarlm.engine.backends.native.product_ops.multiplication import Multiplication, with_rows
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Routing
from polarlm.engine.errors import EngineError
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.lang import Level
from polarlm.engine.weight_formats import ExpertLinear
from polarlm.model_loaders.config import Activation, Experts, is_gated
from tests import weights
from tests.backends.native.launching import launcher
from tests.jit.levels import SOME, every_level, some_levels
from tests.pairs import each, pairs
from tests.weights import random_matrix

PLAIN = NumpyOps(1)


@some_levels
def test_the_experts_of_a_row_are_those_of_numpy(level: Level) -> None:
    rng = np.random.default_rng(0)
    ops = ExpertOps(launcher(level))
    for count, top_k, scoring, renormalize, has_bias, has_factors in pairs(
        [3, 16, 37, 128], [1, 3], ["softmax", "sigmoid"], [False, True], [False, True], [False, True]
    ):
        rule = Experts(count, top_k, 1, scoring=scoring, renormalize=renormalize, scale=1.5)
        logits = (3 * rng.standard_normal((9, count))).astype(np.float32)
        logits[1] = 0.25  # all are equal
        logits[2, -1] = 80
        logits[3] *= 20
        bias = rng.standard_normal(count).astype(np.float32) if has_bias else None
        factors = rng.standard_normal(count).astype(np.float32) if has_factors else None
        wanted, found = PLAIN.route(logits, rule, bias, factors), ops.route(logits, rule, bias, factors)
        np.testing.assert_array_equal(found.ids, wanted.ids)
        np.testing.assert_allclose(found.weights, wanted.weights, rtol=2e-6, atol=1e-30)


@some_levels
def test_a_row_with_a_logit_that_is_not_finite_has_no_weights(level: Level) -> None:
    rule, ops = Experts(20, 3, 1, renormalize=True), ExpertOps(launcher(level))
    logits = np.random.default_rng(1).standard_normal((4, 20)).astype(np.float32)
    sound = ops.route(logits, rule)
    logits[1, 17], logits[2, 0] = np.nan, np.inf
    found = ops.route(logits, rule)
    assert np.isnan(found.weights[[1, 2]]).all()
    assert ((found.ids >= 0) & (found.ids < 20)).all()
    np.testing.assert_array_equal(found.weights[[0, 3]], sound.weights[[0, 3]])


def copied(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `experts`, with a residual of their own."""
    return {key: value.copy() if key == "residual" and value is not None else value for key, value in options.items()}


class Layer:
    """The matrices of `count` experts with sizes E and F. formats: of gate, up and down. gated: whether they have a
    gate."""

    def __init__(
        self,
        rng: np.random.Generator,
        formats: tuple[str, str, str],
        count: int,
        e: int,
        f: int,
        bias: bool,
        gated: bool = True,
    ):
        *ups, down = formats if gated else formats[1:]
        self.gate_up = [[random_matrix(rng, up, f, e) for up in ups] for _ in range(count)]
        self.down = [[random_matrix(rng, down, e, f)] for _ in range(count)]
        sizes = (len(ups) * f, e)
        self.biases = [rng.standard_normal((count, n)).astype(np.float32) if bias else None for n in sizes]

    def on(self, ops: LinearOps | NumpyOps) -> list[ExpertLinear]:
        """gate_up and down on a device."""
        return [
            ExpertLinear(len(stored), ops.load_experts(stored), bias)
            for stored, bias in zip((self.gate_up, self.down), self.biases, strict=True)
        ]


FORMATS = [
    *(("q4_k", "q4_k", "q6_k"), ("q8_0", "q4_0", "q5_0"), ("mxfp4",) * 3),
    *(("f16", "f16", "bf16"), ("f32",) * 3, ("iq2_xxs",) * 3),
]
ACTIVATIONS: list[Activation] = ["silu", "gelu_tanh", "swiglu_clamped", "relu_squared"]
# Formats with and without codes, few and many rows, with and without a bias, one or two of gate and up, a norm, a sum
AXES: list[list[Any]] = [FORMATS, [1, 5, 33], [False, True], ACTIVATIONS, [False, True], [False, True]]


def assert_those_of_numpy(level: Level, cases: list[tuple[Any, ...]]) -> None:
    """cases: of `AXES`. Sizes are no whole tiles."""
    rng = np.random.default_rng(2)
    launch = launcher(level)
    ops, matrices = ExpertOps(launch), LinearOps(launch)
    for of, rows, bias, activation, has_norm, adds in cases:
        e, f = (256, 256) if set(of) & {"q4_k", "iq2_xxs"} else (48, 24) if of[0] == "f32" else (64, 96)
        layer, count = Layer(rng, of, 7, e, f, bias, is_gated(activation)), 7
        x, residual = (rng.standard_normal((rows, e)).astype(np.float32) for _ in range(2))
        rule = Experts(count, 3, f, activation, renormalize=True)
        routing = PLAIN.route(rng.standard_normal((rows, count)).astype(np.float32), rule)
        norm = (rng.standard_normal(e).astype(np.float32), 1e-5) if has_norm else None

        options = {"norm": norm, "residual": residual if adds else None}
        wanted = PLAIN.experts(x, routing, *layer.on(PLAIN), activation, **copied(options))
        found = ops.experts(x, routing, *layer.on(matrices), activation, **copied(options))
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert error < 3e-4, (of, rows, bias, activation, has_norm, adds)


@some_levels
def test_results_are_those_of_numpy(level: Level) -> None:
    """Any two of a level, formats, rows and the rest are together somewhere: every case has kernels of its own."""
    assert_those_of_numpy(level, [case for own, *case in each(SOME, *AXES) if own == level])


@pytest.mark.slow
@every_level
def test_results_of_a_level_are_those_of_numpy(level: Level) -> None:
    """Any two of formats, rows and the rest are together at each level."""
    assert_those_of_numpy(level, pairs(*AXES))


@some_levels
def test_without_an_activation_results_are_the_products_of_both(level: Level) -> None:
    """As for adapters: few outputs of the first product, and rows with the weight 0, to which nothing is added."""
    rng = np.random.default_rng(8)
    launch = launcher(level)
    ops, matrices = ExpertOps(launch), LinearOps(launch)
    for name, rows, rank, count in pairs(["f32", "f16", "bf16"], [1, 6, 33], [8, 24, 64], [1, 3]):
        stored = [
            [[weights.StoredArray(rng.standard_normal(shape).astype(np.float32) / 8, name)] for _ in range(count)]
            for shape in ((rank, 72), (40, rank))
        ]
        stored[0].append([weights.StoredArray(np.full((rank, 72), np.nan, np.float32), name)])
        stored[1].append([weights.StoredArray(np.full((40, rank), np.nan, np.float32), name)])
        ids = rng.integers(0, count, (rows, 1)).astype(np.int32)
        scales = rng.standard_normal((rows, 1)).astype(np.float32)
        ids[rows // 2 :: 3], scales[rows // 2 :: 3] = count, 0
        x, residual = (rng.standard_normal((rows, size)).astype(np.float32) for size in (72, 40))
        wanted = residual.astype(np.float64)
        for row in np.flatnonzero(scales):
            a, b = (of[ids[row, 0]][0].values.astype(np.float64) for of in stored)
            wanted[row] += scales[row] * (b @ (a @ x[row]))
        for on, with_them in ((ops, matrices), (PLAIN, PLAIN)):
            a, b = (ExpertLinear(count + 1, with_them.load_experts(one)) for one in stored)
            into = residual.copy()
            assert on.experts(x, Routing(ids, scales), a, b, None, residual=into) is into
            becomes_words = on is ops and name != "f32" and rank == 64 and rows > 1
            np.testing.assert_allclose(into, wanted, atol=1e-3 if becomes_words else 2e-5)


def test_a_row_gives_the_same_alone_as_among_others() -> None:
    rng = np.random.default_rng(3)
    launch = launcher(best(), threads=2)
    ops = ExpertOps(launch)
    gate_up, down = Layer(rng, ("q4_k",) * 3, 5, 256, 256, False).on(LinearOps(launch))
    rule, x = Experts(5, 2, 256), rng.standard_normal((40, 256)).astype(np.float32)
    logits = rng.standard_normal((40, 5)).astype(np.float32)
    together = ops.experts(x, ops.route(logits, rule), gate_up, down, "silu").copy()
    for row in range(0, 40, 7):
        own = slice(row, row + 1)
        np.testing.assert_array_equal(
            ops.experts(x[own], ops.route(logits[own], rule), gate_up, down, "silu")[0], together[row]
        )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Product, np.ndarray]]:
    """The products that `experts` launches, and for which experts: entries of `ExpertRows` that have rows."""
    found = []

    def product(self: Multiplication, spec: Product, *rest: Any) -> Launching:
        found.append((spec, with_rows(rest[-1])))
        return launch(self, spec, *rest)

    launch = Multiplication._product
    monkeypatch.setattr(Multiplication, "_product", product)
    return found


def test_few_rows_of_an_expert_fill_small_panels(asked: list[tuple[Product, np.ndarray]]) -> None:
    """Once their kernels are compiled: prompts take those for many rows meanwhile, with the same results. No other test
    needs these kernels."""
    rng = np.random.default_rng(4)
    launch = launcher(best())
    ops, matrices = ExpertOps(launch), Layer(rng, ("q5_k",) * 3, 8, 256, 256, False).on(LinearOps(launch))

    def run(rows: int) -> np.ndarray:
        x, logits = (np.random.default_rng(5).standard_normal((rows, size)).astype(np.float32) for size in (256, 8))
        routing = ops.route(logits, Experts(8, 2, 256))
        asked.clear()
        return ops.experts(x, routing, *matrices, "silu").copy()

    few, most = expert_tiling(3, best()), expert_tiling(100, best())
    assert few.rows <= most.rows or few == most
    run(400)
    assert [spec.tiling for spec, _ in asked] == [most] * 2
    early = run(12)
    assert [spec.tiling for spec, _ in asked] == [most] * 2
    with launch.graph():
        late = run(12)
    assert [spec.tiling for spec, _ in asked] == [few] * 2
    np.testing.assert_array_equal(early, late)
    np.testing.assert_array_equal(run(12), late)
    assert [spec.tiling for spec, _ in asked] == [few] * 2
    run(2)
    assert [spec.tiling for spec, _ in asked] == [SINGLE] * 2


@pytest.mark.parametrize("rows", [1, 6, 70])
def test_a_product_reads_an_expert_once_for_all_rows_that_chose_it(
    rows: int, asked: list[tuple[Product, np.ndarray]]
) -> None:
    rng = np.random.default_rng(7)
    launch = launcher(best())
    ops, matrices = ExpertOps(launch), Layer(rng, ("q8_0",) * 3, 9, 64, 64, False).on(LinearOps(launch))
    routing = ops.route(rng.standard_normal((rows, 9)).astype(np.float32), Experts(9, 3, 64))
    ops.experts(rng.standard_normal((rows, 64)).astype(np.float32), routing, *matrices, "silu")
    experts, counts = np.unique(routing.ids, return_counts=True)
    assert len(asked) == 2, "gate and up together, and down"
    for _, chosen in asked:
        found = {int(expert): int(count) for expert, _, count in chosen}
        assert len(found) == len(chosen)
        assert found == dict(zip(experts.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_changes_no_other(value: float) -> None:
    rng = np.random.default_rng(4)
    launch = launcher(best())
    ops = ExpertOps(launch)
    gate_up, down = Layer(rng, ("q8_0",) * 3, 4, 64, 64, False).on(LinearOps(launch))
    rule, x = Experts(4, 2, 64), rng.standard_normal((6, 64)).astype(np.float32)
    logits = rng.standard_normal((6, 4)).astype(np.float32)
    sound = ops.experts(x, ops.route(logits, rule), gate_up, down, "silu").copy()
    x[2, 5], logits[4, 1] = value, value
    found = ops.experts(x, ops.route(logits, rule), gate_up, down, "silu")
    assert not np.isfinite(found[[2, 4]]).any()
    np.testing.assert_array_equal(found[[0, 1, 3, 5]], sound[[0, 1, 3, 5]])


def test_experts_in_different_formats_are_refused() -> None:
    rng = np.random.default_rng(6)
    with pytest.raises(EngineError, match=r"different formats.*weight_type"):
        LinearOps(launcher(best())).load_experts([[random_matrix(rng, name, 32, 64)] for name in ("q8_0", "q4_0")])
