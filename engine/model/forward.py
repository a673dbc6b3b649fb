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
from polarlm.engine.kv.store import KVStore, Span
from polarlm.engine.model.rope import Rope, RopeTables
from polarlm.engine.sampling.sample import NOT_FINITE, Draw, Fetch, Sampled
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
    """The weights of a decoder layer. Matrices are (out, in); None for what the family does not have."""

    attention_norm: Array | None  # (E,)
    qkv: Linear  # ((H + 2K)·D, E): q heads, k heads, v heads
    q_norm: Array | None  # (D,), or (H·D,) of all heads together
    k_norm: Array | None  # (D,), or (K·D,)
    out: Linear  # (E, H·D)
    ffn_norm: Array | None  # (E,)
    gate_up: Linear  # (2F, E)
    down: Linear  # (E, F)
    attention_post_norm: Array | None = None  # (E,): of the result, before it is added to the residual
    ffn_post_norm: Array | None = None


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
        self.weights = weights
        self.store = store
        # Called in prefill with one span, never in steps, which may be recorded. May be set at any time.
        self.taps: Taps | None = None
        self._ropes = RopeTables(config)
        self.attention_scale = config.attention_scale or config.head_dim**-0.5
        transforms = [
            HeadTransform(
                config.kv_heads,
                stored.scales(config.heads),
                stored.key_rotation,
                stored.value_rotation,
                stored.scales_back(config.heads),
            )
            for stored in store.conditioning
        ]
        self._transforms = ops.prepare(transforms)

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
        done, last = 0, (self.config.layers - 1, units[-1])
        for layer in range(self.config.layers):
            for span in spans:
                self.store.begin_layer(layer, span)
            rope = ropes[self._ropes.kind[layer]]
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
        seen = [self._spans(layers[0], spans, rows) for _, layers in self.store.shape.groups]
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
        for layer in range(self.config.layers):
            kind, seen = self._ropes.kind[layer], tables[first_spans + self.store.group_of(layer)]
            cos, sin = tables[2 * kind : 2 * kind + 2]
            self._mix(layer, x, self._project(layer, x, cos, sin, seen), seen)
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

    def _embed(self, ids: Array) -> Array:
        """ids (T,) int32 → (T, E)."""
        return self.ops.embed(self.weights.embedding, ids, self.config.embedding_scale)

    def _part(self, spans: Sequence[Span], rows: slice, first_output: int) -> _Part:
        count = rows.stop - rows.start
        skipped = min(max(0, first_output - rows.start), count)
        seen = [self._spans(layers[0], spans, rows) for _, layers in self.store.shape.groups]
        last, position = self.config.layers - 1, spans[0].start + rows.start
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
        return self.ops.spans(views, self.store.shape.block_size)

    def _layer(
        self, layer: int, x: Array, rope: tuple[Array, Array], parts: Sequence[_Part], complete: Sequence[Span]
    ) -> None:
        """Compute one decoder layer for the rows of `parts` of x (T, E), in place, and seal the spans `complete`."""
        cos, sin = rope
        group, is_last = self.store.group_of(layer), layer == self.config.layers - 1

        def project(i: int) -> Array:
            rows, position = parts[i].rows, parts[i].position
            if self.taps is not None:
                self.taps("input", layer, position, x[rows])
            return self._project(layer, x[rows], cos[rows], sin[rows], parts[i].spans[group], position)

        def mix(i: int) -> None:
            part, skipped = parts[i], parts[i].skipped if is_last else 0
            if skipped < len(queries[i]):
                spans = part.last if is_last else part.spans[group]
                self._mix(layer, x[part.rows][skipped:], queries[i][skipped:], spans, part.position + skipped)

        # A row attends to all K/V before it, so every part is projected before the first one attends.
        queries = self.ops.map_parts(project, len(parts))
        for span in complete:
            self.store.seal(layer, span)
            if span.round_trip:
                self.store.round_trip(layer, span)
        self.ops.map_parts(mix, len(parts))

    def _project(
        self, layer: int, x: Array, cos: Array, sin: Array, spans: Spans, position: int | None = None
    ) -> Array:
        """Append the K/V of x (T, E) to `spans` and return the queries (T, H, D), scaled and rotated as keys are.

        position: of the first row, for the taps; None in a step, which has no taps and may be recorded.
        """
        ops, config, w, recorded = self.ops, self.config, self.weights.layers[layer], position is None
        qkv = ops.linear(x, w.qkv, norm=self._norm(w.attention_norm), recorded=recorded)
        norms = None if w.q_norm is None else (w.q_norm, w.k_norm, config.norm_eps)
        if norms is not None and config.wide_qk_norm:
            keys, values = config.heads * config.head_dim, (config.heads + config.kv_heads) * config.head_dim
            ops.rms_norm(qkv[:, :keys], (w.q_norm, config.norm_eps))
            ops.rms_norm(qkv[:, keys:values], (w.k_norm, config.norm_eps))
            norms = None
        qkv = qkv.reshape(len(x), config.heads + 2 * config.kv_heads, config.head_dim)
        heads, cache = (qkv, (cos, sin), self._transforms[layer]), self.store.cache(layer)
        if self.taps is None or position is None:
            return ops.place_kv(*heads, cache, spans, norms)
        q, k, v = ops.transform_heads(*heads, norms)
        self.taps("queries", layer, position, q)
        self.taps("keys", layer, position, k)
        ops.append_kv(cache, spans, k, v)
        return q

    def _mix(self, layer: int, x: Array, q: Array, spans: Spans, position: int | None = None) -> None:
        """Add attention, for queries q (T, H, D), and then the feed-forward network to x (T, E), in place.

        position: as for `_project`.
        """
        ops, config, w, recorded = self.ops, self.config, self.weights.layers[layer], position is None
        cache, window = self.store.cache(layer), config.window(layer)
        mixed = ops.attention(q, cache, spans, self.attention_scale, window, self._transforms[layer], w.out)
        mixed = mixed.reshape(len(x), config.heads * config.head_dim)
        if self.taps is not None and position is not None:
            self.taps("attention", layer, position, mixed)
        self._add(x, mixed, w.out, w.attention_post_norm, recorded)
        norm = self._norm(w.ffn_norm)
        activated = ops.linear(x, w.gate_up, norm=norm, activation=config.activation, then=w.down, recorded=recorded)
        self._add(x, activated, w.down, w.ffn_post_norm, recorded)

    def _add(self, x: Array, y: Array, w: Linear, post_norm: Array | None, recorded: bool) -> None:
        """x (T, E) += the projection w of y (T, in), after `post_norm` if that is not None."""
        norm = self._norm(post_norm)
        if norm is None:
            self.ops.linear(y, w, residual=x, recorded=recorded)
        else:
            self.ops.rms_norm(self.ops.linear(y, w, recorded=recorded), norm, residual=x)

    def _norm(self, weight: Array | None) -> tuple[Array, float] | None:
        """(weight, epsilon) of a norm, as the ops take it."""
        return None if weight is None else (weight, self.config.norm_eps)

    def _head(self, hidden: Array, *, recorded: bool = False) -> Array:
        """hidden (T, E) → logits (T, V)."""
        norm = self.weights.norm, self.config.norm_eps
        return self.ops.linear(hidden, self.weights.head, norm=norm, recorded=recorded)
