"""Matrices on a GPU, and products with them: launches of the kernels in `cuda/linear/`.

Activations, norm weights and biases are float32. Matrices keep the format of the file if kernels can read it, otherwise
they become half precision. Products convert x to the matrix's type, half precision for packed formats, and add in
float32. Few rows take our own kernels, with packed matrices more of them; many rows cuBLASLt.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.cuda import launch_configs, packed, wide
from polarlm.engine.backends.cuda.device import Array, kernel_source, row_stride
from polarlm.engine.backends.cuda.launch import DeviceOps, LaunchConfig, Product, result_type, threads_for, type_of
from polarlm.engine.backends.cuda.launch_configs import DEQUANTIZED_BYTES, GEMV_ROWS
from polarlm.engine.backends.kv import Norm
from polarlm.engine.backends.ops import PLAIN, Fusion
from polarlm.engine.errors import EngineError
from polarlm.engine.weight_formats import Linear, Matrix, StoredMatrix, WeightFormat, get
from polarlm.model_loaders.config import is_gated

# Bytes of a file that are uploaded at a time. Norm weights later occupy the memory of these uploads, so that larger
# parts would leave more memory unused.
_UPLOAD_BYTES = 8 << 20
_TILED_ROWS = 256  # a multiple of the rows of a tile of cuBLAS


class LinearOps(DeviceOps):
    """The ops with matrices: loading, reading rows, products; RMS norm, and ops on each number of a row."""

    def matrix_bytes(self, format: WeightFormat, count: int) -> int:
        format = self.stored_format(format)
        return count // format.values * packed.block_bytes(format) if packed.is_packed(format) else format.size(count)

    def stored_format(self, format: WeightFormat) -> WeightFormat:
        return format if kernel_source.can_read(format.name) else get("f16")

    def load(self, matrices: Sequence[StoredMatrix]) -> tuple[Matrix, ...]:
        runs = itertools.groupby(matrices, key=lambda matrix: self.stored_format(matrix.format))
        return tuple(self.stack(format, list(parts)) for format, parts in runs)

    def stack(self, format: WeightFormat, matrices: Sequence[StoredMatrix]) -> Matrix:
        """`matrices` stacked. Only the rows of one upload exist twice."""
        count, width = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        _check_width(width)
        is_packed, end = packed.is_packed(format), 0
        if is_packed:  # no file has all rows of the last tile
            data = self._device.zeros(packed.tiles(format, count, width), np.uint8)
            origins = [None if part is None else self._device.from_host(part) for part in packed.origins(format)]
        else:
            data = self._device.empty((count, format.size(width)), np.uint8)
        for matrix in matrices:
            is_kept = matrix.format is format
            for part, raw in matrix.slabs(_UPLOAD_BYTES if is_kept else matrix.format.size(_UPLOAD_BYTES // 4)):
                values = np.ascontiguousarray(raw) if is_kept else _as_float32(matrix.format, raw, width)
                rows = slice(end + part.start, end + part.stop)
                if is_packed:
                    self._repack(format, data, self._device.from_host(values), origins, rows.start, width)
                elif is_kept:
                    data[rows] = self._device.from_host(values)
                else:
                    self._narrow(data[rows].view(np.float16), self._device.from_host(values))
            end += matrix.shape[0]
        return Matrix(format, data, (count, width))

    def _repack(
        self, format: WeightFormat, data: Array, raw: Array, origins: Sequence[Array | None], first: int, width: int
    ) -> None:
        """Rows of a file, raw (rows, bytes of a row), as rows `first` … of a packed matrix."""
        config = LaunchConfig({"WEIGHT": format.name}, threads_for(width // 8))
        grid = len(raw), -(-width // (8 * config.threads))
        self._launch("repack", grid, config, data, raw, *origins, first, width, format.nbytes)

    def rows(self, matrix: Matrix | Linear, rows: slice = slice(None)) -> np.ndarray:
        parts = matrix.parts if isinstance(matrix, Linear) else (matrix,)
        first, stop, _ = rows.indices(matrix.shape[0])
        values, end = np.empty((max(0, stop - first), matrix.shape[1]), np.float32), 0
        for part in parts:
            start, end = end, end + part.shape[0]
            begin, last = max(first, start), min(stop, end)
            if begin < last:
                self._read(part, slice(begin - start, last - start), values[begin - first : last - first])
        return values

    def _read(self, matrix: Matrix, rows: slice, out: np.ndarray) -> None:
        """Write rows of a matrix to `out` (rows, in) float32."""
        if not packed.is_packed(matrix.format):
            matrix.format.dequantize(self._device.to_host(matrix.data[rows]), out)
            return
        step = max(1, _UPLOAD_BYTES // (4 * matrix.shape[1]))
        for first in range(rows.start, rows.stop, step):
            ids = np.arange(first, min(first + step, rows.stop), dtype=np.int32)
            values = self._device.to_host(self.embed(matrix, self._device.from_host(ids)))
            out[first - rows.start : first - rows.start + len(ids)] = values

    def embed(self, table: Matrix, ids: Array, scale: float = 1.0) -> Array:
        width = table.shape[1]
        x = self._device.empty((len(ids), width), np.float32)
        config = LaunchConfig({"WEIGHT": table.format.name}, threads_for(width // 8))
        self._launch("embed", (len(ids),), config, x, table.data, ids, width, float(scale))
        return x

    def rms_norm(self, x: Array, norm: tuple[Array, float], residual: Array | None = None) -> None:
        (rows, n), (weight, eps), y = x.shape, norm, x if residual is None else residual
        _check_width(n)
        config = LaunchConfig({"ADD": int(residual is not None)}, launch_configs.row_threads(rows, -(-n // 8)))
        self._launch("rms_norm", (rows,), config, y, x, weight, n, row_stride(y), row_stride(x), float(eps))

    def linear(self, x: Array, w: Linear, fusion: Fusion = PLAIN, residual: Array | None = None) -> Array:
        norm, activation, consumer = fusion
        if activation is not None and not is_gated(activation):
            y = self.linear(x, w, Fusion(norm))
            self.activate(y, y, activation)
            return y
        rows, out = len(x), w.shape[0] if activation is None else w.shape[0] // 2
        dtype = input_type(consumer, rows) if activation is not None else np.float32
        y = self._device.empty((rows, out), dtype) if residual is None else residual
        if len(w.parts) == 1 and (activation is None or gates(w.parts[0].format, w.shape[0])):
            self._multiply(y, x, Product(w.parts[0], w.bias, norm, residual is not None, activation))
            return y
        # A product for each part, or for two; the activation follows, since it needs gate and up together.
        whole = y if activation is None else self._device.empty((rows, w.shape[0]), np.float32)
        if rows > GEMV_ROWS and len({_narrow_type(matrix) for matrix in w.parts}) == 1:
            x, norm = self.narrow_input(x, Product(w.parts[0], None, norm, False, None)), None
        end, parts = 0, list(w.parts)
        while parts:
            matrix = parts.pop(0)
            is_joined = bool(parts) and packed.joins(matrix, parts[0]) and rows <= wide.WIDE_ROWS
            second = parts.pop(0) if is_joined else None
            columns = slice(end, end := end + matrix.shape[0] + (0 if second is None else second.shape[0]))
            bias = None if w.bias is None else w.bias[columns]
            product = Product(matrix, bias, norm, residual is not None, None, second)
            self._multiply(whole[:, columns], x, product)
        if activation is not None:
            self.activate_mul(y, whole, activation)
        return y

    def _multiply(self, y: Array, x: Array, product: Product) -> None:
        """`linear` with one matrix into y, which may be columns of a wider array."""
        (rows, width), weight, launch = x.shape, product.weight, self._launch
        is_packed = packed.is_packed(weight.format)
        if (rows > GEMV_ROWS and not is_packed) or rows > wide.WIDE_ROWS:
            self._multiply_many_rows(y, x, product)
        elif rows > GEMV_ROWS:
            wide.multiply(self._device, launch, y, self.narrow_input(x, product), product._replace(norm=None))
        elif is_packed:
            packed.multiply(self._device, launch, y, x, product)
        else:
            norm_weight, eps = product.norm or (None, 0.0)
            config, blocks = launch_configs.gemv(rows, weight.shape[0], width, self._device.processors)
            sizes = rows, width, y.shape[1], row_stride(y)
            config = product.with_types(y, config)
            launch("gemv", (blocks,), config, y, x, weight.data, product.bias, norm_weight, *sizes, float(eps))

    def _multiply_many_rows(self, y: Array, x: Array, product: Product) -> None:
        """`linear` of any number of rows into y, by cuBLASLt."""
        rows, out = len(x), product.weight.shape[0]
        whole = y if product.activation is None else self._device.empty((rows, out), np.float32)
        x = self.narrow_input(x, product)
        if packed.is_packed(product.weight.format):
            self._dequantized_product(whole, x, product)
        else:
            self._device.gemm(whole, x, product.weight.data.view(x.dtype), product.bias, add=product.add)
        if product.activation is not None:
            self.activate_mul(y, whole, product.activation)

    def _dequantized_product(self, y: Array, x: Array, product: Product) -> None:
        """y = x @ weightᵀ + bias, or += with `add`, of a packed matrix: DEQUANTIZED_BYTES of it at a time."""
        weight, (out, width) = product.weight, product.weight.shape
        step = min(out, max(packed.ROWS, DEQUANTIZED_BYTES // (2 * width)))
        if step < out:  # on an H200 cuBLAS took three times as long for 1,170 rows as for whole tiles
            step -= step % (_TILED_ROWS if step > _TILED_ROWS else packed.ROWS)
        values = self._launch.halves(step * width).reshape(step, width)
        config = LaunchConfig({"WEIGHT": weight.format.name}, threads_for(width))
        for first in range(0, out, step):
            part = values[: min(step, out - first)]
            blocks = -(-len(part) // packed.ROWS)
            self._launch("dequantize", (blocks,), config, part, weight.data, first, len(part), width)
            columns = slice(first, first + len(part))
            bias = None if product.bias is None else product.bias[columns]
            self._device.gemm(y[:, columns], x, part, bias, add=product.add)

    def activate_mul(self, y: Array, gate_up: Array, activation: str) -> None:
        """y = activation(gate) * up of [gate | up]."""
        (rows, half), threads = y.shape, threads_for(-(-y.shape[1] // 8))
        config = LaunchConfig({"ACTIVATION": activation, **result_type(y)}, threads)
        self._launch("activate_mul", (-(-half // (8 * threads)), rows), config, y, gate_up, half)

    def centre(self, x: Array) -> None:
        rows, n = x.shape
        self._launch("centre", (rows,), LaunchConfig({}, threads_for(n)), x, n, row_stride(x))

    def softcap(self, x: Array, cap: float) -> None:
        (rows, n), threads = x.shape, threads_for(x.shape[1])
        self._launch("softcap", (-(-n // threads), rows), LaunchConfig({}, threads), x, n, row_stride(x), float(cap))

    def activate(self, x: Array, up: Array, activation: str) -> None:
        self._elementwise(activation, x, up)

    def scale(self, x: Array, factor: Array) -> None:
        self._elementwise("scaled", x, factor)

    def gate(self, x: Array, logits: Array) -> None:
        self._elementwise("gated", x, logits)

    def _elementwise(self, function: str, x: Array, other: Array) -> None:
        """x = function(x, other), in place; see `elementwise.cu`. A vector `other` serves every row."""
        (rows, n), threads = x.shape, threads_for(x.shape[1])
        group = n // other.shape[-1]  # columns that share a number
        config = LaunchConfig({"ACTIVATION": function, "GROUPED": int(group > 1)}, threads)
        pitch = row_stride(other) if other.ndim > 1 else np.int64(0)
        self._launch("elementwise", (-(-n // threads), rows), config, x, other, n, group, row_stride(x), pitch)

    def narrow_input(self, x: Array, product: Product) -> Array:
        """x (T, in), normalised if the product has a norm, in the type in which it takes x: x itself if it is of it."""
        if x.dtype != np.float32:
            return x
        narrow = self._device.empty(x.shape, _narrow_type(product.weight))
        self._narrow(narrow, x, product.norm)
        return narrow

    def _narrow(self, y: Array, x: Array, norm: Norm = None) -> None:
        """y = x (T, n) in y's type; with a norm, x normalised."""
        norm_weight, eps = norm or (None, 0.0)
        rows, n = x.shape
        defines: dict[str, int | float | str] = {"TO": type_of(y), "NORMED": int(norm is not None)}
        config = LaunchConfig(defines, launch_configs.row_threads(rows, -(-n // 8)))
        self._launch("narrow", (rows,), config, y, x, norm_weight, n, float(eps))


def _narrow_type(matrix: Matrix) -> type[np.generic]:
    """The dtype in which products of more than GEMV_ROWS rows with `matrix` take x."""
    return np.uint16 if matrix.format.name == "bf16" else np.float16


def input_type(w: Linear | None, rows: int) -> type[np.generic]:
    """The dtype in which all products of `rows` rows at once with `w` take x: float32 where they convert x themselves,
    where they differ, and without `w`."""
    types = {_narrow_type(part) for part in w.parts} if w is not None and rows > GEMV_ROWS else set()
    return types.pop() if len(types) == 1 else np.float32


def gates(format: WeightFormat, rows: int) -> bool:
    """Whether products with a matrix [gate | up] of `rows` rows apply the activation: in packed formats both must be
    whole tiles."""
    return not packed.is_packed(format) or rows % (2 * packed.ROWS) == 0


def _as_float32(format: WeightFormat, raw: np.ndarray, width: int) -> np.ndarray:
    """Rows of a file, uint8 (rows, bytes of a row), as float32 (rows, width)."""
    if format.name == "f32":
        return np.ascontiguousarray(raw).view(np.float32)
    values = np.empty((len(raw), width), np.float32)
    format.dequantize(np.ascontiguousarray(raw), values)
    return values


def _check_width(width: int) -> None:
    """Raise EngineError for rows that kernels cannot read in whole groups of 8 values."""
    if width % 8:
        raise EngineError(
            f"This model has matrices with rows of {width} numbers, and the GPU takes multiples of 8: "
            "run it with device=cpu",
            settings=("device",),
        )
