"""The forward pass of a decoder, written once over the op set.

Letters: T rows, E hidden size, F feed-forward size, H query heads, K KV heads, D head dim, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from polarlm.engine.backends.kv import HeadTransform, Norm, PreparedTransform
from polarlm.engine.backends.ops import Array, ExpertCache, Fusion, Ops, PeerArray
from polarlm.engine.errors import EngineError
from polarlm.engine.model.adapters import row_adapters
from polarlm.engine.model.batch import PromptBatch, StepBatch, known_first
from polarlm.engine.model.batch_graphs import BatchGraphs
from polarlm.engine.model.decoder import (
    Chunk,
    InputChoice,
    Inputs,
    PromptRows,
    PromptTap,
    Rows,
    compute,
    decoder_layer,
    run_graph,
    stages,
)
from polarlm.engine.model.layers import Eps
from polarlm.engine.model.layers.assistant import AssistantLayers
from polarlm.engine.model.layers.eagle3 import Eagle3Layer
from polarlm.engine.model.layers.encoder import EncoderInputs, PairHead
from polarlm.engine.model.layers.kinds import LayerWeights
from polarlm.engine.model.layers.layer_embedding import TokenInputs
from polarlm.engine.model.layers.mtp import MtpLayer
from polarlm.engine.model.rope import RopeTables
from polarlm.engine.model.vision_encoders import ImagePart, ImageReader, read_images
from polarlm.engine.sampling.sample import NOT_FINITE, Fetch, SamplerInput
from polarlm.engine.state.image_positions import IMAGE_IDS
from polarlm.engine.state.positions import rope_positions
from polarlm.engine.state.step_spans import StepSpans
from polarlm.engine.state.store import KVStore, SequenceKV, Span
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders.config import Attention, LatentAttention, ModelConfig


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a model, on the device."""

    embedding: Matrix  # (V, E)
    layers: Sequence[LayerWeights]
    norm: Array | None  # (E,); None: the last layer has normed its sums
    head: Linear  # (V, E); the embedding itself if they are tied
    bytes: int
    layer_inputs: TokenInputs | None = None
    expert_cache: ExpertCache | None = None  # None: all experts are in memory
    encoder_inputs: EncoderInputs | None = None  # None for a model that adds nothing to its embeddings
    dense: Sequence[Linear] = ()  # see `ModelConfig.dense`
    pair_head: PairHead | None = None  # see `ModelConfig.scores_pairs`
    images: ImageReader | None = None  # None for a model that reads no images


class Transformer:
    """The forward pass: token ids to logits; keys and values are appended to the store."""

    def __init__(self, ops: Ops, config: ModelConfig, weights: ModelWeights, store: KVStore):
        self.ops = ops
        self.config = config
        self.store = store
        self.weights = weights
        self.tap: PromptTap | None = None  # called in prompts of one span, never in steps, which may be recorded
        self.mtp: MtpLayer | None = None
        self.batch_rows = 0 if config.mtp else store.batch_rows  # of a model that has batches of prompts
        # Logits may be most of a step's memory: on a CPU, rows whose next token is known have none.
        self.leaves_out_known = self.batch_rows > 0 and not ops.batches_take_steps
        self._ropes, self._spans = RopeTables(config), StepSpans(store)
        self._stages = stages(ops, len(config.layers))
        self._embedding_norm: Norm = None
        if config.embedding_norm:
            ones = self._stages[0].ops.to_device(np.ones(config.hidden_size, np.float32))
            self._embedding_norm = ones, config.norm_eps
        self._transforms: dict[int, PreparedTransform] = {}
        for stage in self._stages:
            numbers = [layer for layer in stage.layers if layer in config.attentions]
            transforms = [self._transform_of(layer, config.attentions[layer]) for layer in numbers]
            self._transforms |= zip(numbers, stage.ops.prepare(transforms), strict=True)
        self._make_layers(weights)

    def replace_weights(self, weights: ModelWeights) -> None:
        """Compute with these weights, which differ in what adapters add. No step may be under way."""
        self.weights = weights
        self.ops.forget()
        self._make_layers(weights)

    def _make_layers(self, weights: ModelWeights) -> None:
        self._work = cache(partial(partial, self._compute_stage))  # what is recorded is known by its identity
        self._head_fusion = Fusion((weights.norm, self.config.norm_eps))
        self._choice = InputChoice(self._ropes, self.store, len(self.config.layers))
        after = self.config.post_norm_eps
        eps = Eps(self.config.norm_eps, self.config.norm_eps if after is None else after)
        layer_ops, kv_cache, transform = self.ops.layer_ops, self.store.cache, self._transforms.get
        self._layers = [
            decoder_layer(layer_ops(number), self.config, eps, w, kv_cache(number), transform(number), number)
            for number, w in enumerate(weights.layers)
        ]
        self._batch_graphs = BatchGraphs(self.ops, self._layers, self._choice, self.config.hidden_size, self._embed)
        self.most_recorded_rows = self._batch_graphs.most_rows  # of a batch with `parts`
        if self.config.mtp:
            depth, eagle3, assistant = self.config.depth, self.config.eagle3, self.config.assistant
            mtp, head = weights.layers[depth].mtp, eagle3.model if eagle3 else assistant
            assert mtp is not None
            if head is not None:  # its layers have nothing of the model's own kinds
                eps = Eps(head.norm_eps, head.norm_eps)
                for number, w in enumerate(weights.layers[depth:], depth):
                    parts = w, kv_cache(number), transform(number), number - depth
                    self._layers[number] = decoder_layer(layer_ops(number), head, eps, *parts)
            shared = weights.norm, weights.head, self._layers[depth:], self._choice, self._embed
            kind: Any = AssistantLayers if assistant else Eagle3Layer if eagle3 else MtpLayer
            self.mtp = kind(self._stages[0].ops, self.config, mtp, *shared)

    def _transform_of(self, layer: int, attention: Attention) -> HeadTransform:
        stored, alone = self.store.conditioning[layer], attention.shares_kv  # whether there are queries alone
        scales = stored.scales(attention.heads)  # (H + 2K, D)
        if attention.qk_norm == "after_rope":
            w, ops, ones = self.weights.layers[layer].mixer, self.ops.layer_ops(layer), np.ones(attention.head_dim)
            counts = attention.heads, attention.kv_heads, attention.kv_heads
            rows = [ops.to_host(w.q_norm), ops.to_host(w.k_norm), ones]
            weights = np.repeat(rows, counts, axis=0).astype(np.float32)
            scales = weights if scales is None else scales * weights
        return HeadTransform(
            0 if alone else attention.kv_heads,
            scales[: attention.heads] if scales is not None and alone else scales,
            stored.key_rotation,
            stored.value_rotation,
            stored.scales_back(attention.heads),
            self.config.norm_eps if attention.v_norm else None,
            isinstance(attention, LatentAttention),
        )

    # -- the two ways in ---------------------------------------------------------------------------------------

    def chunks(self, batch: PromptBatch) -> Generator[int, None, Array]:
        """Compute the new tokens of prompts, chunk by chunk, and append their K/V to the store.

        A generator, so that other work can run between chunks: it yields the number of rows after each chunk and
        returns hidden states (outputs, E). A chunk is `prefill_rows` rows of `unit_layers` layers, or of more if there
        are fewer rows. A batch with `parts` is one chunk, and a recording if it has few rows. It seals all layers; the
        caller commits. Cost per token: 2 FLOPs per weight, and attention over all tokens before it. Memory: T·E for the
        hidden states, and the K/V of layers that are sealed together. Raises EngineError for an id without a row.
        """
        if batch.parts and len(batch.ids) <= self.most_recorded_rows:
            return self._batch_graphs.run(batch, table_rows(self.weights.embedding, batch.ids))
        read = (yield from read_images(self.weights.images, batch.images, batch.spans[0])) if batch.images else ()
        ids = [one if one < IMAGE_IDS else 0 for one in batch.ids] if read else batch.ids
        rows = table_rows(self.weights.embedding, ids)
        x, added = self._embed(self._stages[0].ops.to_device(rows), read)
        depth, most = self.config.depth, self.ops.prefill_rows
        prompt = PromptRows(self._choice, batch, rows, depth, most, read, self.tap, self.mtp)
        for number, (ops, numbers) in enumerate(self._stages):
            if number:
                x = ops.to_device(PeerArray(x, self._stages[number - 1].ops))
            layers = [(one, self._layers[one]) for one in numbers if one <= prompt.last]
            yield from prompt.compute(ops, layers, x, added)
        return prompt.outputs(x)

    def step(self, batch: StepBatch, ahead: bool = False) -> Fetch:
        """Compute the rows of a step, and sample the token after each, or the error why none can be; without samplers,
        compute the logits (B, V), which `sample` takes, and which are valid until the next step begins.

        ahead: do not wait for the tokens, where they can be fetched later, nor for `ids`. Cost: the weights are read
        once for all rows. Raises EngineError for an id without a row.
        """
        rows = batch.ids.ids if isinstance(batch.ids, Fetch) else table_rows(self.weights.embedding, batch.ids)
        spans, samplers, wanted = batch.spans, batch.samplers, list[int]()
        if samplers is None:
            return Fetch(None, list, self._run("rows", spans, rows)[0])
        if any(batch.known) and self.leaves_out_known:
            spans, order, wanted = known_first(batch)
            rows, samplers = rows[order], [samplers[row] for row in wanted]
        chosen, logits, *states = self._run("step", spans, rows, samplers, len(wanted))
        if ahead and self.ops.fetch_later is not None and self.mtp is None:
            return self.ops.fetch_later(chosen, samplers)
        tokens = self.ops.fetch_tokens(chosen, logits, samplers)
        if self.mtp is not None:
            self.mtp.keep(spans, *states)
        if wanted:
            found = dict(zip(wanted, tokens, strict=True))
            tokens = [found.get(row, 0) for row in range(len(rows))]
        return Fetch(None, lambda: tokens)

    # -- the ways out ------------------------------------------------------------------------------------------

    def logits(self, hidden: Array) -> np.ndarray:
        """Return the logits (T, V) float32 of hidden states (T, E), on the host. Raises EngineError if not finite."""
        logits = self.ops.to_host(self._head(hidden))
        if not np.isfinite([logits.max(axis=1), logits.min(axis=1)]).all():  # both of a row with NaN are NaN
            raise EngineError(NOT_FINITE, "model_damaged")
        return logits

    def final_states(self, hidden: Array) -> np.ndarray:
        """Norm hidden states (T, E) in place, as for the head, and return them as float32 on the host. Raises
        EngineError if they are not finite."""
        if self.config.centred:
            self.ops.centre(hidden)
        self.ops.rms_norm(hidden, (self.weights.norm, self.config.norm_eps))
        states: np.ndarray = self.ops.to_host(hidden)
        if not np.isfinite(states).all():
            raise EngineError(NOT_FINITE, "model_damaged")
        return states

    def after_pooling(self, pooled: np.ndarray) -> np.ndarray:
        """Return what the products after pooling make of a text's pooled states (E,) float64."""
        x = pooled
        for shape, weights in zip(self.config.dense, self.weights.dense, strict=True):
            product = self.ops.linear(self.ops.to_device(x.astype(np.float32)[None]), weights)
            x = self.ops.to_host(product)[0].astype(np.float64)
            x = np.tanh(x) if shape.tanh else x
        return x

    def choose(self, hidden: Array, samplers: Sequence[SamplerInput]) -> Fetch:
        """Sample the token after each of the hidden states (B, E), or the error why none can be. What is launched
        before the tokens are waited for is computed after them."""
        with self.ops.as_step():
            logits = self._head(hidden)
        chosen = self.ops.sample(logits, self.ops.pack_sampler_inputs(samplers))
        return Fetch(None, partial(self.ops.fetch_tokens, chosen, logits, samplers))

    def sample(self, logits: Array, samplers: Sequence[SamplerInput]) -> Fetch:
        """Sample the token after each row of a step's logits (B, V), without waiting for it."""
        assert self.ops.fetch_later is not None
        chosen = self.ops.sample(logits, self.ops.pack_sampler_inputs(samplers))
        return self.ops.fetch_later(chosen, samplers)

    # -- the work of a step ------------------------------------------------------------------------------------

    def known_rows(self, sequence: SequenceKV) -> int:
        """Return the most rows of a sequence in a step, if the tokens behind all but the last one are known."""
        if not self.leaves_out_known or self.store.sparse_groups:
            return self.store.rows_of_block(sequence)
        return self.store.first_of_block(sequence) + self.store.shape.block_size - sequence.length

    def _run(
        self,
        name: str,
        spans: Sequence[Span],
        ids: Any,
        sampler_inputs: Sequence[SamplerInput] = (),
        outputs: int = 0,
    ) -> Any:
        """Compute the rows, stage by stage, and return their logits (T, V) on the device; with sampler inputs, the next
        tokens (T,) before these; with `mtp`, the hidden states (T, E) that it keeps behind these. outputs: so many last
        rows have logits; 0 for all."""
        ropes, tables, adapters = self._ropes.tables(rope_positions(spans)), self._spans(spans), row_adapters(spans)
        *first_stages, last = self._stages
        x, newest = ids, None
        for number, (ops, _) in enumerate(first_stages):
            hidden = run_graph(ops, name, self._work(number, 0), Inputs(x, ropes, tables, adapters))
            x, newest = PeerArray(hidden, ops), ids if sampler_inputs else None
        sampler = last.ops.pack_sampler_inputs(sampler_inputs) if sampler_inputs else None
        mtp = None if self.mtp is None or not self.mtp.has_kv else self.mtp.step_inputs(spans, ids)
        work = self._work(len(first_stages), outputs)
        return run_graph(last.ops, name, work, Inputs(x, ropes, tables, adapters, None, sampler, newest, mtp))

    def _compute_stage(self, number: int, outputs: int, inputs: Inputs) -> Any:
        """One stage of a step → hidden states (T, E), or of the last stage what `_run` returns. outputs: so many last
        rows have logits; 0 for all."""
        x, added = self._embed(inputs.x) if number == 0 else (inputs.x, None)
        states = None if self.mtp is None else self.mtp.states()
        chunk = Chunk(slice(None), self._choice.distinct(inputs._replace(added=added)))
        rows = Rows(self._choice, [chunk], watch=None if states is None else states.add)
        layers = [layer for layer in self._stages[number].layers if layer < self.config.depth]
        for _ in compute([(layer, self._layers[layer]) for layer in layers], x, rows):
            pass
        if number < len(self._stages) - 1:
            return x
        result: tuple[Array, ...] = (self._head(x[-outputs:]),)
        if self.mtp is not None:
            rows.begin(self.config.depth, x)
            result = *result, self.mtp.append(x if states is None else states.sum, inputs)
        if inputs.sampler is None:
            return result
        newest = inputs.x if number == 0 else inputs.ids
        assert newest is not None
        return self.ops.sample(result[0], inputs.sampler, newest[-outputs:]), *result

    def _embed(self, ids: Array, images: Sequence[ImagePart] = ()) -> tuple[Array, Array | None]:
        """ids (T,) int32 → embeddings (T, E), rows of images in their places, and the inputs of all layers (T, L·P) if
        they have any."""
        ops = self._stages[0].ops
        x = ops.embed(self.weights.embedding, ids, self.config.embedding_scale)
        for part in images:
            x[part.at] = part.rows
        if self._embedding_norm is not None:
            ops.rms_norm(x, self._embedding_norm)
        if self.weights.layer_inputs is None:
            return x, None
        scale, eps = math.sqrt(self.config.layer_embedding / 2), self.config.norm_eps * self.config.hidden_size
        return x, self.weights.layer_inputs.compute(ops, ids, x, scale, eps)

    def _head(self, hidden: Array) -> Array:
        """hidden (T, E), which loses its mean if norms subtract it → logits (T, V)."""
        if self.config.centred:
            self.ops.centre(hidden)
        logits = self.ops.linear(hidden, self.weights.head, self._head_fusion)
        if self.config.logit_softcap is not None:
            self.ops.softcap(logits, self.config.logit_softcap)
        return logits


def table_rows(table: Matrix, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return numbers (T,) of rows of `table` as int32. Raises EngineError for a row that it lacks: kernels would read
    whatever lies there."""
    ids = np.asarray(numbers)
    strays = ids[(ids < 0) | (ids >= table.shape[0])]
    if strays.size:
        raise EngineError(
            f"The model has no row {strays[0]} in a table of {table.shape[0]:,}: send fewer or other tokens"
        )
    return ids.astype(np.int32)
