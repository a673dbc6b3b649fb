"""Matrices of two packed formats in one launch, on the emulator: results equal two launches' to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.backends.cuda import packed
from polarlm.engine.backends.cuda.launch_configs import GEMV_ROWS
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.cuda.wide import WIDE_ROWS
from polarlm.engine.weight_formats import Linear
from tests.cuda.emulated import EmulatedDevice, open_device
from tests.weights import StoredBytes, random_matrix

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


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix gets a launch of its own."""
    monkeypatch.setattr(packed, "joins", lambda *args: False)


TWO = ("q4_k", "q6_k")


@pytest.mark.parametrize(
    ("rows", "formats", "gated", "processors"),
    [
        (1, TWO, False, 6),
        (2, ("q5_0", "q8_0"), False, 6),
        (1, TWO, False, 1),  # fewer blocks than sets of tiles, of both formats
        (16, ("q5_0", "q8_0"), False, 6),
        (70, TWO, False, 6),
        (5, ("q4_k", "q5_k"), True, 6),  # an activation follows the product, since no block has both formats
        (1, ("q4_k", "q5_k", "q6_k"), False, 6),  # the third one has a launch of its own
    ],
)
def test_formats_in_one_launch_give_the_results_of_single_launches(
    ops: CudaOps,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    formats: tuple[str, ...],
    gated: bool,
    processors: int,
) -> None:
    """With a norm before, and with a bias and a sum after it; matrices end within a tile unless they are gated."""
    monkeypatch.setattr(EmulatedDevice, "processors", processors)
    width, outputs = 3 * 256, (80, 48, 32) if gated else (70, 37, 21)
    parts = ops.load([random_matrix(rng, name, out, width) for out, name in zip(outputs, formats, strict=False)])
    total = sum(outputs[: len(formats)])
    x, norm, before = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, width), width, (rows, total)))
    bias = ops.to_device(rng.standard_normal(total).astype(np.float32))

    def results() -> list[np.ndarray]:
        activation = "silu" if gated else None
        normed = ops.linear(ops.to_device(x), Linear(parts), norm=(ops.to_device(norm), EPS), activation=activation)
        added = ops.linear(ops.to_device(x), Linear(parts, bias), residual=ops.to_device(before))
        return [ops.to_host(normed), ops.to_host(added)]

    together = results()
    kernel = "gemv_packed_kernel" if rows <= GEMV_ROWS else "gemm_wide_kernel"
    assert products(ops) in ([], [kernel] * 2 * (len(formats) - 1))
    apart(monkeypatch)
    np.testing.assert_equal(together, results())
    assert products(ops) in ([], [kernel] * 2 * len(formats))


def test_parts_of_the_inputs_of_two_formats_are_added(ops: CudaOps, rng: np.random.Generator) -> None:
    parts = ops.load([random_matrix(rng, "q4_k", 70, 1024), random_matrix(rng, "q6_k", 37, 1024)])
    x = rng.standard_normal((5, 1024)).astype(np.float32)
    together = ops.to_host(ops.linear(ops.to_device(x), Linear(parts)))
    assert products(ops) in ([], ["gemm_wide_kernel"])
    apart = [ops.to_host(ops.linear(ops.to_device(x), Linear((part,)))) for part in parts]
    np.testing.assert_array_equal(together, np.concatenate(apart, axis=1))


def test_matrices_that_are_not_packed_and_many_rows_take_a_launch_each(ops: CudaOps, rng: np.random.Generator) -> None:
    halves = StoredBytes(rng.standard_normal((32, 256)).astype(np.float16).view(np.uint8), "f16")
    files = [halves, random_matrix(rng, "q6_k", 32, 256), random_matrix(rng, "q4_k", 32, 256)]
    plain, larger, smaller = ops.load(files)
    assert not packed.joins(plain, larger)
    assert not packed.joins(larger, plain)
    assert packed.joins(larger, smaller)
    ops.linear(ops.to_device(np.zeros((WIDE_ROWS + 1, 256), np.float32)), Linear((larger, smaller)))
    assert launches(ops).count("dequantize_kernel") in (0, 2)
