"""A mixture of experts on a GPU: launches of the kernels in `cuda/experts/`, and products with experts' matrices.

Rows of a step are multiplied pair by pair: each pair of a row and one of its experts is a product of one row, in one
launch for all pairs, which reads the experts' numbers on the device. So steps are recorded; where two rows of a step
have an expert in common, its weights are read twice, the second time from the L2 cache if they are still there. Rows
of a prompt are grouped by expert on the host, and each group is multiplied as any other rows are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.cuda import launch_configs, packed
from polarlm.engine.backends.cuda.device import Array, Device, row_stride
from polarlm.engine.backends.cuda.launch import WARP, LaunchConfig, Launcher, threads_for
from polarlm.engine.backends.cuda.launch_configs import ROWS_WITH_KERNELS, SMALL_ROWS
from polarlm.engine.backends.cuda.linear import LinearOps, Product, gates
from polarlm.engine.backends.ops import KeptTiles
from polarlm.engine.errors import EngineError
from polarlm.engine.weight_formats import ExpertLinear, Linear, Matrix, StoredMatrix, WeightFormat, get
from polarlm.model_loaders.config import Experts

_ROUTE_THREADS = 128


class Routing(NamedTuple):
    """The experts of each row, best first: ids (T, k) int32, and their weights (T, k) float32, on the device."""

    ids: Array
    weights: Array


class ExpertOps:
    """The ops `load_experts`, `route` and `experts`."""

    def __init__(self, device: Device, launch: Launcher, matrices: LinearOps):
        self._device, self._launch, self._matrices = device, launch, matrices

    def load_experts(
        self, matrices: Sequence[Sequence[StoredMatrix]], kept: KeptTiles | None = None
    ) -> tuple[Matrix, ...]:
        together = itertools.groupby(zip(*matrices, strict=True), key=self._format)
        return tuple(self._stacked(format, list(zip(*group, strict=True))) for format, group in together)

    def _format(self, matrices: Sequence[StoredMatrix]) -> WeightFormat:
        """The format on the device of the same matrix of each expert."""
        formats = {self._matrices.kept_as(matrix.format) for matrix in matrices}
        if len(formats) > 1:
            names = ", ".join(sorted(format.name for format in formats))
            raise _refused(f"experts of one layer in several formats ({names}),")
        return formats.pop()

    def _stacked(self, format: WeightFormat, experts: Sequence[Sequence[StoredMatrix]]) -> Matrix:
        """The matrices of the first expert, stacked, then those of the next."""
        rows = sum(matrix.shape[0] for matrix in experts[0])
        if packed.is_packed(format) and rows % packed.ROWS:
            raise _refused(f"experts with matrices of {rows} rows in {format.name}, not a multiple of {packed.ROWS},")
        return self._matrices.stacked(format, [matrix for expert in experts for matrix in expert])

    def route(self, logits: Array, rule: Experts, bias: Array | None = None) -> Routing:
        rows, count = logits.shape
        ids = self._device.empty((rows, rule.top_k), np.int32)
        weights = self._device.empty((rows, rule.top_k), np.float32)
        defines = {"COUNT": count, "TOP_K": rule.top_k, "SIGMOID": int(rule.scoring == "sigmoid")}
        config = LaunchConfig({**defines, "RENORMALIZE": int(rule.renormalize)}, _ROUTE_THREADS)
        grid = (-(-rows * WARP // _ROUTE_THREADS),)
        self._launch("route", grid, config, ids, weights, logits, bias, rows, float(rule.scale))
        return Routing(ids, weights)

    def experts(
        self,
        x: Array,
        routing: Routing,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: str,
        *,
        norm: tuple[Array, float] | None = None,
        residual: Array | None = None,
        recorded: bool = False,
    ) -> Array:
        places = None
        if recorded or len(x) <= SMALL_ROWS:
            ids, chosen = routing.ids.reshape(routing.ids.size), routing.ids.shape[1]
            hidden = self._multiply_pairs(x, ids, chosen, gate_up, norm, activation)
            parts = self._multiply_pairs(hidden, ids, 1, down, None, None)
        else:
            parts, places = self._multiply_groups(x, routing.ids, gate_up, down, activation, norm)
        y = self._device.empty((len(x), down.shape[0]), np.float32) if residual is None else residual
        n = y.shape[1]
        config = LaunchConfig({"ADD": int(residual is not None)}, threads_for(n))
        args = y, parts, routing.weights, places, routing.ids.shape[1], n, row_stride(y)
        self._launch("add_experts", (-(-n // config.threads), len(x)), config, *args)
        return y

    def of_any_rows(
        self,
        x: Array,
        routing: Routing,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: str,
        *,
        norm: tuple[Array, float] | None = None,
        residual: Array | None = None,
        recorded: bool = False,
    ) -> Array:
        """`experts`, and after those of a prompt the products of an expert with each number of rows that has kernels of
        its own: how many rows of a prompt choose an expert is known only when it runs."""
        y = self.experts(x, routing, gate_up, down, activation, norm=norm, residual=residual, recorded=recorded)
        if not recorded and len(x) > SMALL_ROWS:
            for rows in (1, *ROWS_WITH_KERNELS):
                self._multiply_group(y[:rows], x[:rows], 0, gate_up, down, activation, norm)
        return y

    def _multiply_pairs(
        self,
        x: Array,
        ids: Array,
        sharing: int,
        w: ExpertLinear,
        norm: tuple[Array, float] | None,
        activation: str | None,
    ) -> Array:
        """The product of each pair, ids (P,): of row p // sharing of x (P / sharing, in) with expert ids[p] → (P, out),
        or (P, out / 2) with an activation."""
        pairs, out = len(ids), w.shape[0] if activation is None else w.shape[0] // 2
        y = self._device.empty((pairs, out), np.float32)
        if len(w.parts) == 1 and (activation is None or gates(w.parts[0].format, w.shape[0])):
            product = Product(w.parts[0], w.bias, norm, False, activation)
            self._multiply(y, x, product, ids, sharing, w.count)
            return y
        whole, end = y if activation is None else self._device.empty((pairs, w.shape[0]), np.float32), 0
        for part in w.parts:
            columns = slice(end, end := end + part.shape[0] // w.count)
            bias = None if w.bias is None else w.bias[:, columns]
            self._multiply(whole[:, columns], x, Product(part, bias, norm, False, None), ids, sharing, w.count)
        if activation is not None:
            self._matrices.activate(y, whole, activation)
        return y

    def _multiply(self, y: Array, x: Array, product: Product, ids: Array, sharing: int, count: int) -> None:
        """The products of all pairs with one matrix of `count` experts into y (P, out), which may be columns of a wider
        array."""
        (pairs, out), width, weight, device = y.shape, x.shape[1], product.weight, self._device
        rows = weight.shape[0] // count
        norm_weight, eps = product.norm or (None, 0.0)
        if packed.is_packed(weight.format):
            kernel, tiles = "gemv_packed", (weight.format.values, packed.block_bytes(weight.format))
            machine, gated = (device.processors, device.shared_memory), product.activation is not None
            config, blocks = launch_configs.gemv_packed(1, rows, *machine, *tiles, gated)
        else:
            kernel = "gemv"
            config, blocks = launch_configs.gemv(1, rows, width, device.processors)
        config = product.with_types(x, y, config._replace(defines={**config.defines, "EXPERTS": 1}))
        operands = y, x, weight.data, product.bias, norm_weight
        sizes = 1, width, out, row_stride(y), float(eps)
        bias_pitch = 0 if product.bias is None else int(row_stride(product.bias))
        self._launch(kernel, (blocks, 1, pairs), config, *operands, *sizes, ids, sharing, bias_pitch)

    def _multiply_groups(
        self,
        x: Array,
        ids: Array,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: str,
        norm: tuple[Array, float] | None,
    ) -> tuple[Array, Array]:
        """The results of all pairs of rows x (T, E) and ids (T, k), grouped by expert: (T · k, E), and where each pair
        is among them: (T · k,) int32."""
        experts = self._device.to_host(ids).ravel()
        order = np.argsort(experts, kind="stable").astype(np.int32)
        places = np.empty_like(order)
        places[order] = np.arange(len(order), dtype=np.int32)
        # Gathering rows is what `embed` does with a table.
        table = Matrix(get("f32"), x.view(np.uint8), x.shape)
        gathered = self._matrices.embed(table, self._device.from_host(order // np.int32(ids.shape[1])))
        parts = self._device.zeros((len(order), down.shape[0]), np.float32)
        end = 0
        for expert, rows in enumerate(np.bincount(experts, minlength=gate_up.count).tolist()):
            group = slice(end, end := end + rows)
            if rows:
                self._multiply_group(parts[group], gathered[group], expert, gate_up, down, activation, norm)
        return parts, self._device.from_host(places)

    def _multiply_group(
        self,
        y: Array,
        x: Array,
        expert: int,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: str,
        norm: tuple[Array, float] | None,
    ) -> None:
        """Add down(activation(gate) * up) of one expert for rows x (T, E) to y (T, E)."""
        first, second = _of_expert(gate_up, expert), _of_expert(down, expert)
        hidden = self._matrices.linear(x, first, norm=norm, activation=activation, then=second)
        self._matrices.linear(hidden, second, residual=y)


def _of_expert(w: ExpertLinear, expert: int) -> Linear:
    parts = []
    for part in w.parts:
        rows, size = part.shape[0] // w.count, len(part.data) // w.count  # of a packed matrix data has tiles
        data = part.data[expert * size : (expert + 1) * size]
        parts.append(Matrix(part.format, data, (rows, part.shape[1])))
    return Linear(tuple(parts), None if w.bias is None else w.bias[expert])


def _refused(what: str) -> EngineError:
    return EngineError(
        f"This model has {what} which the GPU does not read: run it with device=cpu", settings=("device",)
    )
