"""The forward pass of a decoder, written once over the op set.

Letters: T rows, E hidden size, F feed-forward size, H query heads, K KV heads, D head dim, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polarlm.engine.backends.kv import HeadTransform
from polarlm.engine.backends.ops import Array, Draws, Ops, Spans
from polarlm.engine.errors import EngineError
from polarlm.engine.model.layers import Tap
from polarlm.engine.model.layers.gated_mlp import GatedMLPWeights
from polarlm.engine.model.layers.kinds import FFNS, MIXERS, Mixer
from polarlm.engine.model.rope import Rope, RopeTables
from polarlm.engine.sampling.sample import NOT_FINITE, Draw, Fetch, Sampled
from polarlm.engine.state.store import KVStore, Span
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders.config import ModelConfig

Taps = Callable[[str, int, int, Array], None]
"""taps(name, layer, position, x) is called with values of a prompt's forward pass, for the rows from `position` on.

name: "input" (T, E), the input of the layer, which may be changed in place; "queries" (T, H, D) and "keys" (T, K, D),
scaled and rotated as they are stored; "attention" (T, H·D), the input of the output projection. x is valid until the
call returns. Parts of a prompt may come in any order, and from several threads.
"""


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a decoder layer."""

    mixer: Any  # of the kind's `Weights`
    ffn: GatedMLPWeights

    @property
    def matrices(self) -> dict[str, Linear]:
        """All that rows are multiplied by, by their names."""
        return {name: w for part in (self.mixer, self.ffn) for name, w in vars(part).items() if isinstance(w, Linear)}


@dataclass(frozen=True)
class _Part:
    """Rows of a prompt that go through a layer together, and the spans that their K/V go to."""

    rows: slice
    position: int  # of the first row, in its sequence
    spans: Sequence[Spans]  # for each group of layers
    skipped: int  # first rows whose output is not needed: in the last layer, only their K/V are computed
    last: Spans  # for the last layer, without the skipped rows


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a model, on the device."""

    embedding: Matrix  # (V, E)
    layers: Sequence[LayerWeights]
    norm: Array  # (E,)
    head: Linear  # (V, E); the embedding itself if they are tied
    bytes: int


class Transformer:
    """The forward pass: token ids to logits; keys and values are appended to the store."""

    def __init__(self, ops: Ops, config: ModelConfig, weights: ModelWeights, store: KVStore):
        self.ops = ops
        self.config = config
        self.store = store
        # Called in prefill with one span, never in steps, which may be recorded. May be set at any time.
        self.taps: Taps | None = None
        self._ropes = RopeTables(config)
        transforms = [
            HeadTransform(
                attention.kv_heads,
                (stored := store.conditioning[layer]).scales(attention.heads),
                stored.key_rotation,
                stored.value_rotation,
                stored.scales_back(attention.heads),
            )
            for layer, attention in config.attentions.items()
        ]
        self._transforms = dict(zip(config.attentions, ops.prepare(transforms), strict=True))
        self.weights = weights

    @property
    def weights(self) -> ModelWeights:
        """The weights that the next forward pass computes with."""
        return self._weights

    @weights.setter
    def weights(self, weights: ModelWeights) -> None:
        self._weights = weights
        ops, eps, layers = self.ops, self.config.norm_eps, [*zip(self.config.layers, weights.layers, strict=True)]
        self._mixers: list[Mixer] = [
            MIXERS[type(layer.mixer)](
                ops, layer.mixer, eps, w.mixer, self.store.cache(number), self._transforms.get(number)
            )
            for number, (layer, w) in enumerate(layers)
        ]
        self._ffns = [FFNS[type(layer.ffn)](ops, layer.ffn, eps, w.ffn) for layer, w in layers]

    # -- prefill ------------------------------------------------------------------------------------------------

    def forward_units(
        self, spans: Sequence[Span], ids: Sequence[int], outputs: int | None = None, *, by_layer: bool = False
    ) -> Generator[int, None, Array]:
        """Compute the new tokens `ids` of `spans`, in order, unit by unit, and append their K/V to the store.

        A generator, so that other work can run between units: it yields the number of rows after each unit and returns
        the hidden states of the last `outputs` rows (None: of all), (outputs, E). A unit is `prefill_rows` rows of one
        layer, or as many layers of fewer rows; with `by_layer`, never more than one layer. It seals all layers; the
        caller commits. Several spans must be spans of a step.
        Cost per token: 2 FLOPs per weight, and attention over all tokens before it. Memory: T·E for the hidden states,
        and one layer's K/V.
        """
        # With a round trip, a block is encoded as a whole before any of its tokens attends.
        count, whole = len(ids), any(span.round_trip for span in spans)
        step = count if whole else self.ops.prefill_rows
        first_output = 0 if outputs is None else count - outputs
        x = self._embed(self.ops.to_device(np.asarray(ids, np.int32)))
        ropes = [(self.ops.to_device(cos), self.ops.to_device(sin)) for cos, sin in self._rope(spans)]
        units = [slice(first, min(first + step, count)) for first in range(0, count, step)]
        parts = [[self._part(spans, rows, first_output) for rows in self.ops.split_rows(unit)] for unit in units]
        done, last = 0, (len(self._mixers) - 1, units[-1])
        for layer in range(len(self._mixers)):
            for span in spans:
                self.store.begin_layer(layer, span)
            rope = self._rope_of(layer, ropes)
            for unit, unit_parts in zip(units, parts, strict=True):
                self._layer(layer, x, rope, unit_parts, spans if unit is units[-1] else ())
                rows = unit.stop - unit.start
                done += rows
                if by_layer or done + rows > step or (layer, unit) == last:
                    yield done
                    done = 0
        return x[first_output:]

    def forward(self, spans: Sequence[Span], ids: Sequence[int]) -> Array:
        """All of `forward_units` at once: hidden states (T, E)."""
        units = self.forward_units(spans, ids)
        while True:
            try:
                next(units)
            except StopIteration as end:
                return end.value

    def logits(self, hidden: Array) -> np.ndarray:
        """Hidden states (T, E) → logits (T, V) float32 on the host. Raises EngineError if they are not finite."""
        logits = self.ops.to_host(self._head(hidden))
        if not np.isfinite([logits.max(axis=1), logits.min(axis=1)]).all():  # both of a row with NaN are NaN
            raise EngineError(NOT_FINITE, "model_damaged")
        return logits

    def final_states(self, hidden: Array) -> np.ndarray:
        """Hidden states (T, E), which are overwritten → those that the head sees, (T, E) float32 on the host.

        Raises EngineError if they are not finite.
        """
        self.ops.rms_norm(hidden, (self.weights.norm, self.config.norm_eps))
        states: np.ndarray = self.ops.to_host(hidden)
        if not np.isfinite(states).all():
            raise EngineError(NOT_FINITE, "model_damaged")
        return states

    def choose(self, hidden: Array, draws: Sequence[Draw]) -> list[Sampled]:
        """Hidden states (B, E) → the token that follows each, or the error for which none can be chosen."""
        logits = self._head(hidden)
        return self.ops.fetch_tokens(self.ops.sample(logits, self.ops.pack_draws(draws)), logits, draws)

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self, spans: Sequence[Span], ids: Sequence[int], draws: Sequence[Draw]) -> list[Sampled]:
        """Compute the rows of a step → the token that follows each row, or the error for which there is none.

        ids, draws: of the T rows of all `spans`, in order. spans: from `KVStore.open_step`; the caller commits them.
        Rows of a sequence attend to each other causally. Cost: the weights are read once for all rows.
        """
        chosen, logits = self._launch(spans, np.asarray(ids, np.int32), draws)
        return self.ops.fetch_tokens(chosen, logits, draws)

    def step_ahead(self, spans: Sequence[Span], ids: Sequence[int] | Fetch, draws: Sequence[Draw]) -> Fetch:
        """`step` for sequences of one row, without waiting for its tokens; for ops with `fetch_later`.

        ids: of the rows, or the fetch of the step before, with the same sequences in the same order.
        """
        assert self.ops.fetch_later is not None
        given = ids.ids if isinstance(ids, Fetch) else np.asarray(ids, np.int32)
        chosen, _ = self._launch(spans, given, draws)
        return self.ops.fetch_later(chosen, draws)

    def rows_ahead(self, spans: Sequence[Span], before: Fetch) -> Array:
        """`step_ahead` without draws, for `draw_ahead` → logits (B, V), valid until the next step begins."""
        return self.ops.run_graph(("rows", 1), self._rows, [before.ids, *self._tables(spans)])

    def draw_ahead(self, logits: Array, draws: Sequence[Draw]) -> Fetch:
        """Draw the tokens of `rows_ahead`, without waiting for them."""
        assert self.ops.fetch_later is not None
        return self.ops.fetch_later(self.ops.sample(logits, self.ops.pack_draws(draws)), draws)

    def _launch(self, spans: Sequence[Span], ids: Any, draws: Sequence[Draw]) -> tuple[Array, Array]:
        """The tokens that follow the rows, on the device, and logits (T, V)."""
        inputs = [ids, self.ops.pack_draws(draws), *self._tables(spans)]
        most = max(span.count for span in spans)
        return self.ops.run_graph(("step", most), self._step, inputs)

    def _tables(self, spans: Sequence[Span]) -> list[Any]:
        """The tables of `_rows` for all rows of `spans`."""
        rows = slice(0, sum(span.count for span in spans))
        seen = [self._spans(group.layers[0], spans, rows) for group in self.store.groups]
        return [*(table for rope in self._rope(spans) for table in rope), *seen]

    def _step(self, ids: Array, draws: Draws, *tables: Any) -> tuple[Array, Array]:
        """ids (T,) int32 → tokens (T,), logits (T, V). tables: as for `_rows`."""
        logits = self._rows(ids, *tables)
        return self.ops.sample(logits, draws, ids), logits

    def _rows(self, ids: Array, *tables: Any) -> Array:
        """ids (T,) int32 → logits (T, V).

        tables: cos and sin (T, D/2) of each kind of RoPE, then the spans of each group of layers.
        """
        x, first_spans = self._embed(ids), 2 * len(self._ropes)
        ropes = [tables[first : first + 2] for first in range(0, first_spans, 2)]
        for layer, (mixer, ffn) in enumerate(zip(self._mixers, self._ffns, strict=True)):
            rope, spans = self._rope_of(layer, ropes), tables[first_spans + self.store.group_of(layer)]
            mixer.mix(x, mixer.project(x, rope, spans, recorded=True), spans, recorded=True)
            ffn.add(x, recorded=True)
        return self._head(x, recorded=True)

    # -- one layer ----------------------------------------------------------------------------------------------

    def _rope(self, spans: Sequence[Span]) -> list[Rope]:
        """cos and sin of the spans' positions, for each kind of RoPE."""
        counts = [span.count for span in spans]
        if sum(counts) == len(spans):  # as in most steps
            return self._ropes.tables(np.array([span.start for span in spans]))
        rows = np.arange(sum(counts))
        firsts = np.cumsum([0, *counts[:-1]])
        return self._ropes.tables(rows + np.repeat([span.start for span in spans] - firsts, counts))

    def _rope_of(self, layer: int, ropes: Sequence[Any]) -> Any:
        """cos and sin for a layer, out of those of all kinds; None without attention."""
        kind = self._ropes.kind.get(layer)
        return None if kind is None else ropes[kind]

    def _embed(self, ids: Array) -> Array:
        """ids (T,) int32 → (T, E)."""
        return self.ops.embed(self.weights.embedding, ids, self.config.embedding_scale)

    def _part(self, spans: Sequence[Span], rows: slice, first_output: int) -> _Part:
        count = rows.stop - rows.start
        skipped = min(max(0, first_output - rows.start), count)
        seen = [self._spans(group.layers[0], spans, rows) for group in self.store.groups]
        last, position = len(self._mixers) - 1, spans[0].start + rows.start
        if skipped in (0, count):  # if all rows are skipped, none attends in the last layer
            return _Part(rows, position, seen, skipped, seen[self.store.group_of(last)])
        return _Part(rows, position, seen, skipped, self._spans(last, spans, slice(rows.start + skipped, rows.stop)))

    def _spans(self, layer: int, spans: Sequence[Span], rows: slice) -> Spans:
        """The parts of `spans` that lie in `rows`, for the group of a layer."""
        views, end = [], 0
        for span in spans:
            begin, end = end, end + span.count  # the span's rows
            first, last = max(begin, rows.start), min(end, rows.stop)
            if first < last:
                own = slice(first - rows.start, last - rows.start)
                views.append(self.store.view(layer, span, own, span.start + first - begin))
        return self.store.groups[self.store.group_of(layer)].spans(views)

    def _layer(self, layer: int, x: Array, rope: Any, parts: Sequence[_Part], complete: Sequence[Span]) -> None:
        """Compute one decoder layer for the rows of `parts` of x (T, E), in place, and seal the spans `complete`."""
        mixer, ffn = self._mixers[layer], self._ffns[layer]
        group, is_last = self.store.group_of(layer), layer == len(self._mixers) - 1

        def tap(position: int) -> Tap | None:
            taps = self.taps
            return None if taps is None else lambda name, x: taps(name, layer, position, x)

        def project(i: int) -> Any:
            rows, seen = parts[i].rows, tap(parts[i].position)
            if seen is not None:
                seen("input", x[rows])
            own = None if rope is None else (rope[0][rows], rope[1][rows])
            return mixer.project(x[rows], own, parts[i].spans[group], recorded=False, tap=seen)

        def mix(i: int) -> None:
            part, skipped = parts[i], parts[i].skipped if is_last else 0
            if skipped < len(queries[i]):
                spans, rows = part.last if is_last else part.spans[group], x[part.rows][skipped:]
                mixer.mix(rows, queries[i][skipped:], spans, recorded=False, tap=tap(part.position + skipped))
                ffn.add(rows, recorded=False)

        # A row attends to all K/V before it, so every part is projected before the first one attends.
        queries = [*map(project, range(len(parts)))] if mixer.in_order else self.ops.map_parts(project, len(parts))
        for span in complete:
            self.store.seal(layer, span)
            if span.round_trip:
                self.store.round_trip(layer, span)
        self.ops.map_parts(mix, len(parts))

    def _head(self, hidden: Array, *, recorded: bool = False) -> Array:
        """hidden (T, E) → logits (T, V)."""
        norm = self.weights.norm, self.config.norm_eps
        return self.ops.linear(hidden, self.weights.head, norm=norm, recorded=recorded)
