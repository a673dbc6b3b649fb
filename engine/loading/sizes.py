"""The shape of a model's KV cache, and the size of its weights, for some settings. Nothing is loaded or allocated."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from dataclasses import replace

from polarlm.engine import codecs, weight_formats
from polarlm.engine.backends.ops import Ops
from polarlm.engine.config import AS_STORED, EngineConfig, format_bytes, parse_size
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.encoding import Encoding
from polarlm.engine.model.layers.kinds import MIXERS
from polarlm.engine.quantization import snapshot_codes
from polarlm.engine.state import cache_types
from polarlm.engine.state.layer_shapes import LayerShape, SharedShape, StateShape
from polarlm.engine.state.plan import StorePlan
from polarlm.engine.state.recurrent.delta import DeltaShape
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.weight_formats import WeightFormat
from polarlm.model_loaders import families
from polarlm.model_loaders.config import Attention, LatentAttention, ModelConfig, Recurrent
from polarlm.model_loaders.files.tensors import READABLE


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
    if format is None and ops.stored_format(q8 := weight_formats.get("q8_0")) is q8:
        return size
    count = sum(math.prod(spec.shape) for spec in families.tensors(model).specs())
    return 4 * count if format is None else count * format.nbytes // format.values


def cache_shape(config: EngineConfig, encoding: Encoding, ops: Ops, model: ModelConfig) -> CacheShape:
    """Return the shape of all layers' caches. Raises EngineError for a cache type that does not suit the model."""
    if model.is_encoder:
        return CacheShape(config.block_size, ())
    preset = cache_types.preset(config)
    recent_blocks = 0 if preset is None else preset.recent_blocks
    mean_bits, attentions = 8 if encoding.small_means else 16, model.kv_attentions
    head_dims = [attentions[layer].head_dim if layer in attentions else None for layer in range(len(model.layers))]
    layers: list[StateShape] = []
    for layer, (codec_k, codec_v) in zip(model.layers, cache_types.layer_codecs(config, head_dims), strict=True):
        mixer = layer.mixer
        if not isinstance(mixer, Attention):
            layers.append(MIXERS[type(mixer)].state_shape(mixer))
            continue
        if mixer.shares_kv:
            layers.append(SharedShape(mixer.kv_heads, mixer.head_dim, mixer.window))
            continue
        # Full precision gains nothing from centring.
        means = mean_bits if config.key_conditioning and codecs.is_quantized(codec_k) else 0
        sizes = mixer.kv_heads, mixer.head_dim, means, mixer.window
        stored_v = None if isinstance(mixer, LatentAttention) else codec_v  # a latent vector is key and value
        layers.append(LayerShape(codec_k, stored_v, *sizes, mixer.images_whole, recent_blocks))
    shape = _set_snapshots(config, CacheShape(config.block_size, tuple(layers), has_host=ops.name != "cpu"))
    try:
        return replace(shape, stored={layer: ops.cache_bytes(shape.format(layer)) for layer in shape.kv_layers})
    except ValueError as error:
        raise EngineError(str(error)) from None


def _set_snapshots(config: EngineConfig, shape: CacheShape) -> CacheShape:
    """Return the shape with the snapshots of recurrent layers that `config` asks for. Raises EngineError."""
    codes = snapshot_codes.ALL[config.state_type]
    layers = [replace(one, codes=codes) if isinstance(one, DeltaShape) else one for one in shape.layers]
    each = sum(one.quantized_bytes(shape.block_size) for one in layers if isinstance(one, DeltaShape))
    if config.state_cache is not None:
        count = parse_size(config.state_cache, "state_cache") // max(1, each)
        layers = [replace(one, snapshots=count) if isinstance(one, DeltaShape) else one for one in layers]
    return replace(shape, layers=tuple(layers))


def is_calibrated(config: EngineConfig, shape: CacheShape) -> bool:
    """Return whether the KV store is fitted to the model on the calibration text."""
    quantized = any(codecs.is_quantized(codec) for layer in shape.kv_layers.values() for codec in layer.codecs)
    return config.calibration and config.key_conditioning and quantized


def limit_context(config: EngineConfig, model: ModelConfig, say: Callable[[str], None]) -> EngineConfig:
    """Return `config` with a context of at most the rows of the model's table of positions, if it has one."""
    positions = model.positions - model.first_position
    if model.positions == 0 or config.ctx_size <= positions:
        return config
    say(f"warning: the context is {positions:,} tokens, not {config.ctx_size:,}: the model has no more positions")
    return replace(config, ctx_size=positions)


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


def give_back_freed_memory() -> None:
    """Give freed memory back to the system, such as slabs of weights, since glibc keeps it otherwise."""
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
    try:
        for mixer in {layer.mixer for layer in model.layers}:
            if isinstance(mixer, Recurrent):
                ops.check_recurrent(mixer, block_size)
    except ValueError as error:
        raise EngineError(str(error), "device_unavailable", ("device",)) from None
