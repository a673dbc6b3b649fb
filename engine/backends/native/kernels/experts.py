"""The choice of experts, the order of their rows, and the weighted sum of their results."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache, reduce
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.linear.product import ExpertRows
from polarlm.engine.backends.native.kernels.rows import LOWEST, best, for_each_column
from polarlm.engine.jit.lang import F32, I32, I64, Emitter, Float32, Int64, Kernel, Pointer, Type, Value, vector
from polarlm.model_loaders.config import MOST_EXPERTS

_F16 = vector(F32, 16)
_RECORD = 8 * len(ExpertRows._fields)  # bytes


@dataclass(frozen=True)
class RouteSpec:
    """The properties that `route` is specialized for; see `model_loaders.config.Experts`."""

    scoring: str
    has_bias: bool
    renormalizes: bool
    has_factors: bool = False
    best_of_group: int = 0  # 0: there are no groups

    @property
    def name(self) -> str:
        rest = f"{'_normed' * self.renormalizes}{'_factors' * self.has_factors}"
        rest += f"_groups{self.best_of_group}" if self.best_of_group else ""
        return f"route_{self.scoring}{'_biased' * self.has_bias}{rest}"


class RouteArguments(NamedTuple):
    logits: Pointer
    bias: Pointer
    ids: Pointer
    weights: Pointer
    stride: Int64
    count: Int64
    top_k: Int64
    scale: Float32
    factors: Pointer
    groups: Int64
    top_groups: Int64


@cache
def route(spec: RouteSpec) -> Kernel[RouteArguments]:
    """The experts with the largest scores, best first, and their weights; one unit per row.

    logits (rows, count) float32; stride: bytes from row to row. bias (count,): added to the scores to choose by.
    factors (count,): multiply the weights of each expert. ids (rows, top_k) int32, weights (rows, top_k) float32. If a
    logit is not finite, the weights of its row are NaN. groups, top_groups: see `Experts`.
    """

    def emit(e: Emitter, args: RouteArguments, begin: Value, end: Value, scratch: Value) -> None:
        scores, ranks, group_scores = (scratch + 4 * MOST_EXPERTS * i for i in range(3))
        with e.loop(begin, end) as row:
            logits = args.logits + row * args.stride
            ids, weights = (address + row * args.top_k * 4 for address in (args.ids, args.weights))
            top = best(e, logits, args.count)
            is_finite = top >= 0
            highest = e.load(logits + e.imax(top, 0).sext(I64) * 4, F32)
            _scores(e, spec, args, logits, highest, (scores, ranks))
            if spec.best_of_group:
                _keep_best_groups(e, spec, args, ranks, group_scores)
            total = e.variable(e.constant(F32, 0.0))
            with e.loop(0, args.top_k) as number:
                expert = e.imax(best(e, ranks, args.count), 0)
                offset = expert.sext(I64) * 4
                e.store(e.constant(F32, LOWEST), ranks + offset)
                score = e.load(scores + offset, F32)
                total.add(score)
                e.store(expert, ids + number * 4)
                # Weights are divided by the sum of the scores.
                weight = score * e.load(args.factors + offset, F32) if spec.has_factors else score
                e.store(weight, weights + number * 4)
            factor = args.scale / total.get() if spec.renormalizes else args.scale
            factor = e.select(is_finite, factor, e.constant(F32, float("nan")))
            with e.loop(0, args.top_k) as number:
                e.store(e.load(weights + number * 4, F32) * factor, weights + number * 4)

    return Kernel(spec.name, emit, RouteArguments, scratch=12 * MOST_EXPERTS)


def _keep_best_groups(e: Emitter, spec: RouteSpec, args: RouteArguments, ranks: Value, group_scores: Value) -> None:
    """Make the ranks of experts outside of the best groups the least number. group_scores: memory for a number of each
    group."""
    lowest, size = e.constant(F32, LOWEST), args.count // args.groups
    with e.loop(0, args.groups) as group:
        first, taken = ranks + group * size * 4, []
        for _ in range(spec.best_of_group):
            place = first + e.imax(best(e, first, size), 0).sext(I64) * 4
            taken.append((place, e.load(place, F32)))
            e.store(lowest, place)
        for place, score in taken:
            e.store(score, place)
        e.store(reduce(operator.add, (score for _, score in taken)), group_scores + group * 4)
    with e.loop(0, args.top_groups):
        e.store(lowest, group_scores + e.imax(best(e, group_scores, args.groups), 0).sext(I64) * 4)
    with e.loop(0, args.count) as expert, e.when(e.load(group_scores + expert // size * 4, F32) > lowest):
        e.store(lowest, ranks + expert * 4)


def _scores(
    e: Emitter, spec: RouteSpec, args: RouteArguments, logits: Value, highest: Value, targets: tuple[Value, Value]
) -> None:
    """Write the scores of a row, and the numbers that its experts are chosen by. highest: of its logits."""
    scores, ranks = targets
    sums = {kind: e.variable(e.zero(kind)) for kind in (_F16, F32)}

    def exponentials(offset: Value, kind: Type) -> None:
        logit = e.load(logits + offset, kind)
        power = e.exp(logit - e.const_like(highest, logit)) if spec.scoring == "softmax" else e.exp(-logit) + 1.0
        e.store(power, scores + offset)
        sums[kind].add(power)

    for_each_column(e, args.count, exponentials)
    total = e.sum_lanes(sums[_F16].get()) + sums[F32].get()

    def finish(offset: Value, kind: Type) -> None:
        power = e.load(scores + offset, kind)
        score = power / e.const_like(total, power) if spec.scoring == "softmax" else e.const_like(1.0, power) / power
        e.store(score, scores + offset)
        e.store(score + e.load(args.bias + offset, kind) if spec.has_bias else score, ranks + offset)

    for_each_column(e, args.count, finish)


class ArrangeArguments(NamedTuple):
    ids: Pointer
    weights: Pointer
    chosen: Pointer
    sources: Pointer
    panel_places: Pointer
    places: Pointer
    pairs: Int64
    top_k: Int64
    count: Int64
    slots: Int64
    most: Int64
    adapters: Pointer
    bases: Pointer
    experts: Int64


@cache
def arrange(row_tile: int, *, adapts: bool = False) -> Kernel[ArrangeArguments]:
    """The order in which the rows of a mixture of experts are multiplied: by expert, each from a whole panel on.

    A single unit. ids (pairs,) int32: the experts of pairs of a row and one of its `top_k` experts. Those with a weight
    of 0, weights (pairs,) float32, are left out: they have no place. chosen (slots,):
    `ExpertRows` of the experts that were chosen, ascending; further entries have no rows. places (pairs,) int32: the
    place of each pair, a row of the panels. sources and panel_places (most,) int32: for each place the row of its pair,
    and the place's number; −1 where there is no pair. With `adapts`, what is arranged is pairs of an adapter and an
    expert: adapters (rows,) int32 are those of the rows, `experts` is the number of experts, and bases (slots,) are as
    chosen, with experts alone.
    """

    def number_of(e: Emitter, args: ArrangeArguments, pair: Value) -> Value:
        expert = e.load(args.ids + pair * 4, I32).sext(I64)
        if not adapts:
            return expert
        return expert + e.load(args.adapters + pair // args.top_k * 4, I32).sext(I64) * args.experts

    def emit(e: Emitter, args: ArrangeArguments, begin: Value, end: Value, scratch: Value) -> None:
        counters = scratch  # int64 (count,): pairs of an expert, then the place of its next pair
        with e.loop(0, args.count) as expert:
            e.store(e.i64(0), counters + expert * 8)
        with e.loop(0, args.most) as place:
            for address in (args.sources, args.panel_places):
                e.store(e.constant(I32, -1), address + place * 4)
        with e.loop(0, args.slots) as slot, e.loop(0, len(ExpertRows._fields)) as field:
            for address in (args.chosen, args.bases) if adapts else (args.chosen,):
                e.store(e.i64(0), address + slot * _RECORD + field * 8)
        with e.loop(0, args.pairs) as pair, e.when(~e.load(args.weights + pair * 4, F32).equals(0.0)):
            counter = counters + number_of(e, args, pair) * 8
            e.store(e.load(counter, I64) + 1, counter)
        slot_at, panel_at = e.variable(e.i64(0)), e.variable(e.i64(0))
        with e.loop(0, args.count) as expert:
            rows, panel = e.load(counters + expert * 8, I64), panel_at.get()
            with e.when(rows > 0):
                for number, value in enumerate(ExpertRows(expert=expert, panel=panel, rows=rows)):
                    e.store(value, args.chosen + slot_at.get(), 8 * number)
                    if adapts:
                        base = expert - expert // args.experts * args.experts if number == 0 else value
                        e.store(base, args.bases + slot_at.get(), 8 * number)
                slot_at.set(slot_at.get() + _RECORD)
                panel_at.set(panel + (rows + (row_tile - 1)) // row_tile)
            e.store(panel * row_tile, counters + expert * 8)
        with e.loop(0, args.pairs) as pair, e.when(~e.load(args.weights + pair * 4, F32).equals(0.0)):
            counter = counters + number_of(e, args, pair) * 8
            place = e.load(counter, I64)
            e.store(place + 1, counter)
            e.store(place.trunc(I32), args.places + pair * 4)
            e.store((pair // args.top_k).trunc(I32), args.sources + place * 4)
            e.store(place.trunc(I32), args.panel_places + place * 4)

    return Kernel(f"arrange_{row_tile}{'_adapted' * adapts}", emit, ArrangeArguments, scratch=8 * MOST_EXPERTS)


class AddArguments(NamedTuple):
    y: Pointer
    changes: Pointer
    sources: Pointer
    scales: Pointer
    columns: Int64


@cache
def add_changes() -> Kernel[AddArguments]:
    """y (places, columns) += changes (places, columns) times the scale of each place's row; one unit per place.

    sources (places,) int32, see `arrange`. scales (rows,): without one, of 0, nothing is added.
    """

    def emit(e: Emitter, args: AddArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as place:
            row = e.load(args.sources + place * 4, I32)
            with e.when(row >= 0):
                scale, first = e.load(args.scales + row.sext(I64) * 4, F32), place * args.columns * 4

                def add(offset: Value, kind: Type) -> None:
                    change, target = e.load(args.changes + first + offset, kind), args.y + first + offset
                    e.store(e.fma(change, e.const_like(scale, change), e.load(target, kind)), target)

                with e.when(~scale.equals(0.0)):
                    for_each_column(e, args.columns, add)

    return Kernel("add_changes", emit, AddArguments)


class CombineArguments(NamedTuple):
    results: Pointer
    places: Pointer
    weights: Pointer
    y: Pointer
    columns: Int64
    top_k: Int64
    stride: Int64


@cache
def combine(*, adds: bool) -> Kernel[CombineArguments]:
    """y = the weighted sum of the results of a row's experts, or with `adds` y += that; one unit per row.

    results (places, columns). places, weights (rows, top_k). stride: bytes from row to row of y. Results with a weight
    of 0 are left out.
    """

    def emit(e: Emitter, args: CombineArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as row:
            target, first = args.y + row * args.stride, row * args.top_k * 4

            def write(offset: Value, kind: Type) -> None:
                total = e.variable(e.load(target + offset, kind) if adds else e.zero(kind))
                with e.loop(0, args.top_k) as number:
                    place = e.load(args.places + first + number * 4, I32).sext(I64)
                    weight = e.load(args.weights + first + number * 4, F32)
                    with e.when(~weight.equals(0.0)):
                        result = e.load(args.results + place * args.columns * 4 + offset, kind)
                        total.set(e.fma(result, e.const_like(weight, result), total.get()))
                e.store(total.get(), target + offset)

            for_each_column(e, args.columns, write)

    return Kernel(f"combine{'_add' * adds}", emit, CombineArguments)
