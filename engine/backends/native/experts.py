"""The ops of a mixture of experts: the rows of an expert are multiplied together, so its weights are read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.native import tiles
from polarlm.engine.backends.native.expert_cache import CachedTiles
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
from polarlm.engine.backends.native.kernels.linear.activations import Inputs, RowArguments, panel_bytes
from polarlm.engine.backends.native.kernels.linear.product import ExpertRows, Product, ProductArguments, product, units
from polarlm.engine.backends.native.kernels.linear.tiling import SINGLE, Tiling, expert_tiling, largest_tiling
from polarlm.engine.backends.native.kernels.prefetch import NO_HINT
from polarlm.engine.backends.native.kernels.rows import RowGateArguments, gate, gate_arguments, gate_rows
from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.backends.native.linear import inputs_of, panel_kernel
from polarlm.engine.backends.ops import Routing
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.weight_formats import ExpertLinear, Matrix
from polarlm.model_loaders.config import Experts, is_gated

_EXPERT, _ROWS = (ExpertRows._fields.index(name) for name in ("expert", "rows"))


class _Order(NamedTuple):
    """The rows of all experts in panels; see `kernels.experts.arrange`."""

    tiling: Tiling
    chosen: np.ndarray
    sources: np.ndarray
    own: np.ndarray
    places: np.ndarray


class _Stack(NamedTuple):
    """`number` matrices of equal shape (out, in), in tiles one after another; bias (count, out), or None."""

    memory: np.ndarray
    number: int
    shape: tuple[int, int]
    bias: np.ndarray | None


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
        activation: str | None,
        *,
        norm: tuple[np.ndarray, float] | None = None,
        residual: np.ndarray | None = None,
        recorded: bool = False,
    ) -> np.ndarray:
        has_halves = len(gate_up.parts) == 1 and gate_up.shape[0] % (2 * tiles.ROWS) == 0
        gates = activation if activation is not None and is_gated(activation) and has_halves else None

        level = self._launch.level

        def inputs(part: Matrix) -> Inputs:
            return inputs_of(part, level, len(x), recorded)

        def kernels(sizes: Tiling) -> list[Kernel]:
            found: list[Kernel] = [arrange(sizes.rows)]
            for w, own, is_normed in (gate_up, gates, norm is not None), (down, None, False):
                kinds = dict.fromkeys(map(inputs, w.parts))
                found += [panel_kernel(is_normed, sizes.rows, kind, picks=True) for kind in kinds]
                found += [product(_spec(part, w, sizes, own, inputs(part))) for part in w.parts]
            return found

        shared = Inputs.shared(map(inputs, (*gate_up.parts, *down.parts)))
        order = self._arranged(routing, gate_up.count, shared, kernels, recorded)
        self._expect(order.chosen, gate_up, down)
        y = self._multiply(x, gate_up, order, order.sources, norm, gates, inputs)
        if activation is not None and not is_gated(activation):
            self._launch(gate(activation), len(y), gate_arguments(y, y, y))
        elif activation is not None and gates is None:
            both, y = y, self._launch.empty((len(y), y.shape[1] // 2))
            half = both.shape[1] // 2
            self._launch(gate(activation), len(y), gate_arguments(both[:, :half], both[:, half:], y))
        results = self._multiply(y, down, order, order.own, None, None, inputs)
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

    def _arranged(
        self,
        routing: Routing,
        count: int,
        inputs: Inputs,
        kernels: Callable[[Tiling], list[Kernel]],
        recorded: bool,
    ) -> _Order:
        """The rows by expert. inputs: see `tiling`. kernels: of a tiling."""
        rows, top_k = routing.ids.shape
        pairs, slots = rows * top_k, min(rows * top_k, count)
        level = self._launch.level
        sizes, most = expert_tiling(pairs // count, level, inputs), largest_tiling(level, inputs)
        # Until the kernels for few rows are compiled, those for many are used, as in `LinearOps.linear`.
        can_choose = not recorded and sizes not in (SINGLE, most) and self._launch.has_loaded(kernels(most))
        if can_choose and not self._launch.has_loaded(kernels(sizes)):
            self._launch.library.expect(kernels(sizes))
            sizes = most
        row_tile = sizes.rows
        places = -(-(pairs + slots * (row_tile - 1)) // row_tile) * row_tile
        order = _Order(
            sizes,
            chosen=self._launch.empty((slots, len(ExpertRows._fields)), np.int64),
            sources=self._launch.empty((places,), np.int32),
            own=self._launch.empty((places,), np.int32),
            places=self._launch.empty((rows, top_k), np.int32),
        )
        arguments = ArrangeArguments(
            ids=routing.ids,
            weights=routing.weights,
            chosen=order.chosen,
            sources=order.sources,
            own=order.own,
            places=order.places,
            pairs=pairs,
            top_k=top_k,
            count=count,
            slots=slots,
            most=places,
        )
        self._launch(arrange(row_tile), 1, arguments)
        return order

    def _multiply(
        self,
        x: np.ndarray,
        w: ExpertLinear,
        order: _Order,
        sources: np.ndarray,
        norm: tuple[np.ndarray, float] | None,
        activation: str | None,
        inputs: Callable[[Matrix], Inputs],
    ) -> np.ndarray:
        """The products (places, out) of rows of x with their experts. sources: the row of x of each place. inputs: how
        products with a part read theirs."""
        outputs = w.shape[0] if activation is None else w.shape[0] // 2
        y = self._launch.empty((len(sources), outputs))
        panels: dict[Inputs, np.ndarray] = {}
        first = 0
        for part in w.parts:
            kind = inputs(part)
            if kind not in panels:
                panels[kind] = self._panels(x, order.tiling.rows, sources, norm, kind)
            self._part(y[:, first:], panels[kind], part, w, order, _spec(part, w, order.tiling, activation, kind))
            first += part.shape[0] // w.count
        return y

    def _part(self, y: np.ndarray, x: np.ndarray, part: Matrix, w: ExpertLinear, order: _Order, spec: Product) -> None:
        """Write the products of panels x with one part of the matrices of all experts, the first of y's columns."""
        done = w.shape[0] - y.shape[1] if spec.activation is None else 0
        bias = None if w.bias is None else w.bias[:, done:]
        shape, data = (part.shape[0] // w.count, part.shape[1]), part.data
        if not isinstance(data, CachedTiles):
            self._product(spec, y, x, order.chosen, _Stack(data.memory, w.count, shape, bias))
            return

        def product_of_cached(y: np.ndarray, x: np.ndarray, chosen: np.ndarray) -> None:
            for of_slots, own_bias in self._batches(data, chosen, bias):
                self._product(spec, y, x, of_slots, _Stack(data.memory, data.slots, shape, own_bias))

        self._launch.call(product_of_cached, y, x, order.chosen)

    def _product(self, spec: Product, y: np.ndarray, x: np.ndarray, chosen: np.ndarray, stack: _Stack) -> None:
        """Write the products of panels x with the chosen matrices. chosen (n, fields of `ExpertRows`)."""
        memory, (outputs, columns), bias = stack.memory, stack.shape, stack.bias
        of_one = len(memory) // stack.number
        half = 1 if spec.activation is None else 2
        arguments = ProductArguments(
            weights=memory,
            x=x,
            y=y,
            bias=bias,
            hint=NO_HINT,
            chosen=chosen,
            blocks=columns // spec.block_inputs,
            tile_bytes=memory.shape[1],
            x_stride=x.strides[0],
            y_stride=y.strides[0],
            rows=0,
            outputs=outputs // half,
            tiles=of_one // half,
            expert_bytes=of_one * memory.shape[1],
            bias_bytes=0 if bias is None else bias.strides[0],
        )
        self._launch(product(spec), len(chosen) * units(spec, of_one // half), arguments)

    def _expect(self, chosen: np.ndarray, *linears: ExpertLinear) -> None:
        """Let the system read ahead what the chosen experts lack in memory."""
        cached = [part.data for w in linears for part in w.parts if isinstance(part.data, CachedTiles)]

        def expect(chosen: np.ndarray) -> None:
            experts = _with_rows(chosen)[:, _EXPERT].tolist()
            for data in cached:
                data.expect(experts)

        if cached:
            self._launch.call(expect, chosen)

    def _batches(
        self, data: CachedTiles, chosen: np.ndarray, bias: np.ndarray | None
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """(entries of `chosen`, biases), both for slots in the place of experts, as many at a time as have one."""
        entries = _with_rows(chosen)
        experts = entries[:, _EXPERT].tolist()
        for batch in data.batches(experts):
            own = entries[batch]
            own[:, _EXPERT] = slots = data.take([experts[index] for index in batch])
            if bias is None:
                yield own, None
            else:
                of_slots = self._launch.empty((data.slots, bias.shape[1]))
                of_slots[slots] = bias[entries[batch, _EXPERT]]
                yield own, of_slots

    def _panels(
        self,
        x: np.ndarray,
        row_tile: int,
        sources: np.ndarray,
        norm: tuple[np.ndarray, float] | None,
        kind: Inputs,
    ) -> np.ndarray:
        """The panels of rows of x: uint8 (panels, bytes of a panel)."""
        columns, (weight, eps) = x.shape[1], norm or (None, 0.0)
        nbytes = panel_bytes(columns, row_tile, self._launch.level, kind) if kind.are_words else 4 * columns * row_tile
        out = self._launch.empty((len(sources) // row_tile, nbytes), np.uint8)
        arguments = RowArguments(
            x=x, weight=weight, out=out, sources=sources, columns=columns, stride=x.strides[0], eps=eps
        )
        self._launch(panel_kernel(norm is not None, row_tile, kind, picks=True), len(sources), arguments)
        return out


def _spec(part: Matrix, w: ExpertLinear, sizes: Tiling, activation: str | None, inputs: Inputs) -> Product:
    return Product(part.format, sizes, False, w.bias is not None, activation, True, inputs)


def _with_rows(chosen: np.ndarray) -> np.ndarray:
    """The entries of experts that have rows."""
    return chosen[chosen[:, _ROWS] > 0]
