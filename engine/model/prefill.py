"""Prefill: computes the rows of a prompt layer by layer, in units.

Letters: T rows, E hidden size, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from polarlm.engine.backends.kv import Spans
from polarlm.engine.backends.ops import Array, Ops, PeerArray, Routing
from polarlm.engine.model.adapters import row_adapters
from polarlm.engine.model.layers.kinds import DecoderLayer
from polarlm.engine.model.rope import RopeTables
from polarlm.engine.model.towers._rows import ImagePart
from polarlm.engine.state.positions import rope_positions, whole_images
from polarlm.engine.state.store import KVStore, Span

PromptTap = Callable[[int, int, Array, Array], None]
"""tap(layer, position, queries, keys): a `Tap` for rows of a layer, the first row at `position`."""


class Stage(NamedTuple):
    """The consecutive layers of a model that one device has."""

    ops: Ops
    layers: Sequence[int]


def stages(ops: Ops, layers: int) -> list[Stage]:
    """Return the stages of a model with this number of layers."""
    runs = itertools.groupby(range(layers), ops.layer_ops)
    return [Stage(card, [*numbers]) for card, numbers in runs]


def units_of(count: int, step: int, whole: Sequence[range] = ()) -> list[slice]:
    """Cut `count` rows into units of at most `step`, or of one of `whole`, rows that are not cut. The last one is no
    single row, which other kernels would compute, whose sums differ by a rounding."""
    firsts = [0]
    while (left := count - firsts[-1]) > step:
        first = firsts[-1] + step - (left == step + 1 and step > 2)
        cut = next((rows for rows in whole if rows.start < first < rows.stop), None)
        firsts.append(first if cut is None else cut.start if cut.start > firsts[-1] else cut.stop)
    return [slice(first, end) for first, end in zip(firsts, [*firsts[1:], count], strict=True)]


@dataclass(frozen=True)
class _Unit:
    """Rows of a prompt that are computed together."""

    rows: slice
    position: int  # position of the first row in its sequence
    spans: Sequence[Spans]  # one for each group of layers
    skipped: int  # first rows whose output is not needed: in the last layer, only their K/V are computed
    last: Spans  # the spans of the last layer's group, without the skipped rows


@dataclass(frozen=True)
class Prefill:
    """The forward pass of prompts. tap: called in prompts of one span. images: of rows of one span. of_mtp: returns the
    inputs of the last layer, which has K/V alone, if it is the one of `ModelConfig.mtp`; see `MtpLayer.of_prompt`."""

    stages: Sequence[Stage]
    ops: Ops
    store: KVStore
    layers: Sequence[DecoderLayer]
    ropes: RopeTables
    tap: PromptTap | None
    images: Sequence[ImagePart] = ()
    of_mtp: Callable[[Array, slice], Array] | None = None

    def units(
        self,
        x: Array,
        inputs: Array | None,
        spans: Sequence[Span],
        first_output: int,
        *,
        by_layer: bool = False,
        parts: Sequence[Span] | None = None,
    ) -> Generator[int, None, Array]:
        """Compute all layers for x (T, E), the embedded rows of `spans`, in place, and seal them; see
        `Transformer.forward_units`. Returns x on the last layer's device. The last layer leaves rows before
        `first_output` as they are. inputs: the inputs of all layers (T, L·P), if any. parts: the parts of `spans` in
        the order of x; None for the spans."""
        # With a round trip, a block is encoded as a whole before any of its tokens attends.
        count, whole, parts = len(x), any(span.round_trip for span in spans), parts or spans
        step = count if whole else self.ops.prefill_rows
        first_output = first_output if self.of_mtp is None else count
        ropes, of_rows = self.ropes.tables(rope_positions(parts)), row_adapters(parts)
        slices = units_of(count, step, whole_images(parts) if self.store.sees_whole_images else ())

        def cut() -> list[_Unit]:
            return [self._unit(parts, rows, first_output) for rows in slices]

        units, changes = cut(), self.store.changes
        done, last = 0, (len(self.layers) - 1, len(units) - 1)
        for number, (ops, layers) in enumerate(self.stages):
            if number:
                x = ops.to_device(PeerArray(x, self.stages[number - 1].ops))
            tables = [tuple(map(ops.to_device, table)) for table in ropes]
            adapters = Routing(*map(ops.to_device, of_rows)) if of_rows else None
            for layer in layers:
                for part in self.images:
                    if 0 < layer <= len(part.added):
                        ops.linear(*part.added[layer - 1], residual=x[part.at])
                for span in spans:
                    self.store.begin_layer(layer, span)
                rope = self.ropes.of_layer(layer, tables)
                for at, unit_rows in enumerate(slices):
                    self._layer(layer, x, inputs, rope, units[at], spans if at == last[1] else (), adapters)
                    rows = unit_rows.stop - unit_rows.start
                    done += rows
                    if by_layer or done + rows > step or (layer, at) == last:
                        yield done
                        done = 0
                        if self.store.changes != changes:  # blocks that earlier turns left have been moved meanwhile
                            units, changes = cut(), self.store.changes
        return x

    def _unit(self, spans: Sequence[Span], rows: slice, first_output: int) -> _Unit:
        count = rows.stop - rows.start
        skipped = min(max(0, first_output - rows.start), count)
        seen = self.store.spans(spans, rows)
        last, position = self.store.group_of(len(self.layers) - 1), spans[0].start + rows.start
        if skipped in (0, count):  # if all rows are skipped, none attends in the last layer
            return _Unit(rows, position, seen, skipped, seen[last])
        kept = self.store.spans(spans, slice(rows.start + skipped, rows.stop))
        return _Unit(rows, position, seen, skipped, kept[last])

    def _layer(
        self,
        layer: int,
        x: Array,
        inputs: Array | None,
        rope: Any,
        unit: _Unit,
        complete: Sequence[Span],
        of_rows: Routing | None,
    ) -> None:
        """Compute one layer for the rows of `unit` of x (T, E), in place, and seal the spans `complete`. of_rows: the
        adapters of all rows, if any."""
        mixer, rows = self.layers[layer].mixer, unit.rows
        group, is_last = self.store.group_of(layer), layer == len(self.layers) - 1
        tap = None if self.tap is None else partial(self.tap, layer, unit.position)
        unit_rope = None if rope is None else tuple([array[rows] for array in rope])  # no calls for each layer
        adapters = of_rows and of_rows.part(rows)
        mixed = self.of_mtp(x, rows) if is_last and self.of_mtp is not None else x[rows]
        projected = mixer.project(mixed, unit_rope, unit.spans[group], adapters=adapters, recorded=False, tap=tap)
        if complete:
            self.store.seal(layer, *complete)
        for span in complete:
            if span.round_trip:
                self.store.round_trip(layer, span)
        skipped = unit.skipped if is_last else 0
        if skipped < len(projected):
            spans, kept = unit.last if is_last else unit.spans[group], slice(rows.start + skipped, rows.stop)
            adapters = of_rows and of_rows.part(kept)
            mixer.mix(x[kept], projected[skipped:], spans, adapters=adapters, recorded=False)
            self.layers[layer].finish(
                x[kept], None if inputs is None else inputs[kept], adapters=adapters, recorded=False
            )
