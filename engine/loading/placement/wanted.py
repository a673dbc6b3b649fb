"""What is to be placed: a model, its settings, the bytes of its weights, and the memory that it leaves to others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from polarlm import model_loaders
from polarlm.engine import codecs
from polarlm.engine.backends.ops import Load, Ops
from polarlm.engine.config import AS_STORED, EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.limits import DRAFT_MODEL, MOST_DRAFTED
from polarlm.engine.loading.encoding import WHOLE, Encoding
from polarlm.engine.loading.sizes import cache_shape, check_layers, loaded_bytes, weight_format
from polarlm.engine.model.adapters import LoadedAdapter, delta_bytes
from polarlm.engine.model.weights import EXPERT_SLOTS, bytes_of_layers, expert_bytes, weight_bytes
from polarlm.engine.state.plan import (
    StorePlan,
    parse_size,
    plan_for_memory,
    plan_for_tokens,
    with_kept,
    with_more_tokens,
)
from polarlm.engine.state.shapes import CacheShape
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import tensors
from polarlm.model_loaders.files.weights import WeightSource
from polarlm.model_loaders.vision_encoders import MOST_ROWS

CONTEXT_TO_CHOOSE_BY = 16_384  # tokens that must fit if the model's own context is longer
_TOKENS_OF_KEPT = 2048  # assumed length of a kept conversation, if memory exceeds one context
_OF_PATCHES = 7  # arrays as large as the hidden states of an image's patches: with their queries, keys and values
_SHARE_OF_KEPT = 8  # the part of a store that is added for conversations that are kept

More = Callable[[int], int]  # tokens of a context → bytes


def nothing(tokens: int) -> int:
    return 0


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights on the device, adapters included."""

    weights: int
    of_layers: tuple[int, ...] = ()  # each layer's experts, which `weights` contains
    on_host: tuple[int, ...] = ()  # each layer's experts, in the memory of a GPU's host

    @property
    def experts(self) -> int:
        return sum(self.of_layers)


class LayerSizes(NamedTuple):
    """Bytes of weights by their place in the model; every card has room for all adapters."""

    before: int
    layers: list[int]
    head: int
    adapters: int

    def of(self, layers: range) -> int:
        is_first, is_last = layers.start == 0, layers.stop == len(self.layers)
        return (
            self.adapters + self.before * is_first + sum(self.layers[layers.start : layers.stop]) + self.head * is_last
        )


@dataclass(frozen=True)
class Wanted:
    """A model that is to be placed, and the settings to load it with."""

    config: EngineConfig
    model: ModelConfig
    sizes: Sizes
    layer_sizes: Callable[[Ops], LayerSizes] | None = None  # None: unknown, so that one device has all layers
    more: More = nothing  # bytes to leave to something else, such as a draft model
    encoding: Encoding = WHOLE
    is_mapped: bool = False  # the system can drop the weights, and reads them again
    caches_experts: bool = True  # whether experts that do not fit may be read from the file when they are chosen
    reserved: int = 0  # bytes of the device's memory that other models will still take
    most: int | None = None  # bytes that weights and KV store may have; None for all that is free

    @property
    def context(self) -> int:
        """The tokens that have to fit: those that are asked for, or the model's own, up to 16,384."""
        return self.config.ctx_size or min(self.model.max_context, CONTEXT_TO_CHOOSE_BY)

    def changed(self, **settings: Any) -> Wanted:
        return replace(self, config=replace(self.config, **settings))

    def shape(self, ops: Ops) -> CacheShape:
        return cache_shape(self.config, self.encoding, ops, self.model)

    def room(self, ops: Ops, weights: int) -> int:
        """Return the bytes for the KV store and activations beside `weights` bytes. Raises EngineError
        ("out_of_memory")."""
        if self.is_mapped:  # half of the memory stays free of weights
            weights = min(weights, ops.free_memory() // 2)
        room = ops.memory_left(weights + self.reserved)
        return room if self.most is None else min(room, self.most - weights)

    def work(self, ops: Ops, shape: CacheShape, tokens: int) -> int:
        """Return the bytes that a prompt of `tokens` needs in addition to the KV store."""
        if self.model.is_encoder:
            return 0  # texts are computed a few at a time
        return ops.work_bytes(Load(self.model, shape.widest, tokens, self.config.parallel))

    def taken(self, ops: Ops, plan: StorePlan) -> int:
        """Return the bytes of a store, of the work on its longest prompt, and of what else is left room for."""
        return plan.bytes + self.work(ops, plan.shape, plan.tokens) + self.more(plan.tokens)

    def plan(self, ops: Ops, shape: CacheShape, room: int) -> StorePlan:
        """Return the plan of the KV store: one that takes all of kv_memory, or else one for the context, or the
        longest one that fits into `room` bytes together with the work on a prompt of its length and with `more`. Raises
        EngineError ("out_of_memory") if nothing fits."""

        def other_bytes(tokens: int) -> int:
            return self.work(ops, shape, tokens) + self.more(tokens)

        config, tokens = self.config, self.config.ctx_size or self.model.max_context
        sequences = config.kept_sequences + config.parallel
        if config.kv_memory is not None:
            memory = parse_size(config.kv_memory)
            plan = plan_for_memory(shape, memory, tokens, sequences)
            if config.kept_sequences and plan.tokens == tokens:
                plan = with_kept(plan, min(memory, room - other_bytes(tokens)), _TOKENS_OF_KEPT)
            return plan
        plan, other = plan_for_tokens(shape, tokens, sequences), other_bytes(tokens)
        if plan.bytes + other > room:
            return plan_for_memory(shape, room, tokens, sequences, other_bytes)
        if config.kept_sequences:
            plan = with_kept(plan, min(plan.bytes + plan.bytes // _SHARE_OF_KEPT, room - other), 0)
        if shape.has_two_kinds and not shape.is_by_age:  # the memory of a store whose blocks have the most bits
            plan = with_more_tokens(plan, self.plan(ops, shape.finest, room).bytes)
        return plan

    def is_met(self, ops: Ops, plan: StorePlan, weights: int, room: int) -> bool:
        """Return whether a store beside `weights` bytes has what was asked for: all of `kv_memory`, which on a CPU may
        be more than the half that `room` is, or else the context."""
        if self.config.kv_memory is None:
            return plan.tokens >= self.context
        if ops.name == "cpu":
            free = ops.free_memory() - self.reserved
            room = (free if self.most is None else min(free, self.most)) - weights
        return self.taken(ops, plan) <= room

    def fits(self, ops: Ops, shape: CacheShape, weights: int, context: int) -> bool:
        """Return whether a store for `context` tokens fits beside `weights` bytes on a device."""
        asked = self.changed(ctx_size=context)
        try:
            room = asked.room(ops, weights)
            return asked.is_met(ops, asked.plan(ops, shape, room), weights, room)
        except EngineError:
            return False


def wanted_of_source(
    config: EngineConfig, ops: Ops, model: ModelConfig, source: WeightSource, adapters: Sequence[LoadedAdapter] = ()
) -> Wanted:
    """Return the model of files that are here, with its weights as `config` converts them."""
    added, format = delta_bytes(ops, model, adapters), weight_format(config)
    of_layers, on_host = (
        () if device is None else tuple(expert_bytes(device, model, source, format)) for device in (ops, ops.host)
    )
    sizes = Sizes(weight_bytes(ops, source, format) + added, of_layers, on_host)

    def layer_sizes(ops: Ops) -> LayerSizes:
        return LayerSizes(*bytes_of_layers(ops, model, source, format), added)

    return Wanted(config, model, sizes, layer_sizes)


def wanted_of_bytes(config: EngineConfig, ops: Ops, model: ModelConfig, size: int) -> Wanted:
    """Return the model of a file whose size in bytes alone is known: experts have their share of values."""
    weights = loaded_bytes(config, ops, model, size)
    every = sum(math.prod(spec.shape) for spec in tensors(model).specs())
    counts = (
        sum(math.prod(spec.shape) for slot in EXPERT_SLOTS for spec in slots.get(slot, ()))
        for slots in tensors(model).layers
    )
    of_layers = tuple(weights * count // every for count in counts)
    return Wanted(config, model, Sizes(weights, of_layers, () if ops.host is None else of_layers))


def draft_config(config: EngineConfig, tokens: int) -> EngineConfig:
    """Return the settings of an engine's draft model for a context of `tokens`. Its store is in half precision."""
    return replace(
        config,
        weights=config.model_draft,
        model_draft=None,
        mmproj=model_loaders.NO_VISION_ENCODER,
        tensor_split=None,
        weight_type=AS_STORED,
        lora={},
        cache_type=codecs.FULL,
        cache_type_k=None,
        cache_type_v=None,
        kv_memory=None,
        cache_ram=None,
        cache_disk=None,
        expert_cache=None,
        cpu_moe=None,
        state_cache="1",  # too little for any snapshot: none would be found
        spec_type=DRAFT_MODEL,  # for the warm-up: its steps have as many rows as drafts
        draft_max=MOST_DRAFTED,
        ctx_size=tokens,
        kept_sequences=0,
    )


def bytes_beside(config: EngineConfig, ops: Ops, model: ModelConfig, where: Path) -> More:
    """Return a function: tokens of a context → bytes of the part that reads images of the model at `where` and of its
    work, and of the draft model's weights, KV store and work. Raises LoadError, and EngineError if the backend lacks
    kernels of the draft model's layers."""
    weights, row, draft = 0, 0, _draft_bytes(config, ops)
    if (found := model_loaders.load_vision_encoder(where, model, config.mmproj)) is not None:
        vision_encoder, source = found
        weights, row = weight_bytes(ops, source), _OF_PATCHES * 4 * vision_encoder.merged_channels
        source.close()
    return lambda tokens: weights + row * min(tokens // 2, MOST_ROWS) + draft(tokens)


def _draft_bytes(config: EngineConfig, ops: Ops) -> More:
    if config.model_draft is None:
        return nothing
    path, config = config.model_draft, draft_config(config, 0)
    model, source, _ = model_loaders.load_weights(path)
    try:
        check_layers(ops, model, config.block_size)
        wanted = wanted_of_source(config, ops, model, source)
        shape = wanted.shape(ops)
    except EngineError as error:
        error.args, error.settings = (f"model_draft={path}: {error}",), ("model_draft", *error.settings)
        raise
    finally:
        source.close()
    return lambda tokens: wanted.sizes.weights + wanted.taken(ops, plan_for_tokens(shape, tokens, config.parallel))


def fits_beside(config: EngineConfig, ops: Ops) -> Callable[[ModelConfig | None, int], bool]:
    """Return a function that tells whether a model and its KV store fit in memory, given the bytes of the model's file;
    without a configuration, whether the file does. The store is for `Wanted.context`."""

    def fits(model: ModelConfig | None, size: int) -> bool:
        try:
            if model is None:
                ops.memory_left(size)
                return True
            weights = loaded_bytes(config, ops, model, size)
            wanted = Wanted(config, model, Sizes(weights))
            return wanted.fits(ops, wanted.shape(ops), weights, wanted.context)
        except EngineError:
            return False

    return fits
