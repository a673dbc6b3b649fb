"""A trace: arrays that have shapes and no memory, and the launches of ops that get them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device.tracing import GEMM, Launch, TracingArray, TracingDevice
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.weight_formats import Linear, Matrix, get


@pytest.fixture
def launches() -> list[Launch]:
    return []


@pytest.fixture
def device(launches: list[Launch]) -> TracingDevice:
    return TracingDevice(launches.append, 132, 228 << 10)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 16)])
def test_arrays_are_like_numpys(device: TracingDevice, shape: tuple[int, ...]) -> None:
    for dtype in (np.float32, np.uint8):
        traced, real = device.empty(shape, dtype), np.empty(shape, dtype)
        views: list[tuple[Any, Any]] = [(traced, real), (traced.reshape(-1), real.reshape(-1))]
        if len(shape) > 1:
            views += [(x[1:, :2], y[1:, :2]) for x, y in views[:1]]
            views += [(x[0], y[0]) for x, y in views[:1]]
            views += [(traced.view(np.uint16), real.view(np.uint16))]
            views += [(traced.reshape(shape[0], -1, 2), real.reshape(shape[0], -1, 2))]
        for x, y in views:
            for name in ("shape", "strides", "dtype", "size", "nbytes", "itemsize", "ndim"):
                assert getattr(x, name) == getattr(y, name), (name, dtype)
            assert x.ndim == 0 or len(x) == len(y), dtype


def test_arrays_take_no_memory_and_cannot_be_read(device: TracingDevice) -> None:
    x = device.empty((1 << 20, 1 << 30), np.float32)
    x[:, :5] = 3  # lost
    assert device.to_host(x[:2, :3]).tolist() == [[0.0] * 3] * 2
    with pytest.raises(TypeError):
        x + 1  # type: ignore[operator]
    assert isinstance(x[3], TracingArray)


def test_launches_and_products_of_a_library_are_told(device: TracingDevice, launches: list[Launch]) -> None:
    weight = Matrix(get("bf16"), device.empty((96, 2 * 64), np.uint8), (96, 64))
    y = CudaOps(device).linear(device.empty((100, 64), np.float32), Linear((weight,)))
    narrow, product = launches
    assert (narrow.kernel, narrow.grid) == ("narrow_kernel", (100,))
    assert "narrow_kernel(" in narrow.text
    assert (product.kernel, product.text) == (GEMM, "")
    assert [(x.shape, x.dtype) for x in product.args] == [
        ((100, 96), np.float32), ((100, 64), np.uint16), ((96, 64), np.uint16)
    ]  # fmt: skip
    assert product.args[0] is y
