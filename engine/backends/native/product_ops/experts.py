"""The ops of a mixture of experts: the rows of an expert are multiplied together, so its weights are read once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
from polarlm.engine.backends.native.kernels.linear.activations import Inputs
from polarlm.engine.backends.native.kernels.linear.product import ExpertRows
from polarlm.engine.backends.native.kernels.linear.tiling import Tiling, expert_tiling, largest_tiling
from polarlm.engine.backends.native.kernels.rows import RowGateArguments, gate_rows
from polarlm.engine.backends.native.launch import KernelOps
from polarlm.engine.backends.native.product_ops.loading import CachedTiles
from polarlm.engine.backends.native.product_ops.multiplication import Multiplication, compiled_tiling, experts_of
from polarlm.engine.backends.ops import PLAIN, ExpertNetwork, Routing
from polarlm.engine.jit.lang import Kernel
from polarlm.engine.weight_formats import ExpertLinear
from polarlm.model_loaders.config import Experts


class _Order(NamedTuple):
    """The rows of all experts in panels; see `kernels.experts.arrange`."""

    tiling: Tiling
    chosen: np.ndarray
    sources: np.ndarray
    panel_places: np.ndarray
    places: np.ndarray


class ExpertOps(KernelOps):
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
        self, x: np.ndarray, routing: Routing, network: ExpertNetwork, residual: np.ndarray | None = None
    ) -> np.ndarray:
        gate_up, down, fusion = network
        up = Multiplication(self._launch, gate_up, len(x), fusion)
        down_product = Multiplication(self._launch, down, len(x), PLAIN)
        order = self._arrange(routing, gate_up.count, (up, down_product))
        self._expect(order.chosen, gate_up, down)
        y = self._launch.empty((len(order.sources), up.width))
        up.launch(x, y, order.tiling, order.chosen, order.sources)
        if fusion.activation is not None and up.activation is None:
            y = self.activate_halves(y, fusion.activation)
        results = self._launch.empty((len(order.panel_places), down_product.width))
        down_product.launch(y, results, order.tiling, order.chosen, order.panel_places)
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

    def _arrange(self, routing: Routing, count: int, products: Sequence[Multiplication]) -> _Order:
        """The rows in the order of their experts. count: the number of experts."""

        def kernels(sizes: Tiling) -> list[Kernel]:
            return [arrange(sizes.rows), *itertools.chain(*(product.kernels(sizes) for product in products))]

        rows, top_k = routing.ids.shape
        pairs, slots = rows * top_k, min(rows * top_k, count)
        level, inputs = self._launch.level, Inputs.shared(itertools.chain(*(product.inputs for product in products)))
        sizes, most = expert_tiling(pairs // count, level, inputs), largest_tiling(level, inputs)
        sizes = compiled_tiling(self._launch, sizes, most, kernels)
        row_tile = sizes.rows
        places = -(-(pairs + slots * (row_tile - 1)) // row_tile) * row_tile
        order = _Order(
            sizes,
            chosen=self._launch.empty((slots, len(ExpertRows._fields)), np.int64),
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
            count=count,
            slots=slots,
            most=places,
        )
        self._launch(arrange(row_tile), 1, arguments)
        return order

    def _expect(self, chosen: np.ndarray, *linears: ExpertLinear) -> None:
        """Let the system read ahead what the chosen experts lack in memory."""
        cached = [part.data for w in linears for part in w.parts if isinstance(part.data, CachedTiles)]

        def expect(chosen: np.ndarray) -> None:
            for data in cached:
                data.expect(experts_of(chosen))

        if cached:
            self._launch.call(expect, chosen)
