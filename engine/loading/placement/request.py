"""What is to be placed: a model, its settings, the bytes of its weights, and the memory that it leaves to others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from polarlm import model_loaders
from polarlm.engine import codecs
from polarlm.engine.backends.ops import Load, Ops
from polarlm.engine.config import AS_STORED, EngineConfig, parse_size
from polarlm.engine.errors import EngineError
from polarlm.engine.limits import DRAFT_MODEL, MOST_DRAFTED
from polarlm.engine.loading.encoding import FULL_ENCODING, Encoding
from polarlm.engine.loading.sizes import cache_shape, check_layers, loaded_bytes, weight_format
from polarlm.engine.model.adapters import Loaded, delta_bytes
from polarlm.engine.model.weights import bytes_of_layers, expert_bytes, weight_bytes
from polarlm.engine.state.plan import StorePlan, add_kept, plan_for_memory, plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import tensors
from polarlm.model_loaders.files.tensor_table import OF_EXPERTS
from polarlm.model_loaders.files.weights import WeightSource
from polarlm.model_loaders.vision_encoders import MOST_ROWS

CONTEXT_TO_CHOOSE_BY = 16_384  # tokens that must fit if the model's own context is longer
_KEPT_TOKENS = 2048  # assumed length of a kept conversation, if memory exceeds one context
_PATCH_ARRAYS = 7  # arrays as large as the hidden states of an image's patches: with their queries, keys and values
_KEPT_SHARE = 8  # the part of a store that is added for conversations that are kept

ContextBytes = Callable[[int], int]  # tokens of a context → bytes


def no_bytes(tokens: int) -> int:
    return 0


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights on the device, adapters included."""

    weights: int
    expert_bytes: tuple[int, ...] = ()  # each layer's experts, which `weights` contains
    host_expert_bytes: tuple[int, ...] = ()  # each layer's experts, in the memory of a GPU's host

    @property
    def experts(self) -> int:
        return sum(self.expert_bytes)


class LayerSizes(NamedTuple):
    """Bytes of weights by their place in the model; every GPU has room for all adapters."""

    embedding: int  # and what else comes before the layers
    layers: list[int]
    head: int
    adapters: int

    def total(self, layers: range) -> int:
        is_first, is_last = layers.start == 0, layers.stop == len(self.layers)
        return (
            self.adapters
            + self.embedding * is_first
            + sum(self.layers[layers.start : layers.stop])
            + self.head * is_last
        )


@dataclass(frozen=True)
class PlacementRequest:
    """A model that is to be placed, and the settings to load it with."""

    config: EngineConfig
    model: ModelConfig
    sizes: Sizes
    layer_sizes: Callable[[Ops], LayerSizes] | None = None  # None: unknown, so that one device has all layers
    other_bytes: ContextBytes = no_bytes  # bytes to leave to something else, such as a draft model
    encoding: Encoding = FULL_ENCODING
    caches_experts: bool = True  # whether experts that do not fit may be read from the file when they are chosen
    reserved_bytes: int = 0  # bytes of the device's memory that other models will still take
    memory_limit: int | None = None  # bytes that weights and KV store may have; None for all that is free

    @property
    def context(self) -> int:
        """The tokens that have to fit: those that are asked for, or the model's own, up to 16,384."""
        return self.config.ctx_size or min(self.model.max_context, CONTEXT_TO_CHOOSE_BY)

    def with_settings(self, **settings: Any) -> PlacementRequest:
        return replace(self, config=replace(self.config, **settings))

    def shape(self, ops: Ops) -> CacheShape:
        return cache_shape(self.config, self.encoding, ops, self.model)

    def room(self, ops: Ops, weights: int) -> int:
        """Return the bytes that `weights` bytes leave for the KV store and activations. Raises EngineError
        ("out_of_memory")."""
        room = ops.memory_left(weights + self.reserved_bytes)
        return room if self.memory_limit is None else min(room, self.memory_limit - weights)

    def work(self, ops: Ops, shape: CacheShape, tokens: int) -> int:
        """Return the bytes that a prompt of `tokens` needs in addition to the KV store."""
        if self.model.is_encoder:
            return 0  # texts are computed a few at a time
        return ops.work_bytes(Load(self.model, shape.widest, tokens, self.config.parallel))

    def total_bytes(self, ops: Ops, plan: StorePlan) -> int:
        """Return the bytes of a store, of the work on its longest prompt, and of what else needs room."""
        return plan.bytes + self.work(ops, plan.shape, plan.tokens) + self.other_bytes(plan.tokens)

    def plan(self, ops: Ops, shape: CacheShape, room: int) -> StorePlan:
        """Return the plan of the KV store: one that takes all of kv_memory, or else one for the context, or the
        longest one that fits into `room` bytes with the work on a prompt of its length and with `other_bytes`. Raises
        EngineError ("out_of_memory") if nothing fits."""

        def other_bytes(tokens: int) -> int:
            return self.work(ops, shape, tokens) + self.other_bytes(tokens)

        config, tokens = self.config, self.config.ctx_size or self.model.max_context
        sequences = config.kept_sequences + config.parallel
        if config.kv_memory is not None:
            memory = parse_size(config.kv_memory)
            plan = plan_for_memory(shape, memory, tokens, sequences, running=config.parallel)
            if config.kept_sequences and plan.tokens == tokens:
                plan = add_kept(plan, min(memory, room - other_bytes(tokens)), _KEPT_TOKENS)
            return plan
        plan, other = plan_for_tokens(shape, tokens, sequences, running=config.parallel), other_bytes(tokens)
        if plan.bytes + other > room:
            return plan_for_memory(shape, room, tokens, sequences, other_bytes, running=config.parallel)
        if config.kept_sequences:
            plan = add_kept(plan, min(plan.bytes + plan.bytes // _KEPT_SHARE, room - other), 0)
        return plan

    def is_met(self, ops: Ops, plan: StorePlan, weights: int, room: int) -> bool:
        """Return whether a store beside `weights` bytes has what was asked for: all of `kv_memory`, which on a CPU may
        be more than the half that `room` is, or else the context."""
        if self.config.kv_memory is None:
            return plan.tokens >= self.context
        if ops.name == "cpu":
            free = ops.free_memory() - self.reserved_bytes
            room = (free if self.memory_limit is None else min(free, self.memory_limit)) - weights
        return self.total_bytes(ops, plan) <= room

    def fits(self, ops: Ops, shape: CacheShape, weights: int, context: int) -> bool:
        """Return whether a store for `context` tokens fits beside `weights` bytes on a device."""
        request = self.with_settings(ctx_size=context)
        try:
            room = request.room(ops, weights)
            return request.is_met(ops, request.plan(ops, shape, room), weights, room)
        except EngineError:
            return False


def request_from_source(
    config: EngineConfig, ops: Ops, model: ModelConfig, source: WeightSource, adapters: Loaded = ()
) -> PlacementRequest:
    """Return the model of files that are here, with its weights as `config` converts them."""
    adapter_bytes, format = delta_bytes(ops, model, adapters), weight_format(config)
    experts, host_experts = (
        () if device is None else tuple(expert_bytes(device, model, source, format)) for device in (ops, ops.host)
    )
    sizes = Sizes(weight_bytes(ops, source, format) + adapter_bytes, experts, host_experts)

    def layer_sizes(ops: Ops) -> LayerSizes:
        return LayerSizes(*bytes_of_layers(ops, model, source, format), adapter_bytes)

    return PlacementRequest(config, model, sizes, layer_sizes)


def request_from_bytes(config: EngineConfig, ops: Ops, model: ModelConfig, size: int) -> PlacementRequest:
    """Return the model of a file whose size in bytes alone is known: experts have their share of values."""
    weights = loaded_bytes(config, ops, model, size)
    values = sum(math.prod(spec.shape) for spec in tensors(model).specs())
    expert_values = (
        sum(math.prod(spec.shape) for slot in OF_EXPERTS for spec in slots.get(slot, ()))
        for slots in tensors(model).layers
    )
    experts = tuple(weights * count // values for count in expert_values)
    return PlacementRequest(config, model, Sizes(weights, experts, () if ops.host is None else experts))


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


def companion_bytes(config: EngineConfig, ops: Ops, model: ModelConfig, where: Path) -> ContextBytes:
    """Return a function: tokens of a context → bytes of the part that reads images of the model at `where` and of its
    work, of the states that a draft head reads, and of the draft model's weights, KV store and work. Raises LoadError,
    and EngineError if the backend lacks kernels of the draft model's layers."""
    weights, row, draft = 0, 0, _draft_bytes(config, ops)
    states = 0 if model.eagle3 is None else 4 * model.eagle3.model.hidden_size  # of each token of a prompt
    if (found := model_loaders.load_vision_encoder(where, model, config.mmproj)) is not None:
        vision_encoder, source = found
        weights, row = weight_bytes(ops, source), _PATCH_ARRAYS * 4 * vision_encoder.merged_channels
        source.close()
    return lambda tokens: weights + row * min(tokens // 2, MOST_ROWS) + states * tokens + draft(tokens)


def _draft_bytes(config: EngineConfig, ops: Ops) -> ContextBytes:
    if (path := config.small_model) is None:
        return no_bytes
    config = draft_config(config, 0)
    model, source, _ = model_loaders.load_weights(path)
    try:
        check_layers(ops, model, config.block_size)
        request = request_from_source(config, ops, model, source)
        shape = request.shape(ops)
    except EngineError as error:
        error.args, error.settings = (f"model_draft={path}: {error}",), ("model_draft", *error.settings)
        raise
    finally:
        source.close()
    return lambda tokens: (
        request.sizes.weights + request.total_bytes(ops, plan_for_tokens(shape, tokens, config.parallel))
    )


def fit_check(config: EngineConfig, ops: Ops) -> Callable[[ModelConfig | None, int], bool]:
    """Return a function that tells whether a model and its KV store fit in memory, given the bytes of the model's file;
    without a configuration, whether the file does. The store is for `PlacementRequest.context`."""

    def fits(model: ModelConfig | None, size: int) -> bool:
        try:
            if model is None:
                ops.memory_left(size)
                return True
            weights = loaded_bytes(config, ops, model, size)
            request = PlacementRequest(config, model, Sizes(weights))
            return request.fits(ops, request.shape(ops), weights, request.context)
        except EngineError:
            return False

    return fits
