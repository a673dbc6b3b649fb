"""A mixture of experts on a GPU: launches of the kernels in `cuda/experts/`, and products with experts' matrices.

A pair is a row and one of its experts, whose number is read on the device, so that steps are recorded. Few pairs are
multiplied one by one, each a product of one row. More are grouped by expert, and a group reads the weights of its
expert once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.cuda import launch_configs, packed, wide
from polarlm.engine.backends.cuda.device import Array, Device, row_stride
from polarlm.engine.backends.cuda.launch import MOST_THREADS, WARP, LaunchConfig, Product, threads_for
from polarlm.engine.backends.cuda.launch_configs import EXPERT_ROWS
from polarlm.engine.backends.cuda.linear import LinearOps, gates, input_type
from polarlm.engine.backends.ops import PLAIN, ExpertNetwork, Fusion, Ops, Routing
from polarlm.engine.errors import EngineError
from polarlm.engine.weight_formats import ExpertLinear, Linear, Matrix, StoredMatrix, WeightFormat
from polarlm.model_loaders.config import Experts, is_gated

_ROUTE_THREADS = 128


class _Groups(NamedTuple):
    """Pairs by expert, on the device: see `group_pairs.cu`. rows, places (P,), groups (number, 3) int32. most: pairs
    of a group."""

    rows: Array
    places: Array
    groups: Array
    most: int


class ExpertOps(LinearOps):
    def __init__(self, device: Device, host: Ops | None = None) -> None:
        """host: computes those whose weights are in the computer's memory."""
        super().__init__(device)
        self.host = host
        self._norms: dict[int, tuple[Array, np.ndarray]] = {}  # by identity; and on the host
        self._heads: dict[int, tuple[Array, Array]] = {}  # by H: the number of the head of each pair, and weights of 1

    def load_experts(self, matrices: Sequence[Sequence[StoredMatrix]]) -> tuple[Matrix, ...]:
        runs = itertools.groupby(zip(*matrices, strict=True), key=self._format)
        return tuple(self._stack_experts(format, list(zip(*group, strict=True))) for format, group in runs)

    def _format(self, matrices: Sequence[StoredMatrix]) -> WeightFormat:
        """The format on the device of the same matrix of each expert."""
        formats = {self.stored_format(matrix.format) for matrix in matrices}
        if len(formats) > 1:
            names = ", ".join(sorted(format.name for format in formats))
            raise _refusal(f"experts of one layer in several formats ({names}),")
        return formats.pop()

    def _stack_experts(self, format: WeightFormat, experts: Sequence[Sequence[StoredMatrix]]) -> Matrix:
        """The matrices of the first expert, stacked, then the next expert's."""
        rows = sum(matrix.shape[0] for matrix in experts[0])
        if packed.is_packed(format) and rows % packed.ROWS:
            raise _refusal(f"experts with matrices of {rows} rows in {format.name}, not a multiple of {packed.ROWS},")
        return self.stack(format, [matrix for expert in experts for matrix in expert])

    def route(self, logits: Array, rule: Experts, bias: Array | None = None, factors: Array | None = None) -> Routing:
        rows, count = logits.shape
        ids = self._device.empty((rows, rule.top_k), np.int32)
        weights = self._device.empty((rows, rule.top_k), np.float32)
        defines = {"COUNT": count, "TOP_K": rule.top_k, "SIGMOID": int(rule.scoring == "sigmoid")}
        defines |= {"GROUPS": rule.groups, "TOP_GROUPS": rule.top_groups, "BEST": rule.best_of_group}
        config = LaunchConfig({**defines, "RENORMALIZE": int(rule.renormalize)}, _ROUTE_THREADS)
        grid = (-(-rows * WARP // _ROUTE_THREADS),)
        self._launch("route", grid, config, ids, weights, logits, bias, factors, rows, float(rule.scale))
        return Routing(ids, weights)

    def experts(
        self,
        x: Array,
        routing: Routing,
        network: ExpertNetwork,
        residual: Array | None = None,
        adapters: Routing | None = None,
    ) -> Array:
        assert network.gate_up.deltas is network.down.deltas is None  # see `model.adapters.deltas`
        y = self._device.empty((len(x), network.down.shape[0]), np.float32) if residual is None else residual
        if network.gate_up.on_host:
            self._on_host(y, x, routing, network, residual)
            return y
        top_k, n = routing.ids.shape[1], y.shape[1]
        config = LaunchConfig({"ADD": int(residual is not None)}, threads_for(n))
        for first in range(0, len(x), EXPERT_ROWS):
            rows = slice(first, first + EXPERT_ROWS)
            ids, target = routing.ids[rows], y[rows]
            parts, places = self._pair_results(x[rows], ids.reshape(ids.size), top_k, network)
            args = target, parts, routing.weights[rows], places, top_k, n, row_stride(target)
            self._launch("add_experts", (-(-n // config.threads), len(target)), config, *args)
        return y

    def multiply_heads(self, x: Array, w: ExpertLinear) -> Array:
        """As `experts`, with the head of each row as its one expert."""
        out, pairs, count = w.shape[0], EXPERT_ROWS, w.count
        if count not in self._heads:
            numbers = np.resize(np.arange(count, dtype=np.int32), pairs * count)
            device = self._device
            self._heads[count] = device.from_host(numbers), device.from_host(np.ones((len(numbers), 1), np.float32))
        numbers, ones = self._heads[count]
        y = self._device.empty((len(x), out), np.float32)
        for first in range(0, len(x), len(numbers)):
            part, target = x[first : first + len(numbers)], y[first : first + len(numbers)]
            rows, ids = self._device.empty(part.shape, np.float32), numbers[: len(part)]
            rows[...] = part  # which may be columns of a wider array
            if not wide.groups_pairs(len(ids), count):
                multiply = partial(self._multiply_pairs, ids, 1, count)
                target[...] = self._product(multiply, rows, len(ids), w, PLAIN, np.float32)
                continue
            for most in self._group_rows(len(ids), count):
                groups = self._group_pairs(ids, 1, count, most)
                multiply = partial(self._multiply_groups, groups, groups.rows, count)
                results = self._product(multiply, rows, len(ids), w, PLAIN, np.float32)
            config = LaunchConfig({"ADD": 0}, threads_for(out))
            args = target, results, ones[: len(ids)], groups.places, 1, out, row_stride(target)
            self._launch("add_experts", (-(-out // config.threads), len(ids)), config, *args)
        return y

    def _on_host(self, y: Array, x: Array, routing: Routing, network: ExpertNetwork, residual: Array | None) -> None:
        """`experts` on rows that are copied to the host, all at once, and back to y."""
        host = self.host
        assert host is not None
        arrays = [x, routing.ids, routing.weights]
        if residual is not None and residual is not x:
            arrays.append(residual)
        shapes, types = [array.shape for array in arrays], [array.dtype for array in arrays]
        ends = [*itertools.accumulate(array.size for array in arrays)]
        packed_rows, adds = self._device.empty((ends[-1],), np.int32), residual is not None
        for array, end in zip(arrays, ends, strict=True):
            packed_rows[end - array.size : end] = array.reshape(array.size).view(np.int32)
        if (norm := network.fusion.norm) is not None:
            host_norm = self._norm_on_host(norm[0]), norm[1]
            network = network._replace(fusion=network.fusion._replace(norm=host_norm))

        def compute(packed_rows: np.ndarray) -> np.ndarray:
            parts = np.split(packed_rows, ends[:-1])
            copies = [part.view(kind).reshape(shape) for part, kind, shape in zip(parts, types, shapes, strict=True)]
            rows, ids, weights, residual_rows = *copies[:3], copies[-1 if len(copies) > 3 else 0]
            result = np.empty((len(rows), network.down.shape[0]), np.float32)
            for first in range(0, len(rows), host.prefill_rows):
                part = slice(first, first + host.prefill_rows)
                chosen = Routing(ids[part], weights[part])
                target = residual_rows[part].copy() if adds else None
                result[part] = host.experts(rows[part], chosen, network, target)
            return result

        self._device.call_host(compute, y, [packed_rows])

    def _norm_on_host(self, weight: Array) -> np.ndarray:
        """The weights of a norm, which never change: copied once, before anything is recorded."""
        entry = self._norms.get(id(weight))
        if entry is None or entry[0] is not weight:
            entry = self._norms[id(weight)] = weight, self._device.to_host(weight)
        return entry[1]

    def _pair_results(self, x: Array, ids: Array, top_k: int, network: ExpertNetwork) -> tuple[Array, Array | None]:
        """The result of each pair: of row p // top_k of x (T, E) and expert ids[p], ids (P,). Returns the results
        (P, E), and the place of each pair among them, (P,) int32; None stands for places in order."""
        gate_up, down, fusion = network
        if not wide.groups_pairs(len(ids), gate_up.count):
            first = partial(self._multiply_pairs, ids, top_k, gate_up.count)
            hidden = self._product(first, x, len(ids), gate_up, fusion, np.float32)
            second = partial(self._multiply_pairs, ids, 1, down.count)
            return self._product(second, hidden, len(ids), down, PLAIN, np.float32), None
        for most in self._group_rows(len(ids), gate_up.count):
            result = self._group_results(most, x, ids, top_k, network)
        return result

    def _group_rows(self, pairs: int, count: int) -> Sequence[int]:
        """The most rows of a group; of each kind of launch, in a warm-up."""
        return wide.expert_groups(pairs, count)[:1]

    def _group_results(
        self, most: int, x: Array, ids: Array, top_k: int, network: ExpertNetwork
    ) -> tuple[Array, Array]:
        """`_pair_results` in groups of up to `most` rows."""
        gate_up, down, fusion = network
        groups = self._group_pairs(ids, top_k, gate_up.count, most)
        first = partial(self._multiply_groups, groups, groups.rows, gate_up.count)
        narrow = input_type(Linear(down.parts), len(ids))
        hidden = self._product(first, x, len(ids), gate_up, fusion, narrow)
        second = partial(self._multiply_groups, groups, None, down.count)
        return self._product(second, hidden, len(ids), down, PLAIN, np.float32), groups.places

    def _product(
        self,
        multiply: Callable[[Array, Array, Product], None],
        x: Array,
        pairs: int,
        w: ExpertLinear,
        fusion: Fusion,
        dtype: type[np.generic],
    ) -> Array:
        """The product of each pair with its expert: (P, out), or (P, out / 2) with an activation of a gate, of `dtype`;
        float32 with another activation.

        multiply(y, x, product): computes that with one matrix into y, which may be columns of a wider array.
        """
        norm, activation, _ = fusion
        if activation is not None and not is_gated(activation):
            y = self._product(multiply, x, pairs, w, Fusion(norm), np.float32)
            self.activate(y, y, activation)
            return y
        y = self._device.empty((pairs, w.shape[0] if activation is None else w.shape[0] // 2), dtype)
        if len(w.parts) == 1 and (activation is None or gates(w.parts[0].format, w.shape[0])):
            multiply(y, x, Product(w.parts[0], w.bias, norm, False, activation))
            return y
        whole, end = y if activation is None else self._device.empty((pairs, w.shape[0]), np.float32), 0
        for part in w.parts:
            columns = slice(end, end := end + part.shape[0] // w.count)
            bias = None if w.bias is None else w.bias[:, columns]
            multiply(whole[:, columns], x, Product(part, bias, norm, False, None))
        if activation is not None:
            self.activate_mul(y, whole, activation)
        return y

    def _multiply_pairs(self, ids: Array, pairs_per_row: int, count: int, y: Array, x: Array, product: Product) -> None:
        """The products of pairs, one by one. pairs_per_row: how many neighbouring pairs have the same row of x.
        count: experts."""
        (pairs, out), width, weight, device = y.shape, x.shape[1], product.weight, self._device
        rows = weight.shape[0] // count
        norm_weight, eps = product.norm or (None, 0.0)
        if packed.is_packed(weight.format):
            kernel, gated = "gemv_packed", product.activation is not None
            expert_rows = (packed.rows_of(weight.format, rows),)
            config, blocks, _ = packed.gemv_packed(1, device.processors, device.shared_memory, expert_rows, gated)
        else:
            kernel = "gemv"
            config, blocks = launch_configs.gemv(1, rows, width, device.processors)
        config = product.with_types(y, config._replace(defines={**config.defines, "EXPERTS": 1}))
        operands, sizes = (y, x, weight.data, product.bias, norm_weight), (1, width, out, row_stride(y), float(eps))
        self._launch(kernel, (blocks, 1, pairs), config, *operands, *sizes, ids, pairs_per_row, _bias_pitch(product))

    def _group_pairs(self, ids: Array, top_k: int, count: int, most: int) -> _Groups:
        pairs, empty = len(ids), self._device.empty
        number = wide.most_groups(pairs, count, most)
        groups = _Groups(empty((pairs,), np.int32), empty((pairs,), np.int32), empty((number, 3), np.int32), most)
        config = LaunchConfig({"COUNT": count, "ROWS": most}, MOST_THREADS)
        self._launch("group_pairs", (1,), config, *groups[:3], ids, pairs, top_k, number)
        return groups

    def _multiply_groups(
        self, groups: _Groups, rows: Array | None, count: int, y: Array, x: Array, product: Product
    ) -> None:
        """The products of groups of pairs. rows: the row of x of each pair; None if x has one for each. count:
        experts."""
        x, product, weight = self.narrow_input(x, product), product._replace(norm=None), product.weight
        config, tile = wide.gemm_wide_experts(groups.most, weight.format, self._device.shared_memory)
        blocks = -(-weight.shape[0] // count // tile), 1, len(groups.groups)
        operands, sizes = (y, x, weight.data, product.bias), (len(x), x.shape[1], y.shape[1], row_stride(y))
        more = groups.groups, rows, _bias_pitch(product)
        self._launch("gemm_wide", blocks, product.with_types(y, config), *operands, *sizes, *more)


def _bias_pitch(product: Product) -> int:
    """Numbers from the bias of an expert to the next expert's."""
    return 0 if product.bias is None else int(row_stride(product.bias))


def _refusal(what: str) -> EngineError:
    return EngineError(
        f"This model has {what} which the GPU does not read: run it with device=cpu", settings=("device",)
    )
