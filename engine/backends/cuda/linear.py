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
from engine.backends.cuda.launch import MOST_THREADS, LaunchConfig, Launcher, row_stride, threads_for, type_of
from engine.backends.cuda.launch_configs import GEMV_ROWS, SMALL_ROWS, UNROUNDED_ROWS
from engine.errors import EngineError
from engine.weight_formats import Linear, Matrix, StoredMatrix, WeightFormat, get

_UPLOAD_BYTES = 64 << 20  # of a file at a time
# Formats that the device's matrix product takes as they lie. Products with others take half precision.
_PLAIN: dict[str, type[np.generic]] = {"f16": np.float16, "bf16": np.uint16}


class _Product(NamedTuple):
    """The arguments of `linear` beside x. add: to what is there."""

    weight: Matrix
    bias: Array | None
    norm: tuple[Array, float] | None
    add: bool
    activation: str | None

    def typed(self, x: Array, shape: LaunchConfig) -> LaunchConfig:
        """For one of our own kernels, with x like this one."""
        flags: dict[str, int | str] = {"NORMED": int(self.norm is not None), "ADD": int(self.add)}
        if self.activation is not None:
            flags["ACTIVATION"] = self.activation
        types = {"ACT": type_of(x), "WEIGHT": self.weight.format.name}
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
        data, end = self._device.empty((rows, format.size(width)), np.uint8), 0
        for matrix in matrices:
            for part, raw in matrix.slabs(_UPLOAD_BYTES):
                to, given = data[end + part.start : end + part.stop], self._device.from_host(np.ascontiguousarray(raw))
                if matrix.format is format:
                    to[...] = given
                else:
                    self._narrow(to.view(np.float16), given.view(np.float32))
            end += matrix.shape[0]
        return Matrix(format, data, (rows, width))

    def rows(self, matrix: Matrix | Linear, rows: slice = slice(None)) -> np.ndarray:
        parts = matrix.parts if isinstance(matrix, Linear) else (matrix,)
        first, stop, _ = rows.indices(matrix.shape[0])
        values, end = np.empty((max(0, stop - first), matrix.shape[1]), np.float32), 0
        for part in parts:
            start, end = end, end + part.shape[0]
            begin, last = max(first, start), min(stop, end)
            if begin < last:
                raw = self._device.to_host(part.data[begin - start : last - start])
                part.format.dequantize(raw, values[begin - first : last - first])
        return values

    def embed(self, table: Matrix, ids: Array, scale: float = 1.0) -> Array:
        width = table.shape[1]
        x = self._device.empty((len(ids), width), np.float32)
        shape = LaunchConfig({"ACT": "float", "WEIGHT": table.format.name}, threads_for(width // 8))
        self._launch("embed", (len(ids),), shape, x, table.data, ids, width, float(scale))
        return x

    def rms_norm(self, x: Array, norm: tuple[Array, float], residual: Array | None = None) -> None:
        (rows, n), (gain, eps), y = x.shape, norm, x if residual is None else residual
        _check_width(n)
        most = MOST_THREADS if rows <= SMALL_ROWS else 256  # as in `_narrow`
        shape = LaunchConfig({"ACT": "float", "ADD": int(residual is not None)}, threads_for(-(-n // 8), most))
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
        y = self._device.empty((rows, out), np.float32) if residual is None else residual
        if len(w.parts) == 1:
            self._multiply(y, x, _Product(w.parts[0], w.bias, norm, residual is not None, activation), recorded)
            return y
        # Parts of several formats: a launch for each, and what needs gate and up together comes behind them.
        whole = y if activation is None else self._device.empty((rows, w.shape[0]), np.float32)
        end = 0
        for matrix in w.parts:
            columns = slice(end, end := end + matrix.shape[0])
            bias = None if w.bias is None else w.bias[columns]
            product = _Product(matrix, bias, norm, residual is not None, None)
            self._multiply(whole[:, columns], x, product, recorded)
        if activation is not None:
            self._activate(y, whole, activation)
        return y

    def _multiply(self, y: Array, x: Array, of: _Product, recorded: bool) -> None:
        """`linear` with one matrix into y, whose rows may be parts of wider ones."""
        rows = len(x)
        if rows > SMALL_ROWS and not recorded and of.weight.format.name in _PLAIN:
            self._large(y, x, of)
            return
        for first in range(0, rows, SMALL_ROWS):
            part = slice(first, first + SMALL_ROWS)
            self._small(y[part], x[part], of)

    def _small(self, y: Array, x: Array, of: _Product) -> None:
        """`linear` of at most SMALL_ROWS rows into y."""
        (rows, width), processors, weight = x.shape, self._device.processors, of.weight
        if rows > GEMV_ROWS:
            if rows > UNROUNDED_ROWS:
                x, of = self._narrowed(x, of), of._replace(norm=None)
            self._tensor_cores(y, x, of)
            return
        gain, eps = of.norm or (None, 0.0)
        shape, blocks = launch_configs.gemv(rows, weight.shape[0], width, processors)
        sizes = rows, width, y.shape[1], row_stride(y)
        self._launch("gemv", (blocks,), of.typed(x, shape), y, x, weight.data, of.bias, gain, *sizes, float(eps))

    def _tensor_cores(self, y: Array, x: Array, of: _Product) -> None:
        """`linear` of at most SMALL_ROWS rows into y, x float32 or of the type of products with these weights."""
        (rows, width), out, device, weight = x.shape, y.shape[1], self._device, of.weight
        gain, eps = of.norm or (None, 0.0)
        machine = device.processors, device.shared_memory
        plain, blocks, parts = launch_configs.gemm_small(rows, weight.shape[0], width, *machine)
        shape, sizes = of.typed(x, plain), (rows, width, out, row_stride(y))
        if parts == 1 or of.norm is not None:
            self._launch("gemm_small", (blocks, 1), shape, y, x, weight.data, of.bias, gain, *sizes, float(eps))
            return
        sums = device.empty((parts, rows, weight.shape[0]), np.float32)
        self._launch("gemm_small", (blocks, parts), shape, sums, x, weight.data, None, None, *sizes, 0.0)
        grid = (-(-rows * out // shape.threads),)
        args = (y, sums, of.bias, parts, rows, out, row_stride(y))
        self._launch("gemm_small_sum", grid, shape._replace(shared=0), *args, file="gemm_small")

    def _large(self, y: Array, x: Array, of: _Product) -> None:
        """`linear` of any number of rows into y."""
        rows, out = len(x), of.weight.shape[0]
        product = y if of.activation is None else self._device.empty((rows, out), np.float32)
        x = self._narrowed(x, of)
        self._device.gemm(product, x, of.weight.data.view(x.dtype), add=of.add)
        if of.bias is not None:
            shape = LaunchConfig({"ACT": "float"}, threads_for(out))
            grid = -(-out // shape.threads), rows
            self._launch("add_bias", grid, shape, product, of.bias, out, row_stride(product))
        if of.activation is not None:
            self._activate(y, product, of.activation)

    def _activate(self, y: Array, gate_up: Array, activation: str) -> None:
        """y = activation(gate) * up of [gate | up]."""
        (rows, half), threads = y.shape, threads_for(-(-y.shape[1] // 8))
        shape = LaunchConfig({"ACT": "float", "ACTIVATION": activation}, threads)
        self._launch("activate_mul", (-(-half // (8 * threads)), rows), shape, y, gate_up, half)

    def _narrowed(self, x: Array, of: _Product) -> Array:
        """x (T, in) in the type of products with these weights, normalised before where there is a norm."""
        narrow = self._device.empty(x.shape, _PLAIN.get(of.weight.format.name, np.float16))
        self._narrow(narrow, x, of.norm)
        return narrow

    def _narrow(self, y: Array, x: Array, norm: tuple[Array, float] | None = None) -> None:
        """y = x (T, n) in y's own type, normalised before where there is a norm."""
        gain, eps = norm or (None, 0.0)
        rows, n = x.shape
        # Few rows leave most of the machine idle: as many threads to each as there may be.
        most = MOST_THREADS if rows <= SMALL_ROWS else 256
        defines: dict[str, int | float | str] = {"ACT": "float", "TO": type_of(y), "NORMED": int(norm is not None)}
        self._launch("narrow", (rows,), LaunchConfig(defines, threads_for(-(-n // 8), most)), y, x, gain, n, float(eps))


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
