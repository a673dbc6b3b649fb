"""The CUDA emulator is as wrong as a GPU may be, and runs threads in any order."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device.kernel_source import prelude
from tests.cuda_emulator import Program


def run(body: str, arguments: str, *args: np.ndarray, threads: int = 32, seed: int = 0) -> None:
    text = f'{prelude()}\nextern "C" __global__ void tried({arguments}) {{ const int t = threadIdx.x;\n{body}}}\n'
    Program(text).launch("tried", (1,), (threads,), *args, seed=seed)


def test_seeds_change_the_order_of_threads() -> None:
    orders = []
    for seed in range(4):
        order, count = np.zeros(64, np.int32), np.zeros(1, np.int32)
        run("order[atomicAdd(count, 1)] = t;", "int *order, int *count", order, count, threads=64, seed=seed)
        assert sorted(order.tolist()) == list(range(64))
        orders.append(order.tolist())
    assert orders[0] == list(range(64)) == orders[1][::-1]
    assert orders[2] != orders[3]


def test_a_product_and_a_sum_are_fused_unless_they_may_not_be(rng: np.random.Generator) -> None:
    """c is the rounded product, so that what fusing keeps of the exact one is all that is left."""
    a, b = (rng.standard_normal(32).astype(np.float32) for _ in "ab")
    c = -a * b
    y = np.zeros((4, 32), np.float32)
    body = """
    y[t] = a[t] * b[t] + c[t];
    y[32 + t] = __fadd_rn(a[t] * b[t], c[t]);
    y[64 + t] = __fmul_rn(a[t], b[t]) + c[t];
    y[96 + t] = c[t] - __fmul_rn(-a[t], b[t]);
    """
    run(body, "float *y, const float *a, const float *b, const float *c", y, a, b, c)
    np.testing.assert_array_equal(y[0], (a.astype(np.float64) * b + c).astype(np.float32))
    assert np.count_nonzero(y[0]) > 25
    np.testing.assert_array_equal(y[1:], np.zeros((3, 32), np.float32))


def test_denormal_floats_are_flushed_and_those_of_halves_are_not() -> None:
    x = np.array([2.0**-126, 2.0**-127, 2.0**-149], np.float32)
    y, h = np.zeros(6, np.float32), np.zeros(2, np.float16)
    body = """
    if (t > 2) return;
    y[t] = x[t] * 1.5f;
    y[3 + t] = x[t] * 0.5f;
    if (t < 2) h[t] = __hadd(from_float<__half>(5.9604645e-8f), from_float<__half>(t * 5.9604645e-8f));
    """
    run(body, "float *y, __half *h, const float *x", y, h, x)
    assert y.tolist() == [1.5 * 2.0**-126, 0, 0, 0, 0, 0]
    assert h.tolist() == [2.0**-24, 2.0**-23]
    assert np.float32(2.0**-149) * np.float32(4) == 2.0**-147, "NumPy has its denormals back"


UNITS = {  # in the last place, of the CUDA C++ Programming Guide
    "expf": (np.exp, (-20, 20), lambda x: 1),
    "__expf": (np.exp, (-20, 20), lambda x: 2 + np.floor(np.abs(1.173 * x))),
    "logf": (np.log, (1.5, 1e6), lambda x: 1),
    "rsqrtf": (lambda x: 1 / np.sqrt(x), (1e-3, 1e3), lambda x: 2),
    "tanhf": (np.tanh, (-3, 3), lambda x: 2),
    "exp2_fast": (np.exp2, (-20, 20), lambda x: 4),  # 2^-22 of the result
}


@pytest.mark.parametrize("name", UNITS)
def test_functions_are_off_by_no_more_than_they_may_be_and_by_much_of_it(rng: np.random.Generator, name: str) -> None:
    exact_of, (low, high), units_of = UNITS[name]
    x = rng.uniform(low, high, 1024).astype(np.float32)
    y = np.zeros(1024, np.float32)
    run(f"for (int i = t; i < 1024; i += 32) y[i] = {name}(x[i]);", "float *y, const float *x", y, x)
    exact = exact_of(x.astype(np.float64))
    off = (y - exact) / np.spacing(np.abs(exact).astype(np.float32)) / units_of(x.astype(np.float64))
    assert np.abs(off).max() <= 1.001
    assert off.min() < -0.45
    assert off.max() > 0.45
