"""Products with weights in tiles."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.native import tiles
from polarlm.engine.backends.native.expert_cache import CachedTiles
from polarlm.engine.backends.native.kernels.linear.activations import (
    Inputs,
    RowArguments,
    are_matrices,
    inputs_for,
    interleave_rows,
    panel_bytes,
    quantize_rows,
)
from polarlm.engine.backends.native.kernels.linear.dequantize import DequantizeArguments, dequantize_rows
from polarlm.engine.backends.native.kernels.linear.matrix_sums import together
from polarlm.engine.backends.native.kernels.linear.product import (
    Product,
    ProductArguments,
    prefetched_pieces,
    product,
    units,
)
from polarlm.engine.backends.native.kernels.linear.tiling import SINGLE, Tiling, largest_tiling, tiling
from polarlm.engine.backends.native.kernels.prefetch import NO_HINT
from polarlm.engine.backends.native.kernels.rows import (
    ROW_PIECE,
    NormArguments,
    ScaleArguments,
    SoftcapArguments,
    gate,
    gate_arguments,
    norm_rows,
    scale_rows,
    softcap_rows,
)
from polarlm.engine.backends.native.loading import LoadOps
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.isa.levels import Level
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders.config import is_gated


class LinearOps(LoadOps):
    """The ops on matrices and on rows of activations."""

    def rows(self, matrix: Matrix | Linear, rows: slice = slice(None)) -> np.ndarray:
        parts = matrix.parts if isinstance(matrix, Linear) else (matrix,)
        first, out = 0, []
        start, stop, _ = rows.indices(matrix.shape[0])
        for part in parts:
            own = np.arange(max(start, first), min(stop, first + part.shape[0])) - first
            if isinstance(part.data, CachedTiles):
                own = part.data.rows(own)
            first += part.shape[0]
            values = np.empty((len(own), part.shape[1]), np.float32)
            out.append(self._dequantize(part, own.astype(np.int32), 1.0, values))
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
        rows, columns = x.shape
        pieces = -(-columns // ROW_PIECE)
        arguments = SoftcapArguments(x=x, columns=columns, stride=x.strides[0], pieces=pieces, cap=cap)
        self._launch(softcap_rows(), rows * pieces, arguments)

    def activate(self, x: np.ndarray, up: np.ndarray, activation: str) -> None:
        self._launch(gate(activation), len(x), gate_arguments(x, up, x))

    def scale(self, x: np.ndarray, factor: np.ndarray) -> None:
        rows, columns = x.shape
        pieces = -(-columns // ROW_PIECE)
        arguments = ScaleArguments(x=x, columns=columns, stride=x.strides[0], pieces=pieces, factor=factor)
        self._launch(scale_rows(), rows * pieces, arguments)

    def linear(
        self,
        x: np.ndarray,
        w: Linear,
        *,
        norm: tuple[np.ndarray, float] | None = None,
        residual: np.ndarray | None = None,
        activation: str | None = None,
        then: Linear | None = None,
        recorded: bool = False,
    ) -> np.ndarray:
        gates = activation if activation is not None and is_gated(activation) and _has_halves(w) else None

        def spec(part: Matrix, sizes: Tiling) -> Product:
            adds, has_bias = residual is not None, w.bias is not None
            return Product(part.format, sizes, adds, has_bias, gates, inputs=inputs_of(part, level, rows, recorded))

        level, rows = self._launch.level, len(x)
        kinds = tuple(dict.fromkeys(inputs_of(part, level, rows, recorded) for part in w.parts))

        def products(sizes: Tiling) -> list[Kernel[ProductArguments]]:
            return [product(spec(part, sizes)) for part in w.parts]

        def kernels(sizes: Tiling) -> list[Kernel]:
            return [*(panel_kernel(norm is not None, sizes.rows, kind) for kind in kinds), *products(sizes)]

        shared = Inputs.shared(kinds)
        sizes, most = tiling(rows, level, shared), largest_tiling(level, shared)
        # Kernels are specialized by row count. Until the exact one is compiled, that for many is used; if it cannot be
        # compiled, that of one row. Results are equal.
        can_choose = not recorded and rows > 1 and sizes != most and self._launch.has_loaded(kernels(most))
        if can_choose and not self._launch.has_loaded(kernels(sizes)):
            self._launch.library.expect(kernels(sizes))
            sizes = most
        if rows > 1 and not self._launch.can_run(kernels(sizes)):
            sizes = SINGLE
        width = w.shape[0] // 2 if gates else w.shape[0]
        y = self._launch.empty((len(x), width)) if residual is None else residual
        inputs: dict[Inputs, np.ndarray] = {}
        first = 0
        for part, kernel in zip(w.parts, products(sizes), strict=True):
            own = spec(part, sizes)
            if own.inputs not in inputs:
                inputs[own.inputs] = self._panels(x, norm, sizes.rows, own.inputs)
            given, memory, (outputs, columns) = inputs[own.inputs], part.data.memory, part.shape
            tile_count = len(memory) // 2 if gates else len(memory)
            blocks = columns // own.block_inputs
            count = units(own, tile_count)
            arguments = ProductArguments(
                weights=memory,
                x=given,
                y=y[:, first:],
                bias=None if w.bias is None else w.bias[first:],
                hint=NO_HINT,
                blocks=blocks,
                tile_bytes=memory.shape[1],
                x_stride=given.strides[0],
                y_stride=y.strides[0],
                rows=rows,
                outputs=width if gates else outputs,
                tiles=tile_count,
            )
            grain, spare = 0, prefetched_pieces(own, level, count, blocks, rows)
            if are_matrices(level, sizes.rows, own.inputs):
                grain = together(count, 2 if gates else 1, self._launch.threads)
            self._launch(kernel, count, arguments, grain, spare)
            first += outputs
        return y if activation is None or gates else self.activate_halves(y, activation)

    def activate_halves(self, x: np.ndarray, activation: str) -> np.ndarray:
        if not is_gated(activation):
            self.activate(x, x, activation)
            return x
        rows, half = len(x), x.shape[1] // 2
        out = self._launch.empty((rows, half))
        self._launch(gate(activation), rows, gate_arguments(x[:, :half], x[:, half:], out))
        return out

    def _panels(self, x: np.ndarray, norm: tuple[np.ndarray, float] | None, row_tile: int, kind: Inputs) -> np.ndarray:
        """x (T, in), after its norm, in panels of row_tile rows.

        Returns (panels, bytes of a panel) uint8, or x itself where that is the same.
        """
        columns = x.shape[1]
        if not kind.are_words and norm is None and row_tile == 1 and x.flags.c_contiguous:
            return x
        nbytes = panel_bytes(columns, row_tile, self._launch.level, kind) if kind.are_words else 4 * columns * row_tile
        out = self._launch.empty((-(-len(x) // row_tile), nbytes), np.uint8)
        weight, eps = norm or (None, 0.0)
        arguments = RowArguments(x=x, weight=weight, out=out, columns=columns, stride=x.strides[0], eps=eps)
        self._launch(panel_kernel(norm is not None, row_tile, kind), len(x), arguments)
        return out


def inputs_of(part: Matrix, level: Level, rows: int, recorded: bool) -> Inputs:
    """How products of so many rows with a matrix read their inputs. recorded: as in `Ops.linear`."""
    return inputs_for(part.format, part.shape[1], level, waits=recorded or rows == 1)


def panel_kernel(has_norm: bool, row_tile: int, kind: Inputs, *, picks: bool = False) -> Kernel[RowArguments]:
    """The kernel that makes panels of inputs of a kind."""
    if kind is Inputs.FLOATS:
        return interleave_rows(has_norm, row_tile, picks=picks)
    return quantize_rows(has_norm, row_tile, inputs=kind, picks=picks)


def _has_halves(w: Linear) -> bool:
    """Whether one kernel can multiply by gate and up together: both halves of the outputs are whole tiles."""
    return len(w.parts) == 1 and w.shape[0] % (2 * tiles.ROWS) == 0
