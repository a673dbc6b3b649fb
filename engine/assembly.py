"""Putting an engine together: settings, weights, the store's size, the backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from tqdm import tqdm

import model_loaders
from engine import codecs
from engine.backends.select import select
from engine.conditioning import Conditioning
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.kv.plan import CacheShape, StorePlan, f16_tokens, format_bytes, parse_size, plan_for_memory, plan_for_tokens
from engine.kv.store import KVStore
from engine.model import Model
from engine.weights import load_weights, weight_bytes
from model_loaders.config import ModelConfig

Say = Callable[[str], None]


@dataclass
class Parts:
    """What an engine is made of."""

    config: EngineConfig
    source: model_loaders.Model
    plan: StorePlan
    model: Model

    def close(self) -> None:
        self.source.weights.close()


def settle(
    path: str | os.PathLike[str] | None, config: EngineConfig | None, settings: Mapping[str, Any]
) -> EngineConfig:
    """One EngineConfig out of everything `Engine.load` was given. Raises EngineError on an unknown or wrong setting."""
    known = {f.name for f in fields(EngineConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise EngineError(f"There is no setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    config = replace(config or EngineConfig(), **settings)
    if path is not None:
        config = replace(config, weights=os.fspath(path))
    for name, kind in get_type_hints(EngineConfig).items():
        value = getattr(config, name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            wanted = getattr(kind, "__name__", kind)
            raise EngineError(f"{name} is {value!r}, but must be of type {wanted}")
    _check_values(config)
    return config


def _check_values(config: EngineConfig) -> None:
    """What can be told without a model."""
    if config.ctx_size < 0:
        raise EngineError(f"--ctx-size {config.ctx_size}: give a number of tokens, or 0 for the model's own")
    if config.threads < 0:
        raise EngineError(f"--threads {config.threads}: give a number of threads, or 0 to follow OMP_NUM_THREADS")
    if config.block_size < 4 or config.block_size % 4:
        raise EngineError(f"block_size is {config.block_size}, but must be a multiple of 4")
    if config.kept_sequences < 0:
        raise EngineError(f"kept_sequences is {config.kept_sequences}, but must be 0 or more")
    if config.kv_memory is not None:
        parse_size(config.kv_memory)
    for flag, name in _cache_types(config):
        _codec(flag, name)


def _cache_types(config: EngineConfig) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("--cache-type-k", config.cache_type_k), ("--cache-type-v", config.cache_type_v)


def _codec(flag: str, name: str, serves: tuple[int, int] | None = None) -> codecs.Codec:
    """The codec that `flag` names, for `serves`, a head dim and a block size. Raises EngineError naming the flag."""
    try:
        codec = codecs.get(name)
        if serves is not None:
            codec.check(*serves)
    except ValueError as error:
        raise EngineError(f"{flag} {name}: {error}") from None
    return codec


def assemble(config: EngineConfig, verbose: Say | None) -> Parts:
    """Load the model and make room for its cache. Raises LoadError or EngineError."""
    say = verbose or (lambda sentence: None)
    ops, note = select(config.device, config.threads)
    if note:
        say(note)
    source = model_loaders.load(config.weights, mmap=config.mmap, verbose=verbose)
    try:
        shape = _cache_shape(config, source.config)
        plan = _plan(config, source.config, shape, say)
        bar = tqdm(
            total=weight_bytes(source.weights),
            desc=f"Loading {source.name}",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            leave=False,
            delay=0.3,
            disable=None if verbose else True,
        )
        with bar:
            weights = load_weights(ops, source.config, source.weights, bar.update)
        store = KVStore(ops, plan, _conditioning(config, shape))
    except MemoryError:
        source.weights.close()
        raise EngineError(f"There is not enough memory for {source.name}", "out_of_memory") from None
    except BaseException:
        source.weights.close()
        raise
    return Parts(config, source, plan, Model(ops, source.config, weights, store))


def _cache_shape(config: EngineConfig, model: ModelConfig) -> CacheShape:
    """Codecs and layer groups. Raises EngineError for a cache type that does not exist or cannot serve the model."""
    chosen = [_codec(flag, name, (model.head_dim, config.block_size)) for flag, name in _cache_types(config)]
    windows: dict[int | None, list[int]] = {}
    for layer in range(model.layers):
        windows.setdefault(model.window(layer), []).append(layer)
    return CacheShape(
        codec_k=chosen[0],
        codec_v=chosen[1],
        # An unrotated codec of full precision gains nothing from centring.
        centre_keys=config.key_conditioning and chosen[0].name != "f16",
        block_size=config.block_size,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        groups=tuple((window, tuple(layers)) for window, layers in windows.items()),
    )


def _conditioning(config: EngineConfig, shape: CacheShape) -> Conditioning:
    d = shape.head_dim
    return Conditioning(shape.codec_k.rotation(d), shape.codec_v.rotation(d), shape.centre_keys)


def _plan(config: EngineConfig, model: ModelConfig, shape: CacheShape, say: Say) -> StorePlan:
    """How large the store is: --kv-memory, else what the context needs, as far as half of the free memory goes."""
    tokens = config.ctx_size or model.max_context
    if config.ctx_size > model.max_context:
        say(f"--ctx-size {config.ctx_size} is more than the {model.max_context} tokens this model was trained on.")
    sequences = config.kept_sequences + 1
    if config.kv_memory is not None:
        return plan_for_memory(shape, parse_size(config.kv_memory), tokens, sequences)
    plan = plan_for_tokens(shape, tokens, sequences)
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return plan if plan.bytes <= free // 2 else plan_for_memory(shape, free // 2, tokens, sequences)


def fit_line(parts: Parts) -> str:
    """Model, dtype, memory for weights, KV blocks, and how many tokens fit."""
    plan, shape, model = parts.plan, parts.plan.shape, parts.source
    types = "/".join(dict.fromkeys((shape.codec_k.name, shape.codec_v.name)))
    return (
        f"{model.name}: {model.dtype} weights as float32, {format_bytes(parts.model.weights.bytes)} on the "
        f"{parts.model.ops.name}; KV store {format_bytes(plan.bytes)}, {sum(plan.coded_blocks)} blocks of "
        f"{shape.block_size} as {types} ({shape.bits_per_value:.2f} bits/value): "
        f"{plan.tokens:,} tokens fit (f16 cache: {f16_tokens(plan, plan.tokens):,})"
    )
