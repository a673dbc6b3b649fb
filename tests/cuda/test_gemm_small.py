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


def gated(exact: np.ndarray, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[gate | up] (rows, 2F) in float64 and how far it may be off → silu(gate) · up, and how far that may be.

    The slope of silu is at most 1.1, and its size at most that of the gate; it takes a few operations of its own.
    """
    (gate, up), (off_gate, off_up) = np.split(exact, 2, axis=1), np.split(allowed, 2, axis=1)
    silu = gate / (1 + np.exp(-gate))
    return silu * up, 1.1 * off_gate * (np.abs(up) + off_up) + np.abs(silu) * off_up + 16 * EPS32 * np.abs(gate * up)


BESIDE = 5  # columns on either side of a result in a wider array


def expected(case: Case, act: str, weight: str, is_gated: bool) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and how far it may be off."""
    both = exact_and_allowed(case, act, weight)
    return gated(*both) if is_gated else both


def target(before: np.ndarray | None, rows: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    """An array of sevens, and columns of it for a result: poisoned, or with what is to be added to."""
    whole = np.full((rows, out + 2 * BESIDE), 7, np.float32)
    y = whole[:, BESIDE : BESIDE + out]
    y[...] = poisoned((rows, out), "float") if before is None else before
    return whole, y


def assert_close(whole: np.ndarray, y: np.ndarray, exact: np.ndarray, allowed: np.ndarray) -> None:
    """And nothing beside the columns of the result is written."""
    worst = np.abs(y - exact) - allowed
    assert (worst <= 0).all(), f"{(~(worst <= 0)).sum()} of {worst.size} are off, by up to {np.nanmax(worst)}"
    assert (np.delete(whole, np.s_[BESIDE : BESIDE + y.shape[1]], axis=1) == 7).all()


PRODUCT = {"__half": "__half", "__nv_bfloat16": "__nv_bfloat16", "float": "__half"}  # type of weights → type of x


@pytest.mark.parametrize(
    ("weight", "most", "warps_out", "shape", "parts", "more", "activation"),
    [
        ("__half", 16, 1, (9, 1032, 40), 1, True, None),
        ("__nv_bfloat16", 64, 8, (50, 328, 260), 1, True, None),
        ("float", 8, 1, (7, 520, 35), 2, False, None),  # with parts, gemm_small_sum adds their sums
        ("__half", 24, 2, (20, 1000, 70), 7, True, None),  # more parts than stages
        ("__half", 16, 1, (9, 776, 48), 1, False, "silu"),
        ("__half", 64, 4, (50, 520, 140), 3, False, "silu"),  # outputs that end within a warp's 16
    ],
)
def test_gemm_small_equals_the_product(
    rng: np.random.Generator,
    weight: str,
    most: int,
    warps_out: int,
    shape: tuple[int, int, int],
    parts: int,
    more: bool,
    activation: str | None,
) -> None:
    """shape: rows, inputs and outputs. more: with a bias, and added to what is in y."""
    rows, n, out = shape
    act, width = PRODUCT[weight], out // 2 if activation else out
    x, w, bias, _, before = case = made(rng, act, weight, shape, 0, more)
    exact, allowed = expected(case, act, weight, activation is not None)
    gate = {} if activation is None else {"ACTIVATION": activation}
    run = program(ACT=act, WEIGHT=FORMATS[weight], ROWS=most, WARPS_OUT=warps_out, ADD=int(more), **gate)
    for seed in SEEDS[: 1 if n > 1000 else None]:
        whole, y = target(before, rows, width)
        stride = np.int64(whole.shape[1])
        sums = y if parts == 1 else np.full((parts, rows, out), np.nan, np.float32)
        numbers = np.int32(rows), np.int32(n), np.int32(width), stride if parts == 1 else np.int64(width)
        args: tuple[Any, ...] = sums, x, w.view(np.uint8), bias if parts == 1 else None, *numbers
        grid = (-(-out // (32 * warps_out)), parts)
        run.launch("gemm_small_kernel", grid, (256,), *args, shared=shared_bytes(most, warps_out), seed=seed)
        if parts > 1:
            args = y, sums, bias, np.int32(parts), np.int32(rows), np.int32(width), stride
            run.launch("gemm_small_sum_kernel", (-(-rows * width // 64),), (64,), *args, seed=seed)
        assert_close(whole, y, exact, allowed)


@pytest.mark.parametrize(
    ("weight", "split", "shape", "normed", "more", "activation"),
    [
        ("__nv_bfloat16", 1, (3, 264, 21), 0, False, None),
        ("__half", 1, (1, 4104, 33), 1, True, None),
        ("__half", 4, (3, 1800, 9), 1, True, None),
        ("float", 8, (4, 72, 3), 0, True, None),  # more warps than parts of the inputs
        ("__half", 2, (3, 520, 16), 0, False, "silu"),
        ("__half", 8, (4, 2104, 10), 1, False, "silu"),
    ],
)
def test_gemv_equals_the_product(
    rng: np.random.Generator,
    weight: str,
    split: int,
    shape: tuple[int, int, int],
    normed: int,
    more: bool,
    activation: str | None,
) -> None:
    """split: warps that share an output. more: with a bias, and added to what is in y."""
    rows, n, out = shape
    width = out // 2 if activation else out
    x, w, bias, norm, before = case = made(rng, "float", weight, shape, normed, more)
    exact, allowed = expected(case, "float", weight, activation is not None)
    gate = {} if activation is None else {"ACTIVATION": activation}
    constants = {"ROWS": rows, "OUTPUTS": 4, "NORMED": normed, "ADD": int(more), "SPLIT": split, **gate}
    run = program("gemv", ACT="float", WEIGHT=FORMATS[weight], **constants)
    for seed in SEEDS:
        whole, y = target(before, rows, width)
        numbers = np.int32(rows), np.int32(n), np.int32(width), np.int64(whole.shape[1])
        args = y, x, w.view(np.uint8), bias, norm, *numbers, np.float32(EPS)
        run.launch("gemv_kernel", (-(-out * split // 32),), (256,), *args, seed=seed)
        assert_close(whole, y, exact, allowed)


def test_inputs_beyond_half_precision_saturate() -> None:
    x = np.zeros((3, 8), np.float32)
    x[0, 1], x[1, 2], x[2, 3] = 1e6, -1e6, np.nan
    w, y = np.ones((1, 8), np.float16), np.full((3, 1), 7, np.float32)
    run = program("gemv", ACT="float", WEIGHT="f16", ROWS=4, OUTPUTS=4, NORMED=0)
    run.launch("gemv_kernel", (1,), (256,), y, x, w.view(np.uint8), None, None, *sizes(3, 8, 1), np.float32(EPS))
    np.testing.assert_array_equal(y[:, 0], [65504, -65504, np.nan])
