"""The forward pass of a decoder, written once over the op set.

Letters: T rows, E hidden size, F feed-forward size, H query heads, K KV heads, D head dim, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.backends.ops import Array, Draws, HeadTransform, Ops, Spans
from engine.errors import EngineError
from engine.kv.store import KVStore, Span
from engine.model.rope import Rope, RopeTables
from engine.sampling.sample import NOT_FINITE, Draw, Sampled
from engine.weight_formats import Linear, Matrix
from model_loaders.config import ModelConfig

Taps = Callable[[str, int, int, Array], None]
"""taps(name, layer, position, x) sees values of a prompt's forward pass; x has rows from `position` of the sequence on.

name: "input" (T, E), what the layer gets, which may be changed in place; "queries" (T, H, D) and "keys" (T, K, D), as
the store scales and rotates them; "attention" (T, H·D), what the output projection gets. x is good until the call
returns. Parts of a prompt may come in any order, from several threads.
"""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices are (out, in); None where the family has no such term."""

    attention_norm: Array | None  # (E,)
    qkv: Linear  # ((H + 2K)·D, E): q heads, k heads, v heads
    q_norm: Array | None  # (D,), or (H·D,) of all heads together
    k_norm: Array | None  # (D,), or (K·D,)
    out: Linear  # (E, H·D)
    ffn_norm: Array | None  # (E,)
    gate_up: Linear  # (2F, E)
    down: Linear  # (E, F)
    attention_post_norm: Array | None = None  # (E,): of what is added to the residual stream
    ffn_post_norm: Array | None = None


@dataclass(frozen=True)
class _Part:
    """Rows of a prompt that go through a layer together, and where their K/V go."""

    rows: slice
    position: int  # of the first, in its sequence
    spans: Sequence[Spans]  # for each group of layers
    skipped: int  # rows of the last layer that only leave their K/V: nobody reads their outputs
    last: Spans  # for the last layer, without the rows skipped


@dataclass(frozen=True)
class ModelWeights:
    """All weights on the device."""

    embedding: Matrix  # (V, E)
    layers: Sequence[LayerWeights]
    norm: Array  # (E,)
    head: Linear  # (V, E); the embedding itself where they are tied
    bytes: int


class Transformer:
    """Token ids in, logits out; K/V go to the store on the way."""

    def __init__(self, ops: Ops, config: ModelConfig, weights: ModelWeights, store: KVStore):
        self.ops = ops
        self.config = config
        self.weights = weights
        self.store = store
        # Sees prompts, of one sequence each, but no steps: these may be recorded. May be set at any time.
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
        """Take the new tokens `ids` of `spans`, in order, through all layers, and their K/V into the store.

        A generator, so that other work can stand between its units: it yields the rows done after each unit and returns
        the hidden states of the last `outputs` rows (all for None), (outputs, E). A unit is `prefill_rows` rows of a
        layer, or fewer rows of as many layers as are no more work; with `by_layer`, never of two layers. All layers
        are sealed then; commit is the caller's. Several spans must be those of a step.
        Cost per token: 2 FLOPs per weight, and attention that grows with the tokens before it; memory: T·E for the
        prompt, and one layer's K/V.
        """
        # A block that is seen through its codes is encoded as a whole before any of its tokens attends.
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
            for unit, of in zip(units, parts, strict=True):
                self._layer(layer, x, ropes[self._ropes.of_layer[layer]], of, spans if unit is units[-1] else ())
                rows = unit.stop - unit.start
                done += rows
                if by_layer or done + rows > step or (layer, unit) == last:
                    yield done
                    done = 0
        return x[first_output:]

    def forward(self, spans: Sequence[Span], ids: Sequence[int]) -> Array:
        """`forward_units` without stops: hidden states (T, E)."""
        units = self.forward_units(spans, ids)
        while True:
            try:
                next(units)
            except StopIteration as end:
                return end.value

    def logits(self, hidden: Array) -> np.ndarray:
        """Hidden states (T, E) → logits (T, V) float32 on the host. Raises EngineError where they are not finite."""
        logits = self.ops.to_host(self._head(hidden))
        if not np.isfinite(logits.max(axis=1)).all():  # NaN is the maximum of whatever holds it
            raise EngineError(NOT_FINITE, "model_damaged")
        return logits

    def choose(self, hidden: Array, draws: Sequence[Draw]) -> list[Sampled]:
        """The token that follows each of hidden (B, E), or why none can be chosen."""
        logits = self._head(hidden)
        return self.ops.fetch_tokens(self.ops.sample(logits, self.ops.pack_draws(draws)), logits, draws)

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self, spans: Sequence[Span], ids: Sequence[int], draws: Sequence[Draw]) -> list[Sampled]:
        """New rows of sequences through all layers → the token that follows each row, or why there is none.

        ids, draws: of the rows (T,) of all `spans`, which `KVStore.open_step` gave, in order; the rows of a sequence
        see each other causally. To commit the spans is the caller's. Cost: the weights are read once for all rows.
        """
        seen = [self._spans(layers[0], spans, slice(0, len(ids))) for _, layers in self.store.shape.groups]
        ropes = [table for rope in self._rope(spans) for table in rope]
        inputs = [np.asarray(ids, np.int32), self.ops.pack_draws(draws), *ropes, *seen]
        most = max(span.count for span in spans)
        chosen, logits = self.ops.run_graph(("step", most), self._step, inputs)
        return self.ops.fetch_tokens(chosen, logits, draws)

    def _step(self, ids: Array, draws: Draws, *tables: Any) -> tuple[Array, Array]:
        """ids (T,) int32 → tokens (T,), logits (T, V).

        tables: cos and sin (T, D/2) of each kind of RoPE, then the spans of each group of layers.
        """
        x, first_spans = self._embed(ids), 2 * len(self._ropes)
        for layer in range(self.config.layers):
            kind, seen = self._ropes.of_layer[layer], tables[first_spans + self.store.group_of(layer)]
            cos, sin = tables[2 * kind : 2 * kind + 2]
            self._mix(layer, x, self._project(layer, x, cos, sin, seen), seen)
        logits = self._head(x, recorded=True)
        return self.ops.sample(logits, draws), logits

    # -- one layer ----------------------------------------------------------------------------------------------

    def _rope(self, spans: Sequence[Span]) -> list[Rope]:
        """cos and sin of the spans' positions, per kind of RoPE."""
        return self._ropes.tables(np.concatenate([np.arange(s.start, s.start + s.count) for s in spans]))

    def _embed(self, ids: Array) -> Array:
        """ids (T,) int32 → (T, E)."""
        return self.ops.embed(self.weights.embedding, ids, self.config.embedding_scale)

    def _part(self, spans: Sequence[Span], rows: slice, first_output: int) -> _Part:
        count = rows.stop - rows.start
        skipped = min(max(0, first_output - rows.start), count)
        seen = [self._spans(layers[0], spans, rows) for _, layers in self.store.shape.groups]
        last, position = self.config.layers - 1, spans[0].start + rows.start
        if skipped in (0, count):  # of a part that is skipped as a whole nothing attends
            return _Part(rows, position, seen, skipped, seen[self.store.group_of(last)])
        return _Part(rows, position, seen, skipped, self._spans(last, spans, slice(rows.start + skipped, rows.stop)))

    def _spans(self, layer: int, spans: Sequence[Span], rows: slice) -> Spans:
        """Each span's part in `rows`, counted from the first of them."""
        views, end = [], 0
        for span in spans:
            begin, end = end, end + span.count  # of its rows
            first, last = max(begin, rows.start), min(end, rows.stop)
            if first < last:
                own = slice(first - rows.start, last - rows.start)
                views.append(self.store.view(layer, span, own, span.start + first - begin))
        return self.ops.spans(views, self.store.shape.block_size)

    def _layer(
        self, layer: int, x: Array, rope: tuple[Array, Array], parts: Sequence[_Part], complete: Sequence[Span]
    ) -> None:
        """Take the rows of `parts` of x (T, E) through one decoder layer, in place, and seal the spans `complete`."""
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

        # A row attends to all K/V before it: every part is projected before the first one attends.
        queries = self.ops.parallel_map(project, len(parts))
        for span in complete:
            self.store.seal(layer, span)
            if span.round_trip:
                self.store.round_trip(layer, span)
        self.ops.parallel_map(mix, len(parts))

    def _project(
        self, layer: int, x: Array, cos: Array, sin: Array, spans: Spans, position: int | None = None
    ) -> Array:
        """Append the K/V of x (T, E) to the spans and return its queries (T, H, D), as the store rotates them.

        position: of the first row, for the taps; None in a step, which has none and may be recorded.
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
        """Attention and feed-forward: x (T, E) with queries q (T, H, D) → x, in place.

        position: as for `_project`.
        """
        ops, config, w, recorded = self.ops, self.config, self.weights.layers[layer], position is None
        cache, window = self.store.cache(layer), config.window(layer)
        mixed = ops.attention(q, cache, spans, self.attention_scale, window, self._transforms[layer])
        mixed = mixed.reshape(len(x), config.heads * config.head_dim)
        if self.taps is not None and position is not None:
            self.taps("attention", layer, position, mixed)
        self._add(x, mixed, w.out, w.attention_post_norm, recorded)
        norm = self._norm(w.ffn_norm)
        activated = ops.linear(x, w.gate_up, norm=norm, activation=config.activation, recorded=recorded)
        self._add(x, activated, w.down, w.ffn_post_norm, recorded)

    def _add(self, x: Array, y: Array, w: Linear, post_norm: Array | None, recorded: bool) -> None:
        """x (T, E) += the projection of y (T, in), normalised before where there is a norm behind it."""
        norm = self._norm(post_norm)
        if norm is None:
            self.ops.linear(y, w, residual=x, recorded=recorded)
        else:
            self.ops.rms_norm(self.ops.linear(y, w, recorded=recorded), norm, residual=x)

    def _norm(self, weight: Array | None) -> tuple[Array, float] | None:
        """A norm as the ops take it."""
        return None if weight is None else (weight, self.config.norm_eps)

    def _head(self, hidden: Array, *, recorded: bool = False) -> Array:
        """hidden (T, E) → logits (T, V)."""
        norm = self.weights.norm, self.config.norm_eps
        return self.ops.linear(hidden, self.weights.head, norm=norm, recorded=recorded)
