"""The ops of a mixture of experts: the rows of an expert are multiplied together, so its weights are read once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.native import tiles
from polarlm.engine.backends.native.kernels.experts import (
    MOST_EXPERTS,
    ArrangeArguments,
    Choice,
    CombineArguments,
    RouteArguments,
    arrange,
    combine,
    route,
)
from polarlm.engine.backends.native.kernels.linear.activations import RowArguments, panel_bytes
from polarlm.engine.backends.native.kernels.linear.product import (
    ExpertRows,
    Product,
    ProductArguments,
    most_rows,
    product,
    units,
)
from polarlm.engine.backends.native.kernels.prefetch import NO_HINT
from polarlm.engine.backends.native.kernels.rows import RowGateArguments, gate, gate_arguments, gate_rows
from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.backends.native.linear import has_codes, panel_kernel
from polarlm.engine.weight_formats import ExpertLinear, Matrix
from polarlm.model_loaders.config import Experts

_FEW = 2  # rows per expert, on average, from which panels of several rows are faster than panels of one


class Routing(NamedTuple):
    """The experts of each row, best first: ids (T, k) int32, and their weights (T, k) float32."""

    ids: np.ndarray
    weights: np.ndarray


class _Order(NamedTuple):
    """The rows of all experts in panels; see `kernels.experts.arrange`."""

    row_tile: int
    chosen: np.ndarray
    sources: np.ndarray
    own: np.ndarray
    places: np.ndarray


class ExpertOps:
    """The ops `route`, `experts` and `gate`."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch

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
        )
        choice = Choice(rule.scoring, bias is not None, rule.renormalize, factors is not None)
        self._launch(route(choice), len(logits), arguments)
        return routing

    def gate(self, x: np.ndarray, logits: np.ndarray) -> None:
        arguments = RowGateArguments(
            x=x, logits=logits, columns=x.shape[1], x_stride=x.strides[0], stride=logits.strides[0]
        )
        self._launch(gate_rows(by_row=logits.shape[1] == 1), len(x), arguments)

    def experts(
        self,
        x: np.ndarray,
        routing: Routing,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: str,
        *,
        norm: tuple[np.ndarray, float] | None = None,
        residual: np.ndarray | None = None,
        recorded: bool = False,
    ) -> np.ndarray:
        order = self._arranged(routing, gate_up, down)
        is_gated = len(gate_up.parts) == 1 and gate_up.shape[0] % (2 * tiles.ROWS) == 0
        y = self._multiply(x, gate_up, order, order.sources, norm, activation if is_gated else None)
        if not is_gated:
            both, y = y, self._launch.empty((len(y), y.shape[1] // 2))
            half = both.shape[1] // 2
            self._launch(gate(activation), len(y), gate_arguments(both[:, :half], both[:, half:], y))
        results = self._multiply(y, down, order, order.own, None, None)
        out = self._launch.empty((len(x), results.shape[1])) if residual is None else residual
        arguments = CombineArguments(
            results=results,
            places=order.places,
            weights=routing.weights,
            y=out,
            columns=out.shape[1],
            top_k=routing.ids.shape[1],
            stride=out.strides[0],
        )
        self._launch(combine(adds=residual is not None), len(x), arguments)
        return out

    def _arranged(self, routing: Routing, *linears: ExpertLinear) -> _Order:
        """The rows by expert."""
        (rows, top_k), count = routing.ids.shape, linears[0].count
        pairs, slots = rows * top_k, min(rows * top_k, count)
        row_tile = self._row_tile(pairs / count, linears)
        most = -(-(pairs + slots * (row_tile - 1)) // row_tile) * row_tile
        order = _Order(
            row_tile,
            chosen=self._launch.empty((slots, len(ExpertRows._fields)), np.int64),
            sources=self._launch.empty((most,), np.int32),
            own=self._launch.empty((most,), np.int32),
            places=self._launch.empty((rows, top_k), np.int32),
        )
        arguments = ArrangeArguments(
            ids=routing.ids,
            chosen=order.chosen,
            sources=order.sources,
            own=order.own,
            places=order.places,
            pairs=pairs,
            top_k=top_k,
            count=count,
            slots=slots,
            most=most,
        )
        self._launch(arrange(row_tile), 1, arguments)
        return order

    def _row_tile(self, rows: float, linears: tuple[ExpertLinear, ...]) -> int:
        """Rows of a panel. rows: of an expert, on average."""
        if rows < _FEW:
            return 1
        parts = [part for w in linears for part in w.parts]
        return min(most_rows(self._launch.level, packed=has_codes(part)) for part in parts)

    def _multiply(
        self,
        x: np.ndarray,
        w: ExpertLinear,
        order: _Order,
        sources: np.ndarray,
        norm: tuple[np.ndarray, float] | None,
        activation: str | None,
    ) -> np.ndarray:
        """The products (places, out) of rows of x with their experts. sources: the row of x of each place."""
        outputs = w.shape[0] if activation is None else w.shape[0] // 2
        y = self._launch.empty((len(sources), outputs))
        panels: dict[bool, np.ndarray] = {}  # is packed → the inputs of such parts
        first = 0
        for part in w.parts:
            is_packed = has_codes(part)
            if is_packed not in panels:
                panels[is_packed] = self._panels(x, order.row_tile, sources, norm, is_packed)
            self._part(y[:, first:], panels[is_packed], part, w, order, activation)
            first += part.shape[0] // w.count
        return y

    def _part(
        self, y: np.ndarray, x: np.ndarray, part: Matrix, w: ExpertLinear, order: _Order, activation: str | None
    ) -> None:
        """Write the products of panels x with one part of the matrices of all experts, the first of y's columns."""
        spec = Product(part.format, order.row_tile, False, w.bias is not None, activation, by_expert=True)
        memory, outputs = part.data.memory, part.shape[0] // w.count
        of_expert, done = len(memory) // w.count, w.shape[0] - y.shape[1] if activation is None else 0
        tile_count = of_expert if activation is None else of_expert // 2
        arguments = ProductArguments(
            weights=memory,
            x=x,
            y=y,
            bias=None if w.bias is None else w.bias[:, done:],
            hint=NO_HINT,
            chosen=order.chosen,
            blocks=part.shape[1] // part.format.values,
            tile_bytes=memory.shape[1],
            x_stride=x.strides[0],
            y_stride=y.strides[0],
            rows=0,
            outputs=outputs if activation is None else outputs // 2,
            tiles=tile_count,
            expert_bytes=of_expert * memory.shape[1],
            bias_bytes=0 if w.bias is None else w.bias.strides[0],
        )
        self._launch(product(spec), len(order.chosen) * units(spec, tile_count, self._launch.level), arguments)

    def _panels(
        self,
        x: np.ndarray,
        row_tile: int,
        sources: np.ndarray,
        norm: tuple[np.ndarray, float] | None,
        is_packed: bool,
    ) -> np.ndarray:
        """The panels of rows of x: uint8 (panels, bytes of a panel)."""
        columns, (weight, eps) = x.shape[1], norm or (None, 0.0)
        nbytes = panel_bytes(columns, row_tile) if is_packed else 4 * columns * row_tile
        out = self._launch.empty((len(sources) // row_tile, nbytes), np.uint8)
        arguments = RowArguments(
            x=x, weight=weight, out=out, sources=sources, columns=columns, stride=x.strides[0], eps=eps
        )
        self._launch(panel_kernel(norm is not None, row_tile, is_packed, picks=True), len(sources), arguments)
        return out
