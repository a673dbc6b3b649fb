"""Matrices on a GPU, and products with them: launches of the kernels in `cuda/linear/`.

Activations, weights of norms and biases are float32. Matrices are as the file has them, or half precision; products
with them take x in their type and add in float32. Few rows go through our own kernels, bound by the bytes of the
weights; many through the device's matrix product.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.backends.cuda import launch_configs
from engine.backends.cuda.device import Array, Device
from engine.backends.cuda.launch import MOST_THREADS, Launcher, Shape, row_stride, threads_for, type_of
from engine.backends.cuda.launch_configs import GEMV_ROWS, SMALL_ROWS, UNROUNDED_ROWS
from engine.errors import EngineError
from engine.weight_formats import Linear, Matrix, StoredMatrix, WeightFormat, get

_UPLOAD_BYTES = 64 << 20  # of a file at a time
_DTYPES = {"f16": np.float16, "bf16": np.uint16}


class _Product(NamedTuple):
    """The arguments of `linear` beside x. add: to what is there."""

    weight: Array
    bias: Array | None
    norm: tuple[Array, float] | None
    add: bool
    activation: str | None

    def typed(self, x: Array, shape: Shape) -> Shape:
        """For one of our own kernels, with x like this one."""
        flags: dict[str, int | str] = {"NORMED": int(self.norm is not None), "ADD": int(self.add)}
        if self.activation is not None:
            flags["ACTIVATION"] = self.activation
        types = {"ACT": type_of(x), "WEIGHT": type_of(self.weight)}
        return shape._replace(defines={**types, **flags, **shape.defines})


class LinearOps:
    """The ops with matrices: loading them, rows of them, products with them."""

    def __init__(self, device: Device, launch: Launcher):
        self._device, self._launch = device, launch

    def matrix_bytes(self, format: WeightFormat, count: int) -> int:
        return _on_device(format).size(count)

    def weight_type(self, stored: str) -> str:
        return "bfloat16" if stored == "BF16" else "float16"

    def load(self, matrices: Sequence[StoredMatrix]) -> tuple[Matrix, ...]:
        together = itertools.groupby(matrices, key=lambda matrix: _on_device(matrix.format))
        return tuple(self._joined(format, list(parts)) for format, parts in together)

    def _joined(self, format: WeightFormat, matrices: Sequence[StoredMatrix]) -> Matrix:
        """Matrices under each other. Of their bytes a few rows at a time are there twice."""
        rows, width = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        _check_width(width)
        data, end = self._device.empty((rows, width), _DTYPES[format.name]), 0
        for matrix in matrices:
            for part, raw in matrix.slabs(_UPLOAD_BYTES):
                to = data[end + part.start : end + part.stop]
                if matrix.format is format:
                    to[...] = self._device.from_host(np.ascontiguousarray(raw).view(data.dtype))
                else:
                    self._narrow(to, self._device.from_host(np.ascontiguousarray(raw).view(np.float32)))
            end += matrix.shape[0]
        return Matrix(format, data, (rows, width))

    def rows(self, matrix: Matrix | Linear, rows: slice = slice(None)) -> np.ndarray:
        if isinstance(matrix, Linear):
            (matrix,) = matrix.parts
        raw = self._device.to_host(matrix.data[rows])
        values = np.empty((len(raw), matrix.shape[1]), np.float32)
        matrix.format.dequantize(raw.view(np.uint8), values)
        return values

    def embed(self, table: Matrix, ids: Array, scale: float = 1.0) -> Array:
        width = table.shape[1]
        x = self._device.empty((len(ids), width), np.float32)
        shape = _typed(table.data, Shape({}, threads_for(width // 8)))
        self._launch("embed", (len(ids),), shape, x, table.data, ids, width, float(scale))
        return x

    def rms_norm(self, x: Array, norm: tuple[Array, float], residual: Array | None = None) -> None:
        (rows, n), (gain, eps), y = x.shape, norm, x if residual is None else residual
        _check_width(n)
        most = MOST_THREADS if rows <= SMALL_ROWS else 256  # as in `_narrow`
        shape = Shape({"ACT": "float", "ADD": int(residual is not None)}, threads_for(-(-n // 8), most))
        self._launch("rms_norm", (rows,), shape, y, x, gain, n, row_stride(y), row_stride(x), float(eps))

    def linear(
        self,
        x: Array,
        w: Linear,
        *,
        norm: tuple[Array, float] | None = None,
        residual: Array | None = None,
        activation: str | None = None,
        recorded: bool = False,
    ) -> Array:
        rows, out = len(x), w.shape[0] if activation is None else w.shape[0] // 2
        (matrix,) = w.parts
        product = _Product(matrix.data, w.bias, norm, residual is not None, activation)
        y = self._device.empty((rows, out), np.float32) if residual is None else residual
        if rows > SMALL_ROWS and not recorded:
            self._large(y, x, product)
            return y
        for first in range(0, rows, SMALL_ROWS):
            part = slice(first, first + SMALL_ROWS)
            self._small(y[part], x[part], product)
        return y

    def _small(self, y: Array, x: Array, of: _Product) -> None:
        """`linear` of at most SMALL_ROWS rows into y."""
        (rows, width), processors = x.shape, self._device.processors
        if rows > GEMV_ROWS:
            if rows > UNROUNDED_ROWS:
                x, of = self._narrowed(x, of), of._replace(norm=None)
            self._tensor_cores(y, x, of)
            return
        gain, eps = of.norm or (None, 0.0)
        shape, blocks = launch_configs.gemv(rows, len(of.weight), width, processors)
        sizes = rows, width, y.shape[1]
        self._launch("gemv", (blocks,), of.typed(x, shape), y, x, of.weight, of.bias, gain, *sizes, float(eps))

    def _tensor_cores(self, y: Array, x: Array, of: _Product) -> None:
        """`linear` of at most SMALL_ROWS rows into y, x float32 or of the weights' type."""
        (rows, width), out, device = x.shape, y.shape[1], self._device
        gain, eps = of.norm or (None, 0.0)
        machine = device.processors, device.shared_memory
        plain, blocks, parts = launch_configs.gemm_small(rows, len(of.weight), width, *machine)
        shape, sizes = of.typed(x, plain), (rows, width, out)
        if parts == 1 or of.norm is not None:
            self._launch("gemm_small", (blocks, 1), shape, y, x, of.weight, of.bias, gain, *sizes, float(eps))
            return
        sums = device.empty((parts, rows, len(of.weight)), np.float32)
        self._launch("gemm_small", (blocks, parts), shape, sums, x, of.weight, None, None, *sizes, 0.0)
        grid = (-(-rows * out // shape.threads),)
        args = (y, sums, of.bias, parts, rows, out)
        self._launch("gemm_small_sum", grid, shape._replace(shared=0), *args, file="gemm_small")

    def _large(self, y: Array, x: Array, of: _Product) -> None:
        """`linear` of any number of rows into y."""
        rows, out = len(x), len(of.weight)
        product = y if of.activation is None else self._device.empty((rows, out), np.float32)
        self._device.gemm(product, self._narrowed(x, of), of.weight, add=of.add)
        if of.bias is not None:
            shape = Shape({"ACT": "float"}, threads_for(out))
            self._launch("add_bias", (-(-out // shape.threads), rows), shape, product, of.bias, out)
        if of.activation is not None:
            half, threads = out // 2, threads_for(-(-out // 16))
            shape = Shape({"ACT": "float", "ACTIVATION": of.activation}, threads)
            self._launch("activate_mul", (-(-half // (8 * threads)), rows), shape, y, product, half)

    def _narrowed(self, x: Array, of: _Product) -> Array:
        """x (T, in) in the weights' type, normalised before where there is a norm."""
        narrow = self._device.empty(x.shape, of.weight.dtype)
        self._narrow(narrow, x, of.norm)
        return narrow

    def _narrow(self, y: Array, x: Array, norm: tuple[Array, float] | None = None) -> None:
        """y = x (T, n) in y's own type, normalised before where there is a norm."""
        gain, eps = norm or (None, 0.0)
        rows, n = x.shape
        # Few rows leave most of the machine idle: as many threads to each as there may be.
        most = MOST_THREADS if rows <= SMALL_ROWS else 256
        shape = _typed(y, Shape({}, threads_for(-(-n // 8), most)), NORMED=int(norm is not None))
        self._launch("narrow", (rows,), shape, y, x, gain, n, float(eps))


def _typed(weight: Array, shape: Shape, **flags: int) -> Shape:
    """For a kernel of float32 activations and of weights like this one."""
    return shape._replace(defines={"ACT": "float", "WEIGHT": type_of(weight), **flags, **shape.defines})


def _on_device(format: WeightFormat) -> WeightFormat:
    """What matrices become that a file has in a format: float32 is rounded to half precision."""
    return get("f16") if format.name == "f32" else format


def _check_width(width: int) -> None:
    """Raises EngineError for rows that kernels cannot read 16 bytes at a time."""
    if width % 8:
        raise EngineError(
            f"This model has matrices with rows of {width} numbers, and the GPU takes multiples of 8: "
            "run it with device=cpu",
            settings=("device",),
        )
