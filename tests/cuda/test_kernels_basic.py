"""The small kernels, run by the emulator with every check on, against the NumPy ops in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from engine.backends.kernels import source
from engine.backends.numpy_ops import NumpyOps
from engine.codecs._rotation import dense, signed_hadamard, twice_signed_hadamard
from tests.cuda.formats import assert_as_exact_as_numpy, poisoned, read, store
from tests.cuda_emulator import Program

OPS = NumpyOps()
SEEDS = [0, 1, 2]

# (activations, weights)
TYPES = [("float", "__half"), ("float", "__nv_bfloat16"), ("__half", "__half")]
EPS = 1e-5


@cache
def program(kernel: str, **defines: Any) -> Program:
    return Program(source(kernel, **defines))


def both(op: Callable[..., np.ndarray], *inputs: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """`op` of float32 inputs in float64 and in float32."""
    return op(*(x if x is None else x.astype(np.float64) for x in inputs)), op(*inputs)


def i32(value: int) -> np.int32:
    return np.int32(value)


@pytest.mark.parametrize(("act", "weight"), TYPES)
@pytest.mark.parametrize(("tokens", "heads", "n", "threads"), [(3, 1, 576, 96), (2, 3, 80, 32), (1, 1, 8, 32)])
def test_rms_norm(
    rng: np.random.Generator, act: str, weight: str, tokens: int, heads: int, n: int, threads: int
) -> None:
    x = store(3 * rng.standard_normal((tokens, heads + 1, n)), act)  # the row stride is longer than the rows
    w = store(rng.standard_normal(n), weight)
    exact, plain = both(lambda a, b: OPS.rms_norm(a, b, EPS), read(x, act)[:, :heads], read(w, weight))
    for seed in SEEDS:
        y = poisoned((tokens, heads, n), act)
        strides = np.int64(heads * n), np.int64((heads + 1) * n)
        args = (y, x, w, i32(n), i32(heads), *strides, np.float32(EPS))
        program("rms_norm", ACT=act, WEIGHT=weight).launch(
            "rms_norm_kernel", (tokens * heads,), (threads,), *args, seed=seed
        )
        assert_as_exact_as_numpy(y, exact, plain, act)


def test_rms_norm_in_place(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 72)).astype(np.float32)
    w = store(rng.standard_normal(72), "__half")
    exact, plain = both(lambda a, b: OPS.rms_norm(a, b, EPS), x.copy(), read(w, "__half"))
    args = (x, x, w, i32(72), i32(1), np.int64(72), np.int64(72), np.float32(EPS))
    program("rms_norm", ACT="float", WEIGHT="__half").launch("rms_norm_kernel", (2,), (64,), *args)
    assert_as_exact_as_numpy(x, exact, plain, "float")


@pytest.mark.parametrize("act", ["float", "__nv_bfloat16"])
@pytest.mark.parametrize("balanced", [False, True])
def test_rope(rng: np.random.Generator, act: str, balanced: bool) -> None:
    tokens, heads, dim = 3, 5, 24
    x = store(rng.standard_normal((tokens, heads + 2, dim)), act)
    angles = rng.uniform(0, 100, (tokens, dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    half_scale = rng.uniform(0.5, 2, (heads, dim // 2)).astype(np.float32)
    scale = np.concatenate([half_scale, half_scale], axis=1) if balanced else None

    def op(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
        x = x.copy()
        OPS.rope(x, cos, sin)
        return OPS.rotate(x, None, scale)

    exact, plain = both(op, read(x, act)[:, :heads], cos, sin, scale)
    for seed in SEEDS:
        turned = x.copy()
        args = (turned, cos, sin, scale, i32(heads), np.int64((heads + 2) * dim))
        program("rope", ACT=act, D=dim).launch("rope_kernel", (tokens,), (32,), *args, seed=seed)
        assert_as_exact_as_numpy(np.ascontiguousarray(turned[:, :heads]), exact, plain, act)
        np.testing.assert_array_equal(turned[:, heads:], x[:, heads:])


@pytest.mark.parametrize("act", ["float", "__half", "__nv_bfloat16"])
def test_silu_mul(rng: np.random.Generator, act: str) -> None:
    tokens, f = 3, 1032
    gate_up = rng.standard_normal((tokens, 2 * f)) * 4
    gate_up[0, :4] = [-100, -88, 80, 0]  # e^100 overflows
    gate_up = store(gate_up, act)
    exact, plain = both(OPS.silu_mul, read(gate_up, act))
    for seed in SEEDS:
        y = poisoned((tokens, f), act)
        program("silu_mul", ACT=act).launch("silu_mul_kernel", (3, tokens), (64,), y, gate_up, i32(f), seed=seed)
        assert_as_exact_as_numpy(y, exact, plain, act)


@pytest.mark.parametrize(("act", "weight"), TYPES)
def test_embed(rng: np.random.Generator, act: str, weight: str) -> None:
    table = store(rng.standard_normal((11, 72)), weight)
    ids = np.array([10, 0, 3, 3], np.int32)
    expected = store(OPS.embed(read(table, weight), ids.tolist()), act)
    for seed in SEEDS:
        x = poisoned((4, 72), act)
        program("embed", ACT=act, WEIGHT=weight).launch("embed_kernel", (4,), (32,), x, table, ids, i32(72), seed=seed)
        np.testing.assert_array_equal(x, expected)


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


@pytest.mark.parametrize(("dim", "matrix", "backwards"), ROTATED)
@pytest.mark.parametrize("act", ["float", "__half"])
def test_rotate(rng: np.random.Generator, dim: int, matrix: Callable, backwards: bool, act: str) -> None:
    tokens, heads = 3, 3
    order, before, behind = hadamard_signs(matrix(dim))
    rotation = matrix(dim).T if backwards else matrix(dim)
    signs = (behind, before) if backwards else (before, behind)
    x = store(rng.standard_normal((tokens, heads + 1, dim)), act)
    scale = None if backwards else rng.uniform(0.5, 2, (heads, dim)).astype(np.float32)
    exact, plain = both(OPS.rotate, read(x, act)[:, :heads], rotation, scale)
    for seed in SEEDS:
        y = poisoned((tokens, heads, dim), act)
        args = (y, x, scale, *signs, i32(tokens * heads), i32(heads), np.int64((heads + 1) * dim))
        run = program("rotate", ACT=act, D=dim, ORDER=order)
        run.launch("rotate_kernel", (5,), (64,), *args, seed=seed)
        assert_as_exact_as_numpy(y, exact, plain, act)
        y = poisoned((tokens, heads, dim), act)
        args = (y, x, scale, np.ascontiguousarray(rotation), *args[5:])
        run.launch("rotate_dense_kernel", (3,), (96,), *args, seed=seed)
        assert_as_exact_as_numpy(y, exact, plain, act)


def test_rotate_with_a_dense_matrix(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 1, 64)).astype(np.float32)
    exact, plain = both(OPS.rotate, x, dense(64))
    y = np.full_like(x, np.nan)
    args = (y, x, None, dense(64), i32(5), i32(1), np.int64(64))
    program("rotate", ACT="float", D=64, ORDER=64).launch("rotate_dense_kernel", (2,), (64,), *args)
    assert_as_exact_as_numpy(y, exact, plain, "float")


@pytest.mark.parametrize("normed", [0, 1])
@pytest.mark.parametrize(("act", "weight"), TYPES)
@pytest.mark.parametrize(("rows", "n", "out"), [(1, 576, 13), (3, 264, 9), (2, 8, 1)])
def test_gemv(rng: np.random.Generator, act: str, weight: str, normed: int, rows: int, n: int, out: int) -> None:
    x = store(rng.standard_normal((rows, n)), act)
    w = store(rng.standard_normal((out, n)), weight)
    bias = store(rng.standard_normal(out), weight) if rows > 1 else None
    norm = store(rng.standard_normal(n), weight)

    def op(x: np.ndarray, w: np.ndarray, norm: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        return OPS.linear(OPS.rms_norm(x, norm, EPS) if normed else x, w, bias)

    values = read(x, act), read(w, weight), read(norm, weight), None if bias is None else read(bias, weight)
    exact, plain = both(op, *values)
    run = program("gemv", ACT=act, WEIGHT=weight, ROWS=3, OUTPUTS=4, NORMED=normed)
    for seed in SEEDS:
        y = poisoned((rows, out), act)
        args = (y, x, w, bias, norm, i32(rows), i32(n), i32(out), np.float32(EPS))
        run.launch("gemv_kernel", (2,), (64,), *args, seed=seed)
        assert_as_exact_as_numpy(y, exact, plain, act)


@pytest.mark.parametrize(("act", "kept"), [("float", "float"), ("__half", "__half"), ("float", "__half")])
def test_append_kv(rng: np.random.Generator, act: str, kept: str) -> None:
    """Two sequences in a step, each into a slot of its own: (slots, K, N, D)."""
    kv_heads, block, dim = 3, 4, 24
    qk = store(rng.standard_normal((2, 2 + kv_heads, dim)), act)
    k, v = qk[:, 2:], store(rng.standard_normal((2, kv_heads, dim)), act)
    slots, places = [4, 1], [3, 0]
    expected_k, expected_v = (poisoned((5, kv_heads, block, dim), kept) for _ in range(2))
    for token, (slot, place) in enumerate(zip(slots, places, strict=True)):
        expected_k[slot, :, place] = store(read(k[token], act), kept)
        expected_v[slot, :, place] = store(read(v[token], act), kept)
    offsets = np.array([slot * kv_heads * block * dim + place * dim for slot, place in zip(slots, places, strict=True)])
    for seed in SEEDS:
        now_k, now_v = (poisoned((5, kv_heads, block, dim), kept) for _ in range(2))
        strides = (np.int64(qk[0].size), np.int64(v[0].size), np.int64(block * dim))
        args = (now_k, now_v, k, v, offsets, i32(kv_heads), *strides)
        program("append_kv", ACT=act, STORE=kept, D=dim).launch("append_kv_kernel", (2,), (32,), *args, seed=seed)
        np.testing.assert_array_equal(now_k, expected_k)
        np.testing.assert_array_equal(now_v, expected_v)
