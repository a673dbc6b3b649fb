"""The products of few rows, run by the emulator with every check on, against NumPy in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device.kernel_source import source
from tests.cuda.formats import EPS32, FORMATS, STEP, poisoned, read, store
from tests.cuda.programs import Program
from tests.pairs import each

EPS = 1e-5
SEEDS = [0, 1, 2]

# x, weight, bias, norm, what is in y already
Case = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None, np.ndarray | None]


@cache
def program(kernel: str = "gemm_small", **defines: Any) -> Program:
    shared = {"SHARED": shared_bytes(defines["ROWS"], defines["WARPS_OUT"])} if kernel == "gemm_small" else {}
    return Program(source(kernel, **defines, **shared))


def shared_bytes(rows: int, warps_out: int) -> int:
    """Dynamic shared memory for ROWS and WARPS_OUT."""
    return launch_configs.gemm_tile(rows, 8 // warps_out, 0)[1]


def sizes(rows: int, n: int, out: int) -> tuple[Any, ...]:
    """The numbers that a product is launched with, y (rows, out) contiguous."""
    return np.int32(rows), np.int32(n), np.int32(out), np.int64(out)


def made(rng: np.random.Generator, act: str, weight: str, shape: tuple[int, int, int], normed: int, more: bool) -> Case:
    """Arrays of the kernel's types; bias and y if there is `more`."""
    rows, n, out = shape
    x = store(rng.standard_normal((rows, n)) * rng.uniform(0.1, 10, (rows, 1)), act)
    w = store(rng.standard_normal((out, n)) / np.sqrt(n), weight)
    if weight == "float":  # numbers that half precision holds, in which tensor cores multiply them
        w = read(store(w, "__half"), "__half")
    bias = store(rng.standard_normal(out), "float") if more else None
    before = rng.standard_normal((rows, out)).astype(np.float32) if more else None
    return x, w, bias, store(rng.uniform(0.5, 2, n), "float") if normed else None, before


def exact_and_allowed(case: Case, act: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and how far float sums may be from it. x is rounded to half precision, unless the weights
    are bfloat16.

    Each of n additions rounds a sum of about the root of the summed squares r, and the errors go either way: √n · r
    units. Four times that, because tensor cores cut off instead. With a norm, x that is nearly between two halves may
    become either: the rounding of each counts once more.
    """
    x, w, bias, norm, before = case
    values, weights = read(x, act).astype(np.float64), read(w, kind).astype(np.float64)
    rounded = "float" if kind == "__nv_bfloat16" else "__half"
    if norm is not None:
        values = values / np.sqrt((values**2).mean(axis=1, keepdims=True) + EPS) * norm
    values = read(store(values.astype(np.float32), rounded), rounded).astype(np.float64)
    exact = values @ weights.T
    allowed = 4 * EPS32 * np.sqrt(values.shape[1]) * np.sqrt(values**2 @ weights.T**2)
    if norm is not None:
        allowed += STEP[rounded] * np.sqrt(values**2 @ weights.T**2)
    if bias is not None:
        exact += bias
    if before is not None:
        exact += before
    return exact, allowed + 4 * EPS32 * np.abs(exact)


CASES = [
    # weights, ROWS, WARPS_OUT, (rows, in, out), with a bias and added to what is in y
    ("__half", 16, 1, (9, 1032, 40), True),
    ("__nv_bfloat16", 16, 2, (16, 136, 65), False),
    ("__half", 24, 2, (17, 520, 64), True),
    ("__half", 64, 4, (64, 136, 128), True),
    ("__nv_bfloat16", 64, 8, (50, 328, 260), True),
    ("float", 8, 1, (7, 520, 35), True),
]
PRODUCT = {"__half": "__half", "__nv_bfloat16": "__nv_bfloat16", "float": "__half"}  # of weights: the type of x


@pytest.mark.parametrize(("weight", "most", "warps_out", "shape", "more"), CASES)
def test_gemm_small_equals_the_product(
    rng: np.random.Generator, weight: str, most: int, warps_out: int, shape: tuple[int, int, int], more: bool
) -> None:
    rows, n, out = shape
    act = PRODUCT[weight]
    case = made(rng, act, weight, shape, 0, more)
    x, w, bias, _, before = case
    exact, allowed = exact_and_allowed(case, act, weight)
    run = program(ACT=act, WEIGHT=FORMATS[weight], ROWS=most, WARPS_OUT=warps_out, ADD=int(more))
    for seed in SEEDS[: 1 if n > 1000 else None]:
        y = poisoned((rows, out), "float") if before is None else before.copy()
        args = (y, x, w.view(np.uint8), bias, *sizes(rows, n, out))
        grid = (-(-out // (32 * warps_out)), 1)
        run.launch("gemm_small_kernel", grid, (256,), *args, shared=shared_bytes(most, warps_out), seed=seed)
        worst = np.abs(y - exact) - allowed
        assert (worst <= 0).all(), f"{(~(worst <= 0)).sum()} of {worst.size} are off, by up to {np.nanmax(worst)}"


@pytest.mark.parametrize(("kernel", "weight"), each(["gemv", "gemm_small", "gemm_small_sum"], FORMATS))
def test_the_output_may_be_columns_of_a_wider_array(rng: np.random.Generator, kernel: str, weight: str) -> None:
    """Nothing beside them is written."""
    rows, n, out = 3, 264, 21
    act = "float" if kernel == "gemv" else PRODUCT[weight]
    x, w, bias, _, _ = case = made(rng, act, weight, (rows, n, out), 0, True)
    exact, allowed = exact_and_allowed((*case[:4], None), act, weight)
    whole = np.full((rows, out + 11), 7, np.float32)
    y = whole[:, 5 : 5 + out]
    numbers = np.int32(rows), np.int32(n), np.int32(out), np.int64(out + 11)
    if kernel == "gemv":
        run = program("gemv", ACT="float", WEIGHT=FORMATS[weight], ROWS=4, OUTPUTS=4, NORMED=0, ADD=0)
        run.launch("gemv_kernel", (1,), (256,), y, x, w.view(np.uint8), bias, None, *numbers, np.float32(EPS))
    else:
        run = program(ACT=act, WEIGHT=FORMATS[weight], ROWS=8, WARPS_OUT=1, ADD=0)
        parts = 1 if kernel == "gemm_small" else 2
        sums = y if parts == 1 else poisoned((parts, rows, out), "float")
        args = sums, x, w.view(np.uint8), bias if parts == 1 else None, *numbers
        run.launch("gemm_small_kernel", (1, parts), (256,), *args, shared=shared_bytes(8, 1))
        if parts > 1:
            args = y, sums, bias, np.int32(parts), np.int32(rows), np.int32(out), np.int64(out + 11)
            run.launch("gemm_small_sum_kernel", (1,), (64,), *args)
    assert (np.abs(y - exact) <= allowed).all()
    assert (np.delete(whole, np.s_[5 : 5 + out], axis=1) == 7).all()


@pytest.mark.parametrize(("parts", "more"), [(3, True), (7, False)])
def test_sums_of_parts_add_up_to_the_product(rng: np.random.Generator, parts: int, more: bool) -> None:
    """Parts of several stages, and more parts than stages."""
    shape = rows, n, out = 20, 1000, 70
    case = made(rng, "__half", "__half", shape, 0, more)
    x, w, bias, _, before = case
    exact, allowed = exact_and_allowed(case, "__half", "__half")
    run = program(ACT="__half", WEIGHT="f16", ROWS=24, WARPS_OUT=2, ADD=int(more))
    sums, y = np.full((parts, rows, out), np.nan, np.float32), poisoned((rows, out), "float")
    args: tuple[Any, ...] = sums, x, w.view(np.uint8), bias, *sizes(rows, n, out)
    run.launch("gemm_small_kernel", (2, parts), (256,), *args, shared=shared_bytes(24, 2))
    y = y if before is None else before.copy()
    args = (y, sums, bias, np.int32(parts), np.int32(rows), np.int32(out), np.int64(out))
    run.launch("gemm_small_sum_kernel", (-(-rows * out // 64),), (64,), *args)
    assert (np.abs(y - exact) <= allowed).all()


def test_inputs_beyond_half_precision_saturate() -> None:
    x = np.zeros((3, 8), np.float32)
    x[0, 1], x[1, 2], x[2, 3] = 1e6, -1e6, np.nan
    w, y = np.ones((1, 8), np.float16), np.full((3, 1), 7, np.float32)
    run = program("gemv", ACT="float", WEIGHT="f16", ROWS=4, OUTPUTS=4, NORMED=0)
    run.launch("gemv_kernel", (1,), (256,), y, x, w.view(np.uint8), None, None, *sizes(3, 8, 1), np.float32(EPS))
    np.testing.assert_array_equal(y[:, 0], [65504, -65504, np.nan])


@pytest.mark.parametrize(
    ("split", "shape", "normed"),
    [
        (1, (1, 4104, 33), 1),
        (4, (3, 1800, 9), 1),
        (8, (4, 72, 3), 0),
    ],
)
def test_gemv_adds_the_sums_of_warps_that_share_an_output(
    rng: np.random.Generator, split: int, shape: tuple[int, int, int], normed: int
) -> None:
    """Split over warps that have a part of the inputs each (or none), and added to what is in y."""
    rows, n, out = shape
    x, w, bias, norm, before = made(rng, "float", "__half", shape, normed, True)
    exact, allowed = exact_and_allowed((x, w, bias, norm, before), "float", "__half")
    run = program("gemv", ACT="float", WEIGHT="f16", ROWS=rows, OUTPUTS=4, NORMED=normed, ADD=1, SPLIT=split)
    for seed in SEEDS:
        y = np.array(before)
        args = (y, x, w.view(np.uint8), bias, norm, *sizes(rows, n, out), np.float32(EPS))
        run.launch("gemv_kernel", (-(-out * split // 32),), (256,), *args, seed=seed)
        assert (np.abs(y - exact) <= allowed).all()


def gated(exact: np.ndarray, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[gate | up] (rows, 2F) in float64 and how far it may be off → silu(gate) · up, and how far that may be.

    The slope of silu is at most 1.1, and its size at most that of the gate; it takes a few operations of its own.
    """
    (gate, up), (off_gate, off_up) = np.split(exact, 2, axis=1), np.split(allowed, 2, axis=1)
    silu = gate / (1 + np.exp(-gate))
    return silu * up, 1.1 * off_gate * (np.abs(up) + off_up) + np.abs(silu) * off_up + 16 * EPS32 * np.abs(gate * up)


@pytest.mark.parametrize(
    ("rows", "warps_out", "shape", "parts", "biased"),
    [
        (16, 1, (9, 776, 24), 1, True),
        (16, 1, (16, 264, 50), 3, False),
        (64, 4, (50, 520, 70), 3, True),
    ],
)
def test_gemm_small_applies_the_activation(
    rng: np.random.Generator,
    rows: int,
    warps_out: int,
    shape: tuple[int, int, int],
    parts: int,
    biased: bool,
) -> None:
    """Outputs that fill a block's tile, and that end within a warp's 16."""
    count, n, out = shape
    x, w, bias, _, _ = made(rng, "__half", "__half", (count, n, 2 * out), 0, biased)
    exact, allowed = gated(*exact_and_allowed((x, w, bias, None, None), "__half", "__half"))
    run = program(ACT="__half", WEIGHT="f16", ROWS=rows, WARPS_OUT=warps_out, ADD=0, ACTIVATION="silu")
    numbers = sizes(count, n, out)
    grid, shared = (-(-2 * out // (32 * warps_out)), parts), shared_bytes(rows, warps_out)
    for seed in SEEDS:
        y = poisoned((count, out), "float")
        sums = y if parts == 1 else poisoned((parts, count, 2 * out), "float")
        args: tuple[Any, ...] = sums, x, w.view(np.uint8), bias if parts == 1 else None, *numbers
        run.launch("gemm_small_kernel", grid, (256,), *args, shared=shared, seed=seed)
        if parts > 1:
            args = y, sums, bias, np.int32(parts), np.int32(count), np.int32(out), np.int64(out)
            run.launch("gemm_small_sum_kernel", (-(-count * out // 64),), (64,), *args, seed=seed)
        assert (np.abs(y - exact) <= allowed).all()


@pytest.mark.parametrize(
    ("split", "shape", "normed", "biased"),
    [(1, (1, 1032, 35), 1, True), (2, (3, 520, 8), 0, False), (8, (4, 2104, 5), 1, True)],
)
def test_gemv_applies_the_activation(
    rng: np.random.Generator, split: int, shape: tuple[int, int, int], normed: int, biased: bool
) -> None:
    rows, n, out = shape
    x, w, bias, norm, _ = made(rng, "float", "__half", (rows, n, 2 * out), normed, biased)
    exact, allowed = gated(*exact_and_allowed((x, w, bias, norm, None), "float", "__half"))
    constants = {"ROWS": rows, "OUTPUTS": 4, "NORMED": normed, "ACTIVATION": "silu", "SPLIT": split}
    for seed in SEEDS:
        y = poisoned((rows, out), "float")
        args = y, x, w.view(np.uint8), bias, norm, *sizes(rows, n, out), np.float32(EPS)
        run = program("gemv", ACT="float", WEIGHT="f16", **constants)
        run.launch("gemv_kernel", (-(-2 * out * split // 32),), (256,), *args, seed=seed)
        assert (np.abs(y - exact) <= allowed).all()
