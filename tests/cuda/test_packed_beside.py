"""Matrices of two packed formats in one launch, on the emulator: the results are those of two launches, to the bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from polarlm.engine.backends.cuda import packed
from polarlm.engine.backends.cuda.launch_configs import GEMM_PACKED_ROWS, GEMV_ROWS
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.cuda.packed import PackedRows
from polarlm.engine.weight_formats import Linear, get
from tests.cuda.emulated import EmulatedDevice, open_device
from tests.cuda.formats import BESIDE
from tests.weights import StoredBytes, random_blocks

EPS = 1e-5


@pytest.fixture
def ops() -> CudaOps:
    return CudaOps(open_device())


def launches(ops: CudaOps) -> list[str]:
    """What has been launched since the last call; empty on a GPU, which does not say."""
    device = ops._device
    if not isinstance(device, EmulatedDevice):
        return []
    noted, device.launches = device.launches, []
    return noted


def products(ops: CudaOps) -> list[str]:
    return [kernel for kernel in launches(ops) if kernel.startswith(("gemv", "gemm"))]


def stored(rng: np.random.Generator, rows: int, name: str, width: int) -> StoredBytes:
    return StoredBytes(random_blocks(rng, name, rows, width), name)


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix gets a launch of its own."""
    monkeypatch.setattr(packed, "joins", lambda *given: False)


# Product: rows choose the kernel, and formats how both of its matrices are cut into units, slots and sets.
@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
@pytest.mark.parametrize(("first", "second"), [("q4_k", "q6_k"), ("q5_0", "q8_0"), ("q8_0", "q2_k")])
def test_two_formats_in_one_launch_give_the_results_of_two_launches(
    ops: CudaOps, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, first: str, second: str, rows: int
) -> None:
    """With a norm before, a bias, and a sum after it; neither matrix ends with a tile."""
    width = 3 * 256
    w = Linear(ops.load([stored(rng, 70, first, width), stored(rng, 37, second, width)]), None)
    x, norm, before = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, width), width, (rows, 107)))
    with_bias = Linear(w.parts, ops.to_device(rng.standard_normal(107).astype(np.float32)))

    def results() -> list[np.ndarray]:
        normed = ops.linear(ops.to_device(x), w, norm=(ops.to_device(norm), EPS))
        added = ops.linear(ops.to_device(x), with_bias, residual=ops.to_device(before))
        return [ops.to_host(normed), ops.to_host(added)]

    together = results()
    kernel = "gemv_packed_kernel" if rows <= GEMV_ROWS else "gemm_packed_kernel"
    assert products(ops) in ([], [kernel] * 2)
    apart(monkeypatch)
    for one, other in zip(together, results(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert products(ops) in ([], [kernel] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 12])
def test_blocks_that_stay_have_sets_of_one_format_each(
    ops: CudaOps, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """A GPU of one multiprocessor has fewer blocks than sets of tiles, of both formats."""
    monkeypatch.setattr(EmulatedDevice, "processors", 1)
    w = Linear(ops.load([stored(rng, 300, "q4_k", 512), stored(rng, 150, "q6_k", 512)]))
    x = rng.standard_normal((rows, 512)).astype(np.float32)
    together = ops.to_host(ops.linear(ops.to_device(x), w))
    apart(monkeypatch)
    np.testing.assert_array_equal(together, ops.to_host(ops.linear(ops.to_device(x), w)))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5])
def test_gate_and_up_of_two_formats_are_one_product(
    ops: CudaOps, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Their activation follows it, since no block has both."""
    w = Linear(ops.load([stored(rng, 32, "q4_k", 256), stored(rng, 32, "q5_k", 256)]))
    x = ops.to_device(rng.standard_normal((rows, 256)).astype(np.float32))
    together = ops.to_host(ops.linear(x, w, activation="silu"))
    noted = launches(ops)
    assert not noted or [kernel for kernel in noted if kernel != "narrow_kernel"][-2:] == [
        "gemv_packed_kernel" if rows == 1 else "gemm_packed_kernel",
        "activate_mul_kernel",
    ]
    apart(monkeypatch)
    np.testing.assert_array_equal(together, ops.to_host(ops.linear(x, w, activation="silu")))


@pytest.mark.slow
def test_a_third_format_has_a_launch_of_its_own(
    ops: CudaOps, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = Linear(ops.load([stored(rng, 32, name, 256) for name in ("q4_k", "q5_k", "q6_k")]))
    x = ops.to_device(rng.standard_normal((1, 256)).astype(np.float32))
    together = ops.to_host(ops.linear(x, w))
    assert products(ops) in ([], ["gemv_packed_kernel"] * 2)
    apart(monkeypatch)
    np.testing.assert_array_equal(together, ops.to_host(ops.linear(x, w)))


def test_matrices_that_are_not_packed_and_more_rows_take_a_launch_each(ops: CudaOps, rng: np.random.Generator) -> None:
    halves = StoredBytes(rng.standard_normal((32, 256)).astype(np.float16).view(np.uint8), "f16")
    files = [halves, stored(rng, 32, "q6_k", 256), stored(rng, 32, "q4_k", 256)]
    plain, larger, smaller = ops.load(files)
    assert not packed.joins(plain, larger, 1)
    assert not packed.joins(larger, plain, 1)
    assert packed.joins(larger, smaller, GEMM_PACKED_ROWS)
    assert not packed.joins(larger, smaller, GEMM_PACKED_ROWS + 1)


def rows_of(name: str, out: int) -> PackedRows:
    return PackedRows(out, get(name).values, packed.block_bytes(get(name)))


MACHINES = [(132, 228 << 10), (108, 164 << 10), (128, 100 << 10), (24, 100 << 10)]


@pytest.mark.parametrize(("first", "second"), BESIDE)
def test_every_block_has_tiles_of_its_format_and_fits_beside_others(first: str, second: str) -> None:
    cases = itertools.product(MACHINES, (1, 2, 3, 8, 16), (32, 5120, 9216, 28672), (16, 1024, 8192))
    for (processors, memory), rows, out, other in cases:
        configured = packed.gemv_packed_beside if rows <= GEMV_ROWS else packed.gemm_packed_beside
        weights, beside = rows_of(first, out), rows_of(second, other)
        config, blocks, border = configured(rows, processors, memory, weights, beside)
        sizes = {name: int(size) for name, size in config.defines.items()}
        assert config.shared + 256 + 1024 <= min(memory, 100 << 10)
        assert 0 < border < blocks
        assert border <= -(-out // (16 * sizes["TILES"]))
        assert blocks - border <= -(-other // (16 * sizes["BESIDE_TILES"]))
        for name in ("", "BESIDE_"):
            assert sizes[f"{name}SLOTS"] > sizes[f"{name}TILES"]
        if rows <= GEMV_ROWS:
            assert blocks <= sizes["RESIDENT"] * processors
            assert sizes["RESIDENT"] * (config.shared + 256 + 1024) <= memory


def test_the_8b_model_s_products_take_as_many_warps_as_two_launches() -> None:
    """On an H100 and an H200: then their results are those of two launches as well."""
    for rows in (1, 2):
        config, blocks, border = packed.gemv_packed_beside(
            rows, 132, 228 << 10, rows_of("q4_k", 5120), rows_of("q6_k", 1024)
        )
        for name, out in (("q4_k", 5120), ("q6_k", 1024)):
            format = get(name)
            alone, _ = packed.gemv_packed(rows, out, 132, 228 << 10, format.values, packed.block_bytes(format))
            assert alone.defines["WARPS"] == config.defines["WARPS"]
            assert alone.defines["RESIDENT"] == config.defines["RESIDENT"]
    assert (blocks, border) == (264, 206)
