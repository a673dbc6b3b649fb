"""The CUDA emulator computes number formats, warp operations, matrix fragments and atomics as specified."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device.kernel_source import prelude
from tests.cuda.formats import read, store
from tests.cuda_emulator import Program

LANES = np.arange(32)


def run(body: str, arguments: str, *args: np.ndarray, threads: int = 32, seed: int = 0) -> None:
    """Run a kernel with this body in one block."""
    text = f'{prelude()}\nextern "C" __global__ void tried({arguments}) {{ const int t = threadIdx.x;\n{body}}}\n'
    Program(text).launch("tried", (1,), (threads,), *args, seed=seed)


@pytest.mark.parametrize("kind", ["__half", "__nv_bfloat16"])
def test_every_short_float_reads_back(kind: str) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    codes = bits.view(np.float16) if kind == "__half" else bits
    values = np.zeros(65536, np.float32)
    body = "for (int i = t; i < 65536; i += 256) y[i] = to_float(x[i]);"
    run(body, f"float *y, const {kind} *x", values, codes, threads=256)
    np.testing.assert_array_equal(values.view(np.uint32), read(codes, kind).view(np.uint32))


@pytest.mark.parametrize("kind", ["__half", "__nv_bfloat16"])
def test_floats_round_to_the_nearest_even_short_float(rng: np.random.Generator, kind: str) -> None:
    exponents = rng.uniform(-50, 40, 4000)
    values = rng.choice([-1, 1], 4000) * 2.0**exponents
    codes = np.arange(0, 0x7B00, 7, dtype=np.uint16)
    halves = codes.view(np.float16) if kind == "__half" else codes
    ties = (read(halves, kind).astype(np.float64) + read(np.nextafter(halves, np.float16(9)), kind)) / 2
    edges = [0.0, -0.0, 65504, 65519.99, 65520, np.inf, -np.inf, 2.0**-25, 2.0**-24, 2.0**-14]
    x = np.concatenate([values, ties if kind == "__half" else [], edges]).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = store(x, kind)
    y = np.zeros(len(x), expected.dtype)
    body = f"for (int i = t; i < n[0]; i += 256) y[i] = from_float<{kind}>(x[i]);"
    run(body, f"{kind} *y, const float *x, const int *n", y, x, np.array([len(x)], np.int32), threads=256)
    np.testing.assert_array_equal(y.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize(
    ("call", "source"),
    [
        ("__shfl_sync(~0u, x[t], 5)", LANES * 0 + 5),
        ("__shfl_sync(~0u, x[t], t + 1, 8)", LANES // 8 * 8 + (LANES + 1) % 8),
        ("__shfl_xor_sync(~0u, x[t], 9)", LANES ^ 9),
        ("__shfl_up_sync(~0u, x[t], 3)", np.where(LANES < 3, LANES, LANES - 3)),
        ("__shfl_down_sync(~0u, x[t], 3, 16)", np.where(LANES % 16 > 12, LANES, LANES + 3)),
    ],
)
def test_shuffles_exchange_values_of_lanes(call: str, source: np.ndarray) -> None:
    x = np.arange(32, dtype=np.float32) + 100
    y = np.zeros(32, np.float32)
    for seed in (0, 1, 2):
        run(f"y[t] = {call};", "float *y, const float *x", y, x, seed=seed)
        np.testing.assert_array_equal(y, x[source])


def test_votes_and_reductions_cover_the_warp() -> None:
    x = np.arange(64, dtype=np.int32) * 7 % 64
    y = np.zeros((8, 64), np.uint32)
    body = """
    const unsigned low = 0x0000ffffu;
    y[t] = __ballot_sync(~0u, x[t] > 31);
    y[64 + t] = __any_sync(~0u, x[t] == 63);
    y[128 + t] = __all_sync(~0u, x[t] < 60);
    y[192 + t] = t % 32 < 16 ? __reduce_add_sync(low, (unsigned)x[t]) : 0;
    y[256 + t] = __reduce_max_sync(~0u, x[t]);
    y[320 + t] = __syncthreads_count(x[t] > 31);
    y[384 + t] = __syncthreads_or(x[t] == 63);
    y[448 + t] = __syncthreads_and(x[t] == 63);
    """
    run(body, "unsigned *y, const int *x", y, x, threads=64)
    warps = x.reshape(2, 32)
    ballots = [sum(1 << i for i in range(32) if warp[i] > 31) for warp in warps]
    low = np.where(LANES < 16, warps[:, :16].sum(axis=1)[:, None], 0)
    expected = [
        np.repeat(ballots, 32),
        np.repeat((warps == 63).any(axis=1), 32),
        np.repeat((warps < 60).all(axis=1), 32),
        low.ravel(),
        np.repeat(warps.max(axis=1), 32),
        np.full(64, (x > 31).sum()),
        np.ones(64),
        np.zeros(64),
    ]
    np.testing.assert_array_equal(y, np.stack(expected).astype(np.uint32))


def test_atomics_lose_no_update() -> None:
    sums, extremes = np.zeros(2, np.float32), np.array([0, 0], np.int32)
    body = """
    atomicAdd(sums, (float)t);
    atomicMax(extremes, t);
    for (int old = extremes[1], seen; ; old = seen)
        if ((seen = atomicCAS(extremes + 1, old, old + 2)) == old) break;
    """
    with pytest.raises(AssertionError, match="race: load of global memory"):  # the plain load of extremes[1]
        run(body, "float *sums, int *extremes", sums, extremes, threads=96)
    body = body.replace("extremes[1], seen", "0, seen")
    run(body, "float *sums, int *extremes", sums, extremes, threads=96)
    assert sums[0] == sum(range(96))
    assert extremes.tolist() == [95, 192]


@pytest.mark.parametrize("kind", ["__half", "__nv_bfloat16"])
def test_mma_equals_the_matrix_product(rng: np.random.Generator, kind: str) -> None:
    """Fragments by hand, as the PTX ISA draws them: lane l has row l / 4 and columns 2 · (l % 4), + 1 of each tile."""
    a, b = rng.integers(-8, 9, (16, 16)), rng.integers(-8, 9, (16, 8))
    d = np.zeros((16, 8), np.float32)
    name = "mma_m16n8k16_f16" if kind == "__half" else "mma_m16n8k16_bf16"
    body = f"""
    const int row = t / 4, column = t % 4 * 2;
    unsigned left[4], right[2];
    for (int i = 0; i < 4; ++i) {{
        const unsigned short *p = a + (row + i % 2 * 8) * 16 + column + i / 2 * 8;
        left[i] = p[0] | (unsigned)p[1] << 16;
    }}
    for (int i = 0; i < 2; ++i) {{
        const unsigned short *p = b + (column + i * 8) * 8 + row;
        right[i] = p[0] | (unsigned)p[8] << 16;
    }}
    float sum[4] = {{1.0f, 1.0f, 1.0f, 1.0f}};
    {name}(sum, left, right);
    for (int i = 0; i < 4; ++i) d[(row + i / 2 * 8) * 8 + column + i % 2] = sum[i];
    """
    arguments = "float *d, const unsigned short *a, const unsigned short *b"
    run(body, arguments, d, store(a, kind).view(np.uint16), store(b, kind).view(np.uint16))
    np.testing.assert_array_equal(d, a @ b + 1)


def test_seeds_change_the_order_of_threads() -> None:
    orders = []
    for seed in range(4):
        order, count = np.zeros(64, np.int32), np.zeros(1, np.int32)
        run("order[atomicAdd(count, 1)] = t;", "int *order, int *count", order, count, threads=64, seed=seed)
        assert sorted(order.tolist()) == list(range(64))
        orders.append(order.tolist())
    assert orders[0] == list(range(64)) == orders[1][::-1]
    assert orders[2] != orders[3]


# -- as wrong as a GPU may be ----------------------------------------------------------------------------------------


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
