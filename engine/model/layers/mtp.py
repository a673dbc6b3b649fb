"""Multi-token prediction: a layer after a model's last one, which guesses the token after the next one.

Its rows are made of a token and the hidden state of the token before it, both normed. The row of token i is at position
i of the store, so that the layer is one more of a sequence, with K/V in the same blocks. The hidden state before a row
that was not computed here, as after a prefix hit, is zeros: guesses get worse, answers stay the same.

Prompts and steps append the layer's K/V. Only drafting computes all of it, a row of each sequence at a time, from the
hidden state of the row before. K/V of drafted rows last until the step that verifies them.

Letters: T rows, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.model.decoder import DecoderLayer, InputChoice, Inputs, MtpInputs, run_graph
from polarlm.engine.model.layers.kinds import MtpWeights
from polarlm.engine.sampling.sample import Sampled, greedy
from polarlm.engine.state.positions import rope_positions
from polarlm.engine.state.store import Span
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders.config import ModelConfig


class MtpRow(NamedTuple):
    """A row to draft with: where it goes, its token, and the hidden state (E,) float32 of the token before it."""

    span: Span
    token: int
    hidden: np.ndarray


@dataclass
class JoinedStates:
    """What an EAGLE-3 head reads of a model (`eagle3.py`): the sum of products with the rows before some layers, which
    grows while the layers are computed."""

    ops: Ops
    products: Sequence[tuple[int, Linear]]  # layers and their products, (E of the head, E)
    sum: Array | None = None  # (T, E of the head)

    def add(self, layer: int, x: Array) -> None:
        """Add what the rows x (T, E) before a layer give."""
        for number, product in self.products:
            if number == layer:
                self.sum = self.ops.linear(x, product, residual=self.sum)


class MtpLayer:
    """The layer of `ModelConfig.mtp`, on the GPU that has the model's head."""

    def __init__(
        self,
        ops: Ops,
        config: ModelConfig,
        weights: MtpWeights,
        last_norm: Array,
        head: Linear,
        layers: Sequence[DecoderLayer],
        choice: InputChoice,
        embed: Callable[..., tuple[Array, Array | None]],
    ) -> None:
        """ops: of the first GPU, if there are several. last_norm, head: the model's. embed: as `Transformer`'s."""
        self._number, self._size, self._head = config.depth, config.hidden_size, head
        self._layer, self._layers = layers[0], layers
        self._first, self._ops, self.store = ops, layers[0].ops, choice.store
        self._choice, self._embed = choice, embed
        self._groups = {self.store.group_of(self._number + at): self._number + at for at in range(len(layers))}
        norms = last_norm, weights.embedding_norm, weights.hidden_norm, weights.norm
        self._last_norm, self._embedding_norm, self._hidden_norm, self._norm = ((one, config.norm_eps) for one in norms)
        self._projection, self._greedy = weights.projection, [greedy(config.vocab_size)]
        self._is_eagle3 = config.eagle3 is not None
        self.has_kv = config.assistant is None  # without K/V of its own it drafts all tokens from one place

    def states(self) -> JoinedStates | None:
        """Return what joins the hidden states that rows are made of; None: they are the model's last ones."""
        return None

    # -- prompts ------------------------------------------------------------------------------------------------

    def prompt_input(self, span: Span, ids: np.ndarray, states: JoinedStates | None, x: Array, rows: slice) -> Array:
        """Return the layer's input for a part of the rows of x (T, E), the model's hidden states, which are complete.
        ids (T,) int32: the tokens of `span`. states: what `states` returned for this prompt."""
        ops, e, is_first = self._ops, self._size, rows.start == 0
        both = np.zeros((rows.stop - rows.start, 2 * e), np.float32)
        if is_first and span.sequence.hidden is not None:
            both[0, e:] = span.sequence.hidden
        x = x if states is None else states.sum
        both, before = ops.to_device(both), x[max(0, rows.start - 1) : rows.stop - 1]
        embedded = self._embed_rows(ids[rows])
        embedded[: int(self._is_eagle3 and is_first and span.start == 0)] = 0
        ops.rms_norm(embedded, self._embedding_norm, both[:, :e])
        if len(before):
            self._take_states(before, both[is_first:, e:])
        ops.rms_norm(both[:, e:], self._hidden_norm)
        return self._layer_input(both)

    def keep_last(self, span: Span, x: Array) -> None:
        """Let the span of a prompt keep its last row of x (T, E), the model's hidden states or joined ones."""
        newest = self._ops.to_device(np.zeros((1, self._size), np.float32))
        self._take_states(x[len(x) - 1 : len(x)], newest)
        span.hidden = self._ops.to_host(newest)

    def _take_states(self, x: Array, zeros: Array) -> None:
        """Put rows of the model's hidden states x (T, E) where there are zeros (T, E), normed, or joined ones."""
        if self._is_eagle3:
            zeros[...] = x
        else:
            self._ops.rms_norm(x, self._last_norm, zeros)

    def _embed_rows(self, ids: np.ndarray) -> Array:
        x, _ = self._embed(self._first.to_device(ids))
        return x if self._first is self._ops else self._ops.to_device(self._first.to_host(x))

    # -- steps --------------------------------------------------------------------------------------------------

    def step_inputs(self, spans: Sequence[Span], ids: np.ndarray) -> MtpInputs:
        """Return the inputs of a step's rows, whose tokens are ids (T,) int32, on the host."""
        firsts = np.cumsum([0, *(span.count for span in spans[:-1])])
        before, follows = np.zeros((len(ids), self._size), np.float32), np.ones((len(ids), 1), np.float32)
        follows[firsts] = 0
        embedded = self._ops.to_host(self._embed_rows(ids))
        for first, span in zip(firsts, spans, strict=True):
            if span.sequence.hidden is not None:
                before[first] = span.sequence.hidden
            embedded[first : first + (self._is_eagle3 and span.start == 0)] = 0
        return MtpInputs(np.concatenate([embedded, np.zeros_like(before)], axis=1), before, follows)

    def append(self, x: Array, inputs: Inputs) -> Array:
        """Append the K/V of a step's rows, if any. x (T, E): the model's hidden states, which are normed here, or
        joined ones. Return them."""
        if not self._is_eagle3:
            self._ops.rms_norm(x, self._last_norm)
        if inputs.mtp is None:
            return x
        ops, e, rows, (both, before, follows) = self._ops, self._size, len(x), inputs.mtp
        ops.rms_norm(both[:, :e], self._embedding_norm)
        if rows > 1:
            ops.rms_norm(x[: rows - 1], self._hidden_norm, both[1:, e:])
            ops.scale(both[1:, e:], follows[1:])
        ops.rms_norm(before, self._hidden_norm, both[:, e:])
        layer_inputs = self._choice(self._number, inputs._replace(adapters=None))
        self._layer.mixer.project(self._layer_input(both), layer_inputs)
        return x

    def _layer_input(self, both: Array) -> Array:
        """Return what the layer reads of embeddings and hidden states, both (T, 2E), normed."""
        return both if self._is_eagle3 else self._ops.linear(both, self._projection)

    def keep(self, spans: Sequence[Span], states: Array) -> None:
        """Let the spans of a step keep their rows of states (T, E), which `append` has returned."""
        hidden, end = np.array(self._ops.to_host(states)), 0
        for span in spans:
            first, end = end, end + span.count
            span.hidden = hidden[first:end]

    def draft(self, rows: Sequence[MtpRow]) -> list[tuple[Sampled, np.ndarray]]:
        """Compute one row each of several sequences. Return of each the most likely next token, or the error why there
        is none, and the row's hidden state (E,)."""
        embedded = self._ops.to_host(self._embed_rows(np.array([row.token for row in rows], np.int32)))
        inputs = self._draft_inputs(embedded, np.stack([row.hidden for row in rows]))
        spans, samplers = [row.span for row in rows], self._greedy * len(rows)
        ropes, of_groups = self._choice.ropes.tables(rope_positions(spans)), [None] * len(self.store.groups)
        for group, layer in self._groups.items():
            rows_of = [(span, slice(at, at + 1), span.start - (not self.has_kv)) for at, span in enumerate(spans)]
            of_groups[group] = self.store.groups[group].spans([self.store.view(layer, *one) for one in rows_of])
        run = inputs._replace(ropes=ropes, spans=tuple(of_groups), sampler=self._ops.pack_sampler_inputs(samplers))
        chosen, logits, states = run_graph(self._ops, "mtp", self._draft, run)
        sampled = self._ops.fetch_tokens(chosen, logits, samplers)
        return [*zip(sampled, np.array(self._ops.to_host(states)), strict=True)]

    def _draft_inputs(self, embedded: np.ndarray, hidden: np.ndarray) -> Inputs:
        """embedded (T, E), hidden (T, E): of tokens, and of those before; a copy of it."""
        return Inputs(np.concatenate([embedded, hidden], axis=1))

    def _draft(self, inputs: Inputs) -> tuple[Array, Array, Array]:
        """Rows of an embedding and the hidden state before it, `x` (T, 2E) → tokens (T,), logits (T, V), hidden states
        (T, E)."""
        ops, e, both = self._ops, self._size, inputs.x
        ops.rms_norm(both[:, :e], self._embedding_norm)
        ops.rms_norm(both[:, e:], self._hidden_norm)
        x = ops.linear(both, self._projection)
        layer_inputs = self._choice(self._number, inputs)
        self._layer.complete(x, self._layer.mixer.project(x, layer_inputs), layer_inputs)
        ops.rms_norm(x, self._norm)
        logits = ops.linear(x, self._head)
        return ops.sample(logits, inputs.sampler), logits, x
