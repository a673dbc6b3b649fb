"""The size of a model's KV store for given settings. Nothing is loaded or allocated."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from polarlm import model_loaders
from polarlm.engine import codecs, weight_formats
from polarlm.engine.backends.ops import Load, Ops
from polarlm.engine.config import AS_STORED, EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.limits import DRAFTS, MOST_DRAFTED
from polarlm.engine.loading.encoding import WHOLE, Encoding
from polarlm.engine.model.layers.kinds import MIXERS
from polarlm.engine.model.weights import weight_bytes
from polarlm.engine.quantization import snapshot_codes
from polarlm.engine.state import cache_types
from polarlm.engine.state.layer_shapes import LayerShape, OwnShape, SharedShape
from polarlm.engine.state.plan import (
    StorePlan,
    format_bytes,
    parse_size,
    plan_for_memory,
    plan_for_tokens,
    with_kept,
    with_more_tokens,
)
from polarlm.engine.state.recurrent.delta import DeltaShape
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.weight_formats import WeightFormat
from polarlm.model_loaders import families
from polarlm.model_loaders.config import Attention, ModelConfig, Recurrent
from polarlm.model_loaders.files.tensors import READABLE

_TOKENS_OF_KEPT = 2048  # assumed length of a kept conversation, if memory exceeds one context
_SHARE_OF_KEPT = 8  # the part of a store that is added for conversations that are kept


def weight_format(config: EngineConfig) -> WeightFormat | None:
    """Return the format to convert matrices to; None for as-stored. Raises EngineError."""
    name = config.weight_type
    if name == AS_STORED:
        return None
    format = weight_formats.find(name)
    if format is None or format.quantize is None:
        what = "there is no such type"
        if name.upper() in READABLE:
            what = "the package gguf reads this type but cannot make it, like all K and IQ types"
        choices = ", ".join([AS_STORED, *weight_formats.writable()])
        raise EngineError(f"weight_type={name}: {what}; choose from {choices}", settings=("weight_type",))
    return format


def loaded_bytes(config: EngineConfig, ops: Ops, model: ModelConfig, size: int) -> int:
    """Return the bytes that the weights in a file of `size` bytes have when they are loaded."""
    format = weight_format(config)
    if format is None and ops.kept_as(q8 := weight_formats.get("q8_0")) is q8:
        return size
    count = sum(math.prod(spec.shape) for spec in families.tensors(model).specs())
    return 4 * count if format is None else count * format.nbytes // format.values


def cache_shape(config: EngineConfig, encoding: Encoding, ops: Ops, model: ModelConfig) -> CacheShape:
    """Return the shape of all layers' caches. Raises EngineError for a cache type that does not suit the model."""
    if model.is_encoder:
        return CacheShape(config.block_size, ())
    mean_bits, attentions = 8 if encoding.small_means else 16, model.kv_attentions
    head_dims = [attentions[layer].head_dim if layer in attentions else None for layer in range(len(model.layers))]
    layers: list[LayerShape | SharedShape | OwnShape] = []
    finer = cache_types.finer_kind(config)
    for layer, (codec_k, codec_v) in zip(model.layers, cache_types.layer_codecs(config, head_dims), strict=True):
        mixer = layer.mixer
        if not isinstance(mixer, Attention):
            layers.append(MIXERS[type(mixer)].state_shape(mixer, config.block_size))
            continue
        if mixer.shares_kv:
            layers.append(SharedShape(mixer.kv_heads, mixer.head_dim, mixer.window))
            continue
        # Full precision gains nothing from centring.
        means = mean_bits if config.key_conditioning and codecs.is_quantized(codec_k) else 0
        own = LayerShape(codec_k, codec_v, mixer.kv_heads, mixer.head_dim, means, mixer.window, finer)
        if finer is not None and mixer.window is not None:  # no more blocks than its window has, however long the text
            own = own.finest
        layers.append(own)
    if finer is not None:
        _check_two_kinds(config, layers)
    shape = _with_snapshots(config, CacheShape(config.block_size, tuple(layers), has_host=ops.name != "cpu"))
    try:
        return replace(shape, stored={layer: ops.cache_bytes(shape.format(layer)) for layer in shape.kv_layers})
    except ValueError as error:
        raise EngineError(str(error)) from None


def _check_two_kinds(config: EngineConfig, layers: Sequence[LayerShape | SharedShape | OwnShape]) -> None:
    """Raises EngineError for layers whose blocks cannot be of two kinds."""
    kinds = {layer.group for layer in layers if isinstance(layer, LayerShape) and layer.finer}
    if not kinds:
        raise cache_types.not_two_kinds(config, "no layer of this model keeps keys and values of a whole text")
    if len(kinds) > 1:
        raise cache_types.not_two_kinds(
            config, "this model has layers with heads of several shapes, which it does not serve yet"
        )


def _with_snapshots(config: EngineConfig, shape: CacheShape) -> CacheShape:
    """Return the shape with the snapshots of recurrent layers that `config` asks for. Raises EngineError."""
    codes = snapshot_codes.ALL[config.state_type]
    layers = [replace(one, codes=codes) if isinstance(one, DeltaShape) else one for one in shape.layers]
    try:
        each = sum(one.quantized_bytes(shape.block_size) for one in layers if isinstance(one, DeltaShape))
    except ValueError as error:
        raise EngineError(str(error), settings=("state_type",)) from None
    if config.state_cache is not None:
        count = parse_size(config.state_cache, "state_cache") // max(1, each)
        layers = [replace(one, snapshots=count) if isinstance(one, DeltaShape) else one for one in layers]
    return replace(shape, layers=tuple(layers))


def is_calibrated(config: EngineConfig, shape: CacheShape) -> bool:
    """Return whether the KV store is fitted to the model on the calibration text."""
    quantized = any(
        codecs.is_quantized(codec) for layer in shape.kv_layers.values() for codec in (layer.codec_k, layer.codec_v)
    )
    return config.calibration and config.key_conditioning and quantized


def work_bytes(config: EngineConfig, ops: Ops, model: ModelConfig, shape: CacheShape) -> Callable[[int], int]:
    """Return a function from the tokens of a prompt to the bytes that it needs in addition to the KV store."""
    if model.is_encoder:
        return lambda tokens: 0  # texts are computed a few at a time
    return lambda tokens: ops.work_bytes(Load(model, shape.widest, tokens, config.parallel))


def draft_config(config: EngineConfig, tokens: int) -> EngineConfig:
    """Return the settings of an engine's draft model for a context of `tokens`. Its store is in half precision."""
    return replace(
        config,
        weights=config.model_draft,
        model_draft=None,
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
        spec_type=DRAFTS[-1],  # for the warm-up: its steps have as many rows as drafts
        draft_max=MOST_DRAFTED,
        ctx_size=tokens,
        kept_sequences=0,
    )


def draft_bytes(config: EngineConfig, ops: Ops) -> Callable[[int], int]:
    """Return a function: tokens of a context → bytes of the draft model's weights, KV store and work; 0 without one.

    Raises EngineError if the backend lacks kernels of its layers.
    """
    if config.model_draft is None:
        return lambda tokens: 0
    path, config = config.model_draft, draft_config(config, 0)
    model, source, _ = model_loaders.load_weights(path)
    try:
        weights = weight_bytes(ops, source, None)
        check_layers(ops, model, config.block_size)
        shape = cache_shape(config, WHOLE, ops, model)
    except EngineError as error:
        error.args, error.settings = (f"model_draft={path}: {error}",), ("model_draft", *error.settings)
        raise
    finally:
        source.close()
    work = work_bytes(config, ops, model, shape)
    return lambda tokens: weights + work(tokens) + plan_for_tokens(shape, tokens, config.parallel).bytes


def within_table(config: EngineConfig, model: ModelConfig, say: Callable[[str], None]) -> EngineConfig:
    """Return `config` with a context of at most the rows of the model's table of positions, if it has one."""
    most = model.positions - model.first_position
    if model.positions == 0 or config.ctx_size <= most:
        return config
    say(f"warning: the context is {most:,} tokens, not {config.ctx_size:,}: the model has no more positions")
    return replace(config, ctx_size=most)


def warn_of_context(config: EngineConfig, model: ModelConfig, plan: StorePlan, say: Callable[[str], None]) -> None:
    """Warn if the context is shorter than was asked for, or longer than the model was trained on."""
    tokens = config.ctx_size or model.max_context
    if plan.tokens < (config.ctx_size if config.kv_memory is not None else tokens):
        whose = "that were asked for" if config.ctx_size else "that the model has"
        say(f"warning: of the {tokens:,} tokens of context {whose}, {plan.tokens:,} fit in memory")
    if plan.tokens > model.max_context:
        say(
            f"warning: the context of {plan.tokens:,} tokens goes beyond the {model.max_context:,} that this model was "
            "trained on; answers beyond that may make no sense"
        )


def store_plan(
    config: EngineConfig,
    ops: Ops,
    model: ModelConfig,
    shape: CacheShape,
    room: int,
    more: Callable[[int], int] = lambda tokens: 0,
) -> StorePlan:
    """Return the plan of the KV store: for kv_memory, all of which it takes, or else for the context.

    If the context does not fit into `room` bytes, together with the work on a prompt of its length, the plan is for the
    longest one that does. more: tokens of a context → further bytes to leave. Raises EngineError ("out_of_memory") if
    nothing fits.
    """
    work = work_bytes(config, ops, model, shape)

    def other_bytes(tokens: int) -> int:
        return work(tokens) + more(tokens)

    tokens = config.ctx_size or model.max_context
    sequences = config.kept_sequences + config.parallel
    if config.kv_memory is not None:
        memory = parse_size(config.kv_memory)
        plan = plan_for_memory(shape, memory, tokens, sequences)
        if config.kept_sequences and plan.tokens == tokens:
            plan = with_kept(plan, min(memory, room - other_bytes(tokens)), _TOKENS_OF_KEPT)
        return plan
    plan = plan_for_tokens(shape, tokens, sequences)
    if plan.bytes + other_bytes(tokens) > room:
        return plan_for_memory(shape, room, tokens, sequences, other_bytes)
    if config.kept_sequences:
        plan = with_kept(plan, min(plan.bytes + plan.bytes // _SHARE_OF_KEPT, room - other_bytes(tokens)), 0)
    if shape.has_two_kinds and not shape.is_by_age:  # it has the memory of a store whose blocks have the most bits
        plan = with_more_tokens(plan, store_plan(config, ops, model, shape.finest, room, more).bytes)
    return plan


def give_back_freed_memory() -> None:
    """Give freed memory back to the system, such as that of slabs of weights, since glibc keeps it otherwise."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def no_memory(model: str, sizes: tuple[int, int] | None) -> EngineError:
    """Return the error for running out of memory while a model is loaded. sizes: bytes of its weights and of its KV
    store, if they are known."""
    needed = ": its weights take {}, its KV store {}".format(*map(format_bytes, sizes)) if sizes else ""
    return EngineError(
        f"There is not enough memory for {model}{needed}. End other programs, raise the limit of this process's memory "
        "(ulimit -v), give a smaller ctx_size or kv_memory, or choose a smaller model",
        "out_of_memory",
        ("ctx_size", "kv_memory"),
    )


def check_layers(ops: Ops, model: ModelConfig, block_size: int) -> None:
    """Raises EngineError if the backend lacks kernels of the model's layers."""
    try:
        for mixer in {layer.mixer for layer in model.layers}:
            if isinstance(mixer, Recurrent):
                ops.check_recurrent(mixer, block_size)
    except ValueError as error:
        raise EngineError(str(error), "device_unavailable", ("device",)) from None
