"""The ops on matrices, on rows of activations, and of a mixture of experts: the rows of an expert are multiplied
together, so its weights are read once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.native.kernels.experts import (
    AddArguments,
    ArrangeArguments,
    CombineArguments,
    RouteArguments,
    RouteSpec,
    add_changes,
    arrange,
    combine,
    route,
)
from polarlm.engine.backends.native.kernels.linear.activations import Inputs
from polarlm.engine.backends.native.kernels.linear.dequantize import DequantizeArguments, dequantize_rows
from polarlm.engine.backends.native.kernels.linear.product import ExpertRows
from polarlm.engine.backends.native.kernels.linear.tiling import Tiling, expert_tiling, tiling
from polarlm.engine.backends.native.kernels.rows import (
    ROW_PIECE,
    CentreArguments,
    ChangeArguments,
    NormArguments,
    RowGateArguments,
    centre_rows,
    change_rows,
    gate,
    gate_arguments,
    gate_rows,
    norm_rows,
)
from polarlm.engine.backends.native.launch import KernelOps
from polarlm.engine.backends.native.product_ops.loading import CachedTiles, LoadOps
from polarlm.engine.backends.native.product_ops.multiplication import (
    Multiplication,
    bfloat_panels,
    compiled_tiling,
    experts_of,
)
from polarlm.engine.backends.ops import PLAIN, ExpertNetwork, Fusion, Routing
from polarlm.engine.jit.lang import Kernel
from polarlm.engine.weight_formats import Deltas, ExpertLinear, Linear, Matrix
from polarlm.model_loaders.config import MOST_EXPERTS, Experts, is_gated


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

    def centre(self, x: np.ndarray) -> None:
        self._launch(centre_rows(), len(x), CentreArguments(x, x.shape[1], x.strides[0]))

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
        if product.to_matrices:
            y = bfloat_panels(self._launch, rows, product.width)
        elif y is None:
            # Rows whose beginnings are a power of two apart share a few sets of the caches, and several are written
            # together. What is activated is the input of another product, which takes rows at any distance.
            padding = 16 if product.activation is not None and product.width % 512 == 0 else 0
            y = self._launch.empty((rows, product.width + padding))[:, : product.width]
        chosen_tiling = tiling(rows, level, product.shared)
        if product.repeatable is not None and product.repeatable.sizes == chosen_tiling:
            product.repeat(product.repeatable, x, y)
        else:
            sizes = chosen_tiling
            if rows > 1:
                sizes = compiled_tiling(self._launch, sizes, rows, product.shared, product.kernels)
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


class _PanelRows(NamedTuple):
    """The rows of all experts in panels; see `kernels.experts.arrange`. Without adapters, bases is chosen. scales
    (T, 1): of the rows' adapters."""

    tiling: Tiling
    chosen: np.ndarray
    bases: np.ndarray
    scales: np.ndarray | None
    sources: np.ndarray
    panel_places: np.ndarray
    places: np.ndarray


class ExpertOps(KernelOps):
    _heads: dict[int, Routing]  # by H: the number of its head of each row (T, H), for as many T as there may be

    def route(
        self, logits: np.ndarray, rule: Experts, bias: np.ndarray | None = None, factors: np.ndarray | None = None
    ) -> Routing:
        assert rule.count <= MOST_EXPERTS
        shape = len(logits), rule.top_k
        routing = Routing(self._launch.empty(shape, np.int32), self._launch.empty(shape))
        arguments = RouteArguments(
            logits=logits,
            bias=bias,
            ids=routing.ids,
            weights=routing.weights,
            stride=logits.strides[0],
            count=rule.count,
            top_k=rule.top_k,
            scale=rule.scale,
            factors=factors,
            groups=rule.groups,
            top_groups=rule.top_groups,
        )
        best_of_group = rule.best_of_group if rule.groups > 1 else 0
        choice = RouteSpec(rule.scoring, bias is not None, rule.renormalize, factors is not None, best_of_group)
        self._launch(route(choice), len(logits), arguments)
        return routing

    def gate(self, x: np.ndarray, logits: np.ndarray) -> None:
        (rows, columns), count = x.shape, logits.shape[1]
        parts = 1 if count == columns else count
        arguments = RowGateArguments(
            x=x,
            logits=logits,
            columns=columns // parts,
            parts=parts,
            x_stride=x.strides[0],
            stride=logits.strides[0],
        )
        self._launch(gate_rows(shared=count < columns), rows * parts, arguments)

    def experts(
        self,
        x: np.ndarray,
        routing: Routing,
        network: ExpertNetwork,
        residual: np.ndarray | None = None,
        adapters: Routing | None = None,
    ) -> np.ndarray:
        gate_up, down, fusion = network
        up_changes: Sequence[Multiplication] = ()
        down_changes: Sequence[Multiplication] = ()
        numbers = max(0 if w.deltas is None else w.deltas.a.count for w in (gate_up, down))
        if adapters is None or numbers == 0:
            adapters, numbers = None, 0
        else:
            up_changes = self._changes(gate_up.deltas, len(x), Fusion(fusion.norm))
            down_changes = self._changes(down.deltas, len(x), PLAIN)
            fusion = fusion._replace(consumer=None)
        up = Multiplication(self._launch, gate_up, len(x), Fusion(fusion.norm) if up_changes else fusion)
        down_product = Multiplication(self._launch, down, len(x), PLAIN)
        products = (up, down_product, *up_changes, *down_changes)
        order = self._arrange(routing, gate_up.count, products, adapters, numbers)
        self._expect(order.bases, gate_up, down)
        shape = len(order.sources), up.width
        y = bfloat_panels(self._launch, *shape) if up.to_matrices else self._launch.empty(shape)
        up.launch(x, y, order.tiling, order.bases, order.sources)
        self._add_changes(y, x, up_changes, order, order.sources)
        if fusion.activation is not None and up.activation is None:
            y = self.activate_halves(y, fusion.activation)
        results = self._launch.empty((len(order.panel_places), down_product.width))
        down_product.launch(y, results, order.tiling, order.bases, order.panel_places)
        self._add_changes(results, y, down_changes, order, order.panel_places)
        return self._combine(results, order, routing, residual)

    def _changes(self, deltas: Deltas | None, rows: int, fusion: Fusion) -> Sequence[Multiplication]:
        """The products of what adapters add, the first one with the inputs; none if they add nothing."""
        if deltas is None:
            return ()
        return tuple(Multiplication(self._launch, w, rows, how) for w, how in ((deltas.a, fusion), (deltas.b, PLAIN)))

    def _add_changes(
        self, y: np.ndarray, x: np.ndarray, products: Sequence[Multiplication], order: _PanelRows, sources: np.ndarray
    ) -> None:
        """Add what adapters change to y (P, out), the products of x, in which `sources` are the places' rows."""
        if not products:
            return
        for product, rows_of_places in zip(products, (sources, order.panel_places), strict=True):
            changes = self._launch.empty((len(sources), product.width))
            product.launch(x, changes, order.tiling, order.chosen, rows_of_places)
            x = changes
        self._launch(add_changes(), len(y), AddArguments(y, x, order.sources, order.scales, y.shape[1]))

    def multiply_heads(self, x: np.ndarray, w: ExpertLinear) -> np.ndarray:
        """As `experts`, with the head of each row as its one expert."""
        if w.count not in self._heads:
            numbers = np.tile(np.arange(w.count, dtype=np.int32), max(self.prefill_rows, self.batch_rows))[:, None]
            self._heads[w.count] = Routing(numbers, np.ones(numbers.shape, np.float32))
        routing = self._heads[w.count].part(slice(0, len(x)))
        product = Multiplication(self._launch, w, len(x), PLAIN)
        order = self._arrange(routing, w.count, [product])
        results = self._launch.empty((len(order.sources), product.width))
        product.launch(x, results, order.tiling, order.chosen, order.sources)
        return self._combine(results, order, routing)

    def _combine(
        self, results: np.ndarray, order: _PanelRows, routing: Routing, residual: np.ndarray | None = None
    ) -> np.ndarray:
        """The weighted sums of the results (P, out) of each row's experts, added to `residual` if that is given."""
        out = self._launch.empty((len(routing.ids), results.shape[1])) if residual is None else residual
        arguments = CombineArguments(
            results=results,
            places=order.places,
            weights=routing.weights,
            y=out,
            columns=out.shape[1],
            top_k=routing.ids.shape[1],
            stride=out.strides[0],
        )
        self._launch(combine(adds=residual is not None), len(out), arguments)
        return out

    def _arrange(
        self,
        routing: Routing,
        count: int,
        products: Sequence[Multiplication],
        adapters: Routing | None = None,
        numbers: int = 0,
    ) -> _PanelRows:
        """The rows in the order of their experts, or of their adapters and experts. count: the number of experts.
        numbers: of pairs of these, with adapters."""
        adapts = adapters is not None

        def kernels(sizes: Tiling) -> list[Kernel]:
            return [arrange(sizes.rows, adapts=adapts), *itertools.chain(*(one.kernels(sizes) for one in products))]

        rows, top_k = routing.ids.shape
        pairs, slots = rows * top_k, min(rows * top_k, numbers or count)
        level, inputs = self._launch.level, Inputs.shared(itertools.chain(*(product.inputs for product in products)))
        sizes = expert_tiling(pairs // count, level, inputs)
        sizes = compiled_tiling(self._launch, sizes, pairs // count, inputs, kernels)
        row_tile = sizes.rows
        places = -(-(pairs + slots * (row_tile - 1)) // row_tile) * row_tile
        chosen, bases = (self._launch.empty((slots, len(ExpertRows._fields)), np.int64) for _ in range(2))
        order = _PanelRows(
            sizes,
            chosen=chosen,
            bases=bases if adapts else chosen,
            scales=None if adapters is None else adapters.weights,
            sources=self._launch.empty((places,), np.int32),
            panel_places=self._launch.empty((places,), np.int32),
            places=self._launch.empty((rows, top_k), np.int32),
        )
        arguments = ArrangeArguments(
            ids=routing.ids,
            weights=routing.weights,
            chosen=order.chosen,
            sources=order.sources,
            panel_places=order.panel_places,
            places=order.places,
            pairs=pairs,
            top_k=top_k,
            count=numbers or count,
            slots=slots,
            most=places,
            adapters=None if adapters is None else adapters.ids,
            bases=order.bases,
            experts=count,
        )
        self._launch(arrange(row_tile, adapts=adapts), 1, arguments)
        return order

    def _expect(self, chosen: np.ndarray, *linears: ExpertLinear) -> None:
        """Let the system read ahead what the chosen experts lack in memory."""
        cached = [part.data for w in linears for part in w.parts if isinstance(part.data, CachedTiles)]

        def expect(chosen: np.ndarray) -> None:
            for data in cached:
                data.expect(experts_of(chosen))

        if cached:
            self._launch.call(expect, chosen)
