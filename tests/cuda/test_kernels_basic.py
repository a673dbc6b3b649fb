"""The small kernels, run by the emulator with every check on, against the NumPy ops in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device.kernel_source import source
from polarlm.engine.backends.numpy.activations import ACTIVATIONS
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.numpy.rows import rms_norm, rotate
from polarlm.engine.codecs.parts.rotation import dense, signed_hadamard, twice_signed_hadamard
from polarlm.model_loaders.config import is_gated
from tests.cuda.formats import FORMATS, assert_as_exact_as_numpy, poisoned, read, store
from tests.cuda.programs import Program
from tests.pairs import each, pairs
from tests.weights import linear, matrix

OPS = NumpyOps()
SEEDS = [0, 1, 2]

# (activations, weights)
TYPES = [("float", "float"), ("float", "__half"), ("float", "__nv_bfloat16"), ("__half", "__half")]
EPS = 1e-5


@cache
def program(kernel: str, **defines: Any) -> Program:
    return Program(source(kernel, **defines))


def both(op: Callable[..., np.ndarray], *inputs: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """`op` of float32 inputs in float64 and in float32."""
    return op(*(x if x is None else x.astype(np.float64) for x in inputs)), op(*inputs)


def i32(value: int) -> np.int32:
    return np.int32(value)


@pytest.mark.parametrize(
    ("act", "activation"), each(["float", "__half", "__nv_bfloat16"], list(filter(is_gated, ACTIVATIONS)))
)
def test_activate_mul_is_that_of_numpy(rng: np.random.Generator, act: str, activation: str) -> None:
    tokens, f = 3, 1032
    gate_up = rng.standard_normal((tokens, 2 * f)) * 4
    gate_up[0, :6] = [-100, -88, 80, 0, -8, 8]  # e^100 overflows
    gate_up = store(gate_up, act)
    exact, plain = both(ACTIVATIONS[activation], read(gate_up, act))
    for seed in SEEDS:
        y = poisoned((tokens, f), act)
        run = program("activate_mul", ACT=act, ACTIVATION=activation)
        run.launch("activate_mul_kernel", (3, tokens), (64,), y, gate_up, i32(f), seed=seed)
        assert_as_exact_as_numpy(y, exact, plain, act)


@pytest.mark.parametrize(("act", "weight"), TYPES)
def test_embed_is_that_of_numpy(rng: np.random.Generator, act: str, weight: str) -> None:
    table = store(rng.standard_normal((11, 72)), weight)
    ids = np.array([10, 0, 3, 3], np.int32)
    for seed, scale in zip(SEEDS, (1.0, 2.5, 8.0), strict=True):
        expected = store(OPS.embed(matrix(read(table, weight)), ids, scale), act)
        x = poisoned((4, 72), act)
        args = x, table.view(np.uint8), ids, i32(72), np.float32(scale)
        program("embed", ACT=act, WEIGHT=FORMATS[weight]).launch("embed_kernel", (4,), (32,), *args, seed=seed)
        np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize(("add", "rows", "n"), [(0, 1, 1032), (1, 3, 264), (0, 3, 264), (1, 2, 8)])
def test_rms_norm_is_that_of_numpy(rng: np.random.Generator, add: int, rows: int, n: int) -> None:
    """Of columns of wider rows, in place, or added to other rows."""
    x = rng.standard_normal((rows, n + 16)).astype(np.float32)
    norm = store(rng.standard_normal(n), "float")
    y = rng.standard_normal((rows, n)).astype(np.float32)

    def op(x: np.ndarray, norm: np.ndarray, y: np.ndarray) -> np.ndarray:
        normed = rms_norm(x, norm, EPS)
        return y + normed if add else normed

    exact, plain = both(op, np.ascontiguousarray(x[:, 8:-8]), norm, y)
    for seed in SEEDS:
        given, target = x.copy(), y.copy()
        to, stride = (target, n) if add else (given[:, 8:-8], n + 16)
        args = to, given[:, 8:-8], norm, i32(n), np.int64(stride), np.int64(n + 16), np.float32(EPS)
        program("rms_norm", ACT="float", ADD=add).launch("rms_norm_kernel", (rows,), (64,), *args, seed=seed)
        assert_as_exact_as_numpy(np.ascontiguousarray(to), exact, plain, "float")
        np.testing.assert_array_equal(given[:, :8], x[:, :8])
        np.testing.assert_array_equal(given[:, -8:], x[:, -8:])


def hadamard_signs(rotation: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Order of the blocks, signs before and signs behind them, (D,) float32 each; the first row and column of a
    Hadamard matrix are 1."""
    dim = len(rotation)
    order = dim & -dim
    firsts = np.arange(dim) // order * order
    before = np.sign(rotation[np.arange(dim), firsts])
    behind = np.sign(rotation[firsts, np.arange(dim)]) * before[firsts]
    return order, before, behind


ROTATED = [
    (64, signed_hadamard, False),
    (128, twice_signed_hadamard, True),
    (80, signed_hadamard, True),
    (96, twice_signed_hadamard, False),
]


@pytest.mark.parametrize(
    ("dim", "matrix", "backwards", "act"), [(*rotated, act) for rotated, act in each(ROTATED, ["float", "__half"])]
)
def test_rotate_is_the_product_with_the_matrix(
    rng: np.random.Generator, dim: int, matrix: Callable, backwards: bool, act: str
) -> None:
    vectors = 9
    order, before, behind = hadamard_signs(matrix(dim))
    rotation = matrix(dim).T if backwards else matrix(dim)
    signs = (behind, before) if backwards else (before, behind)
    x = store(rng.standard_normal((vectors, dim)), act)
    exact, plain = both(rotate, read(x, act), rotation)
    run = program("rotate", ACT=act, D=dim, ORDER=order, VECTORS=4)
    for seed in SEEDS:
        y = poisoned((vectors, dim), act)
        run.launch("rotate_kernel", (5,), (64,), y, x, *signs, i32(vectors), seed=seed)
        assert_as_exact_as_numpy(y, exact, plain, act)
        y = poisoned((vectors, dim), act)
        dense_args = y, x, np.ascontiguousarray(rotation), i32(vectors)
        run.launch("rotate_dense_kernel", (3,), (96,), *dense_args, seed=seed)
        assert_as_exact_as_numpy(y, exact, plain, act)


def test_rotate_dense_takes_any_matrix(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 64)).astype(np.float32)
    exact, plain = both(rotate, x, dense(64))
    y = np.full_like(x, np.nan)
    run = program("rotate", ACT="float", D=64, ORDER=64, VECTORS=4)
    run.launch("rotate_dense_kernel", (2,), (64,), y, x, dense(64), i32(5))
    assert_as_exact_as_numpy(y, exact, plain, "float")


@pytest.mark.parametrize(
    ("normed", "act", "weight", "rows", "n", "out"),
    [(normed, *types, *shape) for normed, types, shape in pairs([0, 1], TYPES, [(1, 576, 13), (3, 264, 9), (2, 8, 1)])],
)
def test_gemv_equals_the_product(
    rng: np.random.Generator, act: str, weight: str, normed: int, rows: int, n: int, out: int
) -> None:
    x = store(rng.standard_normal((rows, n)), act)
    w = store(rng.standard_normal((out, n)), weight)
    bias = store(rng.standard_normal(out), "float") if rows > 1 else None
    norm = store(rng.standard_normal(n), "float")

    def op(x: np.ndarray, w: np.ndarray, norm: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        x = rms_norm(x, norm, EPS) if normed else x
        if x.dtype == np.float32 and weight != "__nv_bfloat16":  # as the kernel rounds it
            x = x.astype(np.float16).astype(np.float32)
        return OPS.linear(x, linear(w, bias))

    values = read(x, act), read(w, weight), norm, bias
    exact, plain = both(op, *values)
    run = program("gemv", ACT=act, WEIGHT=FORMATS[weight], ROWS=3, OUTPUTS=4, NORMED=normed)
    for seed in SEEDS:
        y = poisoned((rows, out), act)
        args = (y, x, w.view(np.uint8), bias, norm, i32(rows), i32(n), i32(out), np.int64(out), np.float32(EPS))
        run.launch("gemv_kernel", (2,), (64,), *args, seed=seed)
        assert_as_exact_as_numpy(y, exact, plain, act)
