"""Multi-token prediction: a layer after a model's last one, which guesses the token after the next one.

Its rows are made of a token and the hidden state of the token before it, both normed. The row of token i is at position
i of the store, so that the layer is one more of a sequence, with K/V in the same blocks. The hidden state before a row
that was not computed here, as after a prefix hit, is zeros: guesses get worse, answers stay the same.

Prompts and steps append the layer's K/V. Only drafting computes all of it, a row at a time, each from the hidden state
of the one before. K/V of drafted rows last until the step that verifies them.

Letters: T rows, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.model.layers.kinds import DecoderLayer, MtpWeights
from polarlm.engine.model.rope import RopeTables
from polarlm.engine.sampling.sample import Sampled, greedy
from polarlm.engine.state.store import KVStore, Span, positions
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders.config import ModelConfig


class MtpLayer:
    """The layer of `ModelConfig.mtp`, on the card that has the model's head."""

    def __init__(
        self,
        ops: Ops,
        config: ModelConfig,
        weights: MtpWeights,
        last_norm: Array,
        head: Linear,
        store: KVStore,
        layer: DecoderLayer,
        ropes: RopeTables,
        embed: Callable[..., tuple[Array, Array | None]],
    ) -> None:
        """ops: of the first card, if there are several. last_norm, head: of the model. embed: as `Transformer`'s."""
        self._number, self._size, self._head = config.depth, config.hidden_size, head
        self._first, self._ops, self.store, self._layer = ops, layer.ops, store, layer
        self._group, self._ropes, self._embed = store.groups[store.group_of(self._number)], ropes, embed
        norms = last_norm, weights.embedding_norm, weights.hidden_norm, weights.norm
        self._last_norm, self._embedding_norm, self._hidden_norm, self._norm = ((one, config.norm_eps) for one in norms)
        self._projection, self._sampler_inputs = weights.projection, [greedy(config.vocab_size)]

    # -- prompts ------------------------------------------------------------------------------------------------

    def of_prompt(self, span: Span, ids: np.ndarray) -> Callable[[Array, slice], Array]:
        """Return a function of the model's hidden states x (T, E), which are complete, and of a part of their rows: it
        returns the layer's input for these. ids (T,) int32: the tokens of `span`."""
        return partial(self._of_prompt, span, ids)

    def _of_prompt(self, span: Span, ids: np.ndarray, x: Array, rows: slice) -> Array:
        ops, e, is_first = self._ops, self._size, rows.start == 0
        both = np.zeros((rows.stop - rows.start, 2 * e), np.float32)
        if is_first and span.sequence.hidden is not None:
            both[0, e:] = span.sequence.hidden
        both, before = ops.to_device(both), x[max(0, rows.start - 1) : rows.stop - 1]
        ops.rms_norm(self._embedded(ids[rows]), self._embedding_norm, both[:, :e])
        if len(before):
            ops.rms_norm(before, self._last_norm, both[is_first:, e:])
        ops.rms_norm(both[:, e:], self._hidden_norm)
        if rows.stop == len(x):
            newest = ops.to_device(np.zeros((1, e), np.float32))
            ops.rms_norm(x[len(x) - 1 : len(x)], self._last_norm, newest)
            span.hidden = ops.to_host(newest)
        return ops.linear(both, self._projection)

    def _embedded(self, ids: np.ndarray) -> Array:
        x, _ = self._embed(self._first.to_device(ids))
        return x if self._first is self._ops else self._ops.to_device(self._first.to_host(x))

    # -- steps --------------------------------------------------------------------------------------------------

    def append(self, spans: Sequence[Span], ids: np.ndarray, states: Array) -> None:
        """Append the K/V of a step's rows. ids (T,) int32: their tokens. states (T, E): the model's hidden states of
        them, normed, which the spans keep."""
        hidden, before, end = np.array(self._ops.to_host(states)), np.zeros((len(ids), self._size), np.float32), 0
        for span in spans:
            first, end = end, end + span.count
            before[first + 1 : end] = hidden[first : end - 1]
            if span.sequence.hidden is not None:
                before[first] = span.sequence.hidden
            span.hidden = hidden[first:end]
        self._run(self._append, spans, ids, before)

    def draft(self, span: Span, token: int, hidden: np.ndarray) -> tuple[Sampled, np.ndarray]:
        """Compute the row `span` of a step, of a token and the hidden state (E,) before it. Return the most likely next
        token, or the error why there is none, and the row's hidden state (E,)."""
        packed, ids = self._ops.pack_sampler_inputs(self._sampler_inputs), np.array([token], np.int32)
        chosen, logits, states = self._run(self._draft, [span], ids, hidden[None], packed)
        (sampled,) = self._ops.fetch_tokens(chosen, logits, self._sampler_inputs)
        return sampled, np.array(self._ops.to_host(states)[0])

    def _run(
        self, work: Callable[..., Any], spans: Sequence[Span], ids: np.ndarray, before: np.ndarray, *inputs: Any
    ) -> Any:
        both = np.concatenate([self._ops.to_host(self._embedded(ids)), before], axis=1)
        rope, seen, end = self._ropes.tables(positions(spans)), list[Any](), 0
        for span in spans:
            first, end = end, end + span.count
            seen.append(self.store.view(self._number, span, slice(first, end), span.start))
        tables = [self._group.spans(seen), *(self._ropes.of_layer(self._number, rope) or ())]
        return self._ops.run_graph(work.__name__, work, [both, *inputs, *tables])

    def _append(self, both: Array, spans: Any, *rope: Array) -> Array:
        x = self._projected(both)
        self._layer.mixer.project(x, rope, spans, adapters=None, recorded=True)
        return x

    def _draft(self, both: Array, sampler_inputs: Any, spans: Any, *rope: Array) -> tuple[Array, Array, Array]:
        """One row: tokens (1,), logits (1, V), hidden states (1, E)."""
        x = self._projected(both)
        seen = self._layer.mixer.project(x, rope, spans, adapters=None, recorded=True)
        self._layer.mixer.mix(x, seen, spans, adapters=None, recorded=True)
        self._layer.finish(x, None, adapters=None, recorded=True)
        self._ops.rms_norm(x, self._norm)
        logits = self._ops.linear(x, self._head, recorded=True)
        return self._ops.sample(logits, sampler_inputs), logits, x

    def _projected(self, both: Array) -> Array:
        """both (T, 2E): embeddings and the hidden states before them, which are normed in place → (T, E)."""
        e = self._size
        self._ops.rms_norm(both[:, :e], self._embedding_norm)
        self._ops.rms_norm(both[:, e:], self._hidden_norm)
        return self._ops.linear(both, self._projection, recorded=True)
