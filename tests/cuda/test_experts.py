"""Layers of experts on the emulated device, against the NumPy ops with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops, Routing
from polarlm.engine.errors import EngineError
from polarlm.engine.weight_formats import ExpertLinear, Matrix, get
from polarlm.model_loaders.config import Experts, is_gated
from tests.cuda.emulated import open_device
from tests.cuda.formats import EPS32, STEP
from tests.cuda.test_warm_up import Watched
from tests.pairs import each, mostly_slow
from tests.weights import StoredArray, StoredBytes, random_matrix

HOST = NumpyOps()
EPS = 1e-5


@pytest.fixture
def ops() -> CudaOps:
    return CudaOps(open_device())


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


# -- the choice --------------------------------------------------------------------------------------------------

RULES = [
    Experts(8, 2, 16),
    Experts(33, 8, 16, scoring="sigmoid", scale=2.5, renormalize=True),
    Experts(256, 4, 16, renormalize=True),
    Experts(40, 33, 16, scoring="sigmoid"),
    Experts(1, 1, 16),
]


def routed(
    ops: CudaOps, logits: np.ndarray, rule: Experts, bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """ids and weights, on the host."""
    routing = ops.route(ops.to_device(logits), rule, None if bias is None else ops.to_device(bias))
    return ops._device.to_host(routing.ids), ops._device.to_host(routing.weights)


def test_factors_multiply_the_weights_of_experts(ops: CudaOps, rng: np.random.Generator) -> None:
    logits, factors = normal(rng, 3, 8), normal(rng, 8)
    rule = Experts(8, 3, 16, renormalize=True, scale=2.0)
    routing = ops.route(ops.to_device(logits), rule, factors=ops.to_device(factors))
    wanted = HOST.route(logits, rule)
    np.testing.assert_allclose(ops.to_host(routing.weights), wanted.weights * factors[wanted.ids], rtol=64 * EPS32)


@pytest.mark.parametrize("rule", RULES)
def test_route_is_that_of_numpy(ops: CudaOps, rng: np.random.Generator, rule: Experts) -> None:
    """A bias changes which scores are chosen, and not their weights."""
    logits = 3 * normal(rng, 6, rule.count)
    for bias in (None, normal(rng, rule.count)):
        ids, weights = routed(ops, logits, rule, bias)
        wanted = HOST.route(logits, rule, bias)
        np.testing.assert_array_equal(ids, wanted.ids)
        np.testing.assert_allclose(weights, wanted.weights, rtol=64 * EPS32)


def test_of_equal_scores_the_lowest_number_is_chosen(ops: CudaOps) -> None:
    logits = np.zeros((2, 70), np.float32)
    logits[1, [69, 5, 37]] = 1
    ids, weights = routed(ops, logits, Experts(70, 4, 16, renormalize=True))
    assert ids.tolist() == [[0, 1, 2, 3], [5, 37, 69, 0]]
    np.testing.assert_array_equal(weights[0], np.float32(0.25))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_row_whose_logits_are_not_finite_has_nan_for_weights(
    ops: CudaOps, rng: np.random.Generator, scoring: str
) -> None:
    """Its experts exist, so that what follows reads no other memory; other rows have their weights."""
    logits = normal(rng, 4, 40)
    logits[0, 39], logits[1, 3], logits[2, 7] = np.nan, np.inf, -np.inf
    rule = Experts(40, 4, 16, scoring=scoring)  # type: ignore[arg-type]
    ids, weights = routed(ops, logits, rule)
    assert np.isnan(weights[:3]).all()
    assert all(sorted(set(row)) == sorted(row) and min(row) >= 0 and max(row) < 40 for row in ids.tolist())
    wanted = HOST.route(logits[3:], rule)
    np.testing.assert_array_equal(ids[3:], wanted.ids)


# -- their results -----------------------------------------------------------------------------------------------

COUNT, E, F = 5, 64, 32


def stored_experts(rng: np.random.Generator, formats: Sequence[str], rows: int, width: int) -> list[list[StoredBytes]]:
    """For each expert a matrix (rows, width) of each format."""
    return [[random_matrix(rng, name, rows, width) for name in formats] for _ in range(COUNT)]


def both(
    ops: CudaOps, rng: np.random.Generator, stored: list[list[StoredBytes]], biased: bool
) -> tuple[ExpertLinear, ExpertLinear]:
    """The same experts on the device and on the host, there in float32 as the device has them."""
    parts = ops.load_experts(stored)
    values = np.concatenate([matrix.values for expert in stored for matrix in expert])
    if stored[0][0].format.name == "f32":
        values = values.astype(np.float16).astype(np.float32)
    bias = normal(rng, COUNT, len(values) // COUNT) if biased else None
    on_host = ExpertLinear(COUNT, (Matrix(get("f32"), values, values.shape),), bias)
    return ExpertLinear(COUNT, parts, None if bias is None else ops.to_device(bias)), on_host


# Formats of gate, up and down. With two formats, or whole tiles that are not pairs, an activation follows the product.
FORMATS = [
    ("f16", "f16", "bf16"),
    ("f32", "f32", "f32"),
    ("q8_0", "q8_0", "q4_0"),
    ("mxfp4", "mxfp4", "mxfp4"),
    ("q8_0", "f16", "f16"),
]


LAYERS = [  # rows, normed, biased, added, activation
    (1, True, False, True, "silu"),
    (2, True, True, True, "swiglu_clamped"),
    (7, False, True, False, "gelu_tanh"),
    (70, True, True, True, "swiglu_clamped"),
    (66, False, False, False, "silu"),
    (2, True, False, True, "relu_squared"),
    (70, False, True, False, "relu_squared"),
]


@mostly_slow("formats, layer", product(FORMATS, LAYERS), each(FORMATS, LAYERS[:5]))
def test_experts_are_those_of_numpy(rng: np.random.Generator, formats: tuple[str, str, str], layer: Any) -> None:
    """Steps, prompts, and batches of few rows; one of the experts is chosen by no row. Formats and rows decide together
    which kernels multiply."""
    rows, normed, biased, added, activation = layer
    ops = CudaOps(open_device(checked=rows < 60))
    gate_up, host_gate_up = both(ops, rng, stored_experts(rng, formats[:2], F, E), biased)
    down, host_down = both(ops, rng, stored_experts(rng, formats[2:], E, F if is_gated(activation) else 2 * F), biased)
    x, before, gain = normal(rng, rows, E), normal(rng, rows, E), normal(rng, E)
    logits = normal(rng, rows, COUNT)
    logits[:, 3] = -100
    rule = Experts(COUNT, 2, F)
    into = ops.to_device(before) if added else None
    y = ops.experts(
        ops.to_device(x),
        ops.route(ops.to_device(logits), rule),
        gate_up,
        down,
        activation,
        norm=(ops.to_device(gain), EPS) if normed else None,
        residual=into,
    )
    assert (y is into) == added
    norm = (gain, EPS) if normed else None
    wanted = HOST.experts(x, HOST.route(logits, rule), host_gate_up, host_down, activation, norm=norm)
    # Inputs of both products are rounded to half precision.
    allowed = 4 * STEP["__half"] * np.abs(wanted).max()
    assert np.abs(ops.to_host(y) - (wanted + before if added else wanted)).max() <= allowed


@pytest.mark.parametrize(
    ("rows", "rank", "count", "name"),
    [(1, 8, 1, "f16"), (2, 24, 3, "f32"), (7, 16, 2, "bf16"), (70, 64, 1, "f16")],
)
def test_without_an_activation_results_are_the_products_of_both(
    rng: np.random.Generator, name: str, rows: int, rank: int, count: int
) -> None:
    """As for adapters: few outputs of the first product, and rows with the weight 0, to which nothing is added."""
    ops, out = CudaOps(open_device(checked=rows < 60)), 48
    stored = [
        [[StoredArray(normal(rng, *shape) / 8, name)] for _ in range(count)] for shape in ((rank, E), (out, rank))
    ]
    for one, shape in zip(stored, ((rank, E), (out, rank)), strict=True):
        one.append([StoredArray(np.full(shape, np.nan, np.float32), name)])
    ids = rng.integers(0, count, (rows, 1)).astype(np.int32)
    scales = normal(rng, rows, 1)
    ids[rows // 2 :: 3], scales[rows // 2 :: 3] = count, 0
    x, before = normal(rng, rows, E), normal(rng, rows, out)
    wanted = before.astype(np.float64)
    for row in np.flatnonzero(scales):
        a, b = (of[ids[row, 0]][0].values.astype(np.float64) for of in stored)
        wanted[row] += scales[row] * (b @ (a @ x[row]))
    into, routing = ops.to_device(before), Routing(ops.to_device(ids), ops.to_device(scales))
    a, b = (ExpertLinear(count + 1, ops.load_experts(one)) for one in stored)
    ops.experts(ops.to_device(x), routing, a, b, None, residual=into)
    kind = "__nv_bfloat16" if name == "bf16" else "__half"  # x and the first product are rounded to it
    assert np.abs(ops.to_host(into) - wanted).max() <= 4 * STEP[kind] * np.abs(wanted - before).max() + 1e-6


def test_experts_that_are_not_whole_tiles_are_refused(ops: CudaOps, rng: np.random.Generator) -> None:
    with pytest.raises(EngineError, match=r"matrices of 8 rows in q8_0.*run it with device=cpu"):
        ops.load_experts(stored_experts(rng, ("q8_0",), 8, E))


def test_experts_in_several_formats_are_refused(ops: CudaOps, rng: np.random.Generator) -> None:
    stored = stored_experts(rng, ("q8_0",), 16, E)
    stored[2] = stored_experts(rng, ("q4_0",), 16, E)[2]
    with pytest.raises(EngineError, match=r"in several formats \(q4_0, q8_0\).*run it with device=cpu"):
        ops.load_experts(stored)


# -- a layer -----------------------------------------------------------------------------------------------------


# Formats with a kernel each.
@pytest.mark.parametrize("formats", [("f16", "f16", "bf16"), ("q8_0", "q8_0", "q4_0"), ("q8_0", "f16", "q8_0")])
def test_steps_and_prompts_launch_what_the_warm_up_has_launched(
    rng: np.random.Generator, formats: tuple[str, str, str]
) -> None:
    device, rule = Watched(), Experts(COUNT, 1, F)
    ops = CudaOps(device)
    gate_up, down = stored_experts(rng, formats[:2], F, E), stored_experts(rng, formats[2:], E, F)
    device.computes = False

    def run(ops: Ops, rows: int) -> None:
        routing = ops.route(ops.to_device(np.zeros((rows, COUNT))), rule)
        of = (ExpertLinear(COUNT, ops.load_experts(stored)) for stored in (gate_up, down))
        ops.experts(ops.to_device(np.zeros((rows, E))), routing, *of, "silu")

    warm_up = ops.warm_up()
    for rows in (1, *warm_up.rows):
        run(warm_up.ops, rows)
    for rows in (1, 2, 3, 8, 11, 20, 40, 50, 64, 65, 149, 5000):
        run(ops, rows)
    assert not device.unexpected() - {"repack_kernel"}
