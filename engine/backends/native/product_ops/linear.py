"""The ops on matrices and on rows of activations."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.native.kernels.linear.dequantize import DequantizeArguments, dequantize_rows
from polarlm.engine.backends.native.kernels.linear.tiling import largest_tiling, tiling
from polarlm.engine.backends.native.kernels.rows import (
    ROW_PIECE,
    ChangeArguments,
    NormArguments,
    change_rows,
    gate,
    gate_arguments,
    norm_rows,
)
from polarlm.engine.backends.native.product_ops.loading import CachedTiles, LoadOps
from polarlm.engine.backends.native.product_ops.multiplication import Multiplication, compiled_tiling
from polarlm.engine.backends.ops import PLAIN, Fusion
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders.config import is_gated


class LinearOps(LoadOps):
    def rows(self, matrix: Matrix | Linear, rows: slice = slice(None)) -> np.ndarray:
        parts = matrix.parts if isinstance(matrix, Linear) else (matrix,)
        first, out = 0, []
        start, stop, _ = rows.indices(matrix.shape[0])
        for part in parts:
            ids = np.arange(max(start, first), min(stop, first + part.shape[0])) - first
            if isinstance(part.data, CachedTiles):
                ids = part.data.rows(ids)
            first += part.shape[0]
            values = np.empty((len(ids), part.shape[1]), np.float32)
            out.append(self._dequantize(part, ids.astype(np.int32), 1.0, values))
        return out[0] if len(out) == 1 else np.concatenate(out)

    def embed(self, table: Matrix, ids: np.ndarray, scale: float = 1.0) -> np.ndarray:
        return self._dequantize(table, ids, scale, self._launch.empty((len(ids), table.shape[1])))

    def _dequantize(self, matrix: Matrix, ids: np.ndarray, factor: float, out: np.ndarray) -> np.ndarray:
        """Rows `ids` (n,) int32 of a matrix times `factor` → `out` (n, in) float32, which is returned."""
        columns, memory = matrix.shape[1], matrix.data.memory
        arguments = DequantizeArguments(
            weights=memory,
            ids=ids,
            y=out,
            blocks=columns // matrix.format.values,
            tile_bytes=memory.shape[1],
            columns=columns,
            factor=factor,
        )
        self._launch(dequantize_rows(matrix.format), len(ids), arguments)
        return out

    def rms_norm(self, x: np.ndarray, norm: tuple[np.ndarray, float], residual: np.ndarray | None = None) -> None:
        target = x if residual is None else residual
        weight, eps = norm
        arguments = NormArguments(
            x=x,
            weight=weight,
            target=target,
            columns=x.shape[1],
            x_stride=x.strides[0],
            stride=target.strides[0],
            eps=eps,
        )
        self._launch(norm_rows(adds=residual is not None), len(x), arguments)

    def softcap(self, x: np.ndarray, cap: float) -> None:
        self._change("softcap", x, np.array([cap], np.float32))

    def activate(self, x: np.ndarray, up: np.ndarray, activation: str) -> None:
        self._launch(gate(activation), len(x), gate_arguments(x, up, x))

    def scale(self, x: np.ndarray, factor: np.ndarray) -> None:
        self._change("scale", x, factor)

    def _change(self, name: str, x: np.ndarray, numbers: np.ndarray) -> None:
        """See `change_rows`. numbers: (1,) for all rows, or (T, 1)."""
        (rows, columns), step = x.shape, numbers.strides[0] if numbers.ndim > 1 else 0
        pieces = -(-columns // ROW_PIECE)
        self._launch(change_rows(name), rows * pieces, ChangeArguments(x, columns, x.strides[0], pieces, numbers, step))

    def linear(
        self, x: np.ndarray, w: Linear, fusion: Fusion = PLAIN, residual: np.ndarray | None = None
    ) -> np.ndarray:
        rows, level, bits = len(x), self._launch.level, self._launch.input_bits
        norm, activation, _ = fusion
        norm_key = None if norm is None else (id(norm[0]), norm[1])
        strides = x.strides, None if residual is None else residual.strides
        key = id(w), norm_key, strides, activation, rows == 1, bits
        product = self._launch.take(key)
        if product is None:
            product = Multiplication(self._launch, w, rows, fusion, adds=residual is not None)
        y = residual
        if y is None:
            # Rows whose beginnings are a power of two apart share a few sets of the caches, and several are written
            # together. What is activated is the input of another product, which takes rows at any distance.
            padding = 16 if product.activation is not None and product.width % 512 == 0 else 0
            y = self._launch.empty((rows, product.width + padding))[:, : product.width]
        chosen_tiling = tiling(rows, level, product.shared)
        if product.repeatable is not None and product.repeatable.sizes == chosen_tiling:
            product.repeat(product.repeatable, x, y)
        else:
            sizes, most = chosen_tiling, largest_tiling(level, product.shared)
            if rows > 1:
                sizes = compiled_tiling(self._launch, sizes, most, product.kernels)
            product.launch(x, y, sizes)
        self._launch.keep(key, product)
        return y if activation is None or product.activation else self.activate_halves(y, activation)

    def activate_halves(self, x: np.ndarray, activation: str) -> np.ndarray:
        if not is_gated(activation):
            self.activate(x, x, activation)
            return x
        half = x.shape[1] // 2
        out = self._launch.empty((len(x), half))
        self._launch(gate(activation), len(x), gate_arguments(x[:, :half], x[:, half:], out))
        return out
