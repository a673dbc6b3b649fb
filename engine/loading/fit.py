"""Tells what fits into a device's memory: a model's weights, its longest context, how many sequences at a time.

Only the model's configuration and the table of its tensors are read. Sizes come from the functions that `Engine.load`
plans with.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polarlm.engine import codecs, weight_formats
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import select
from polarlm.engine.config import AS_STORED, DEFAULT_CACHE_TYPE, EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.encoding import WHOLE
from polarlm.engine.loading.experts import LEAST_CONTEXT, ExpertPlan, Sizes, estimated_sizes, expert_plan, sizes
from polarlm.engine.loading.sizes import cache_shape, loaded_bytes, store_plan, weight_format, work_bytes
from polarlm.engine.model.weights import Kept, kept
from polarlm.engine.state.cache_types import PRESETS
from polarlm.engine.state.plan import StorePlan, format_bytes, plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.files.weights import WeightSource

CACHE_TYPES = ("f16", "q8_0", *PRESETS)


@dataclass(frozen=True)
class ContextFit:
    """How many sequences of `tokens` tokens fit at a time."""

    tokens: int
    sequences: int
    lacking: int  # bytes that one sequence lacks; 0 if it fits


@dataclass(frozen=True)
class CacheFit:
    """What fits with one cache type."""

    cache_type: str
    problem: str = ""  # a sentence that says why the device or the model cannot have this type; the rest is then 0
    bits_per_value: float = 0.0  # of complete encoded blocks
    bytes_per_token: float = 0.0  # of complete encoded blocks, all layers, as the device stores them
    tokens: int = 0  # the longest context that fits, of at most the model's own or ctx_size
    store_bytes: int = 0  # bytes of the KV store for that context
    contexts: tuple[ContextFit, ...] = ()


@dataclass(frozen=True)
class WeightFit:
    """What fits in the memory that weights of one type leave."""

    weight_type: str  # a value of EngineConfig.weight_type
    bytes: int
    room: int  # bytes for the KV store and for activations
    lacking: int  # bytes by which the weights alone are too large; 0 if they fit
    caches: tuple[CacheFit, ...]
    kept: tuple[Kept, ...] = ()  # how the matrices are kept; empty if only the size of a file is known
    experts: ExpertPlan | None = None  # those in memory at a time, if not all of them fit

    def cache(self, cache_type: str) -> CacheFit:
        return next(one for one in self.caches if one.cache_type == cache_type)


@dataclass(frozen=True)
class DeviceFit:
    """What fits on one device. The first weight type is the requested one."""

    device: str  # a value of EngineConfig.device
    name: str
    free: int  # bytes of its memory
    weights: tuple[WeightFit, ...]


@dataclass(frozen=True)
class Advice:
    """The settings to load a model with; None if it does not fit. sentence: the reason, for the user."""

    sentence: str
    settings: dict[str, str | int] | None


def devices(device: str, threads: int = 0) -> list[tuple[str, Ops]]:
    """Return (value of EngineConfig.device, its ops) of the device that `Engine.load` takes; if that is a GPU that
    "auto" has selected, also those of the CPU. Raises EngineError."""
    first, _ = select(device, threads)
    cpu = select("cpu", threads)[0] if first.name != "cpu" and device == "auto" else None
    return [("cpu" if first.name == "cpu" else "cuda", first), *([("cpu", cpu)] if cpu is not None else [])]


def fit_device(
    config: EngineConfig,
    device: str,
    ops: Ops,
    model: ModelConfig,
    source: WeightSource,
    cache_types: Sequence[str] = CACHE_TYPES,
    contexts: Sequence[int] = (),
) -> DeviceFit:
    """Return what fits on a device with `config`: first with its weight type, then with every other one.

    contexts: lengths in tokens; sequences of these lengths are counted with the first weight type.
    """
    others = [AS_STORED, *sorted(weight_formats.writable(), key=lambda name: -_bits(name))]
    found = []
    for weight_type in dict.fromkeys((config.weight_type, *others)):
        settings = replace(config, weight_type=weight_type)
        format = weight_format(settings)
        asked = contexts if weight_type == config.weight_type else ()
        weights = fit_weights(settings, ops, model, sizes(ops, model, source, format), cache_types, asked)
        found.append(replace(weights, kept=kept(ops, source, format)))
    return DeviceFit(device, ops.name, ops.free_memory(), tuple(found))


def fit_files(
    config: EngineConfig,
    device: str,
    ops: Ops,
    model: ModelConfig,
    files: Mapping[str, int],
    cache_types: Sequence[str] = CACHE_TYPES,
    contexts: Sequence[int] = (),
) -> DeviceFit:
    """Return what fits on a device with each of several files of a model, none of which is downloaded yet.

    files: name, which replaces the weight type → bytes. contexts: as for `fit_device`, counted with the first file.
    """
    found = []
    for number, (name, size) in enumerate(files.items()):
        of = estimated_sizes(model, loaded_bytes(config, ops, model, size))
        found.append(fit_weights(config, ops, model, of, cache_types, () if number else contexts, name))
    return DeviceFit(device, ops.name, ops.free_memory(), tuple(found))


def _bits(weight_type: str) -> float:
    format = weight_formats.get(weight_type)
    return 8 * format.nbytes / format.values


def fit_weights(
    config: EngineConfig,
    ops: Ops,
    model: ModelConfig,
    of: Sizes,
    cache_types: Sequence[str] = CACHE_TYPES,
    contexts: Sequence[int] = (),
    name: str | None = None,
) -> WeightFit:
    """Return what fits in the memory that weights of these sizes leave. name: replaces their type."""
    room, lacking, experts = 0, 0, None
    try:
        if of.experts:
            experts = expert_plan(config, ops, model, cache_shape(config, WHOLE, ops, model), of)
        room = ops.room_beside(of.weights) if experts is None else experts.room
    except EngineError as error:
        lacking = error.numbers.get("lacking", 0)
    caches = [_fit_cache(config, ops, model, room, lacking, cache_type, contexts) for cache_type in cache_types]
    return WeightFit(name or config.weight_type, of.weights, room, lacking, tuple(caches), experts=experts)


def _fit_cache(
    config: EngineConfig,
    ops: Ops,
    model: ModelConfig,
    room: int,
    lacking: int,
    cache_type: str,
    contexts: Sequence[int],
) -> CacheFit:
    config = replace(config, cache_type=cache_type)
    try:
        shape = cache_shape(config, WHOLE, ops, model)
    except EngineError as error:
        return CacheFit(cache_type, str(error))
    plan = None if lacking else _plan(config, ops, model, shape, room)
    return CacheFit(
        cache_type,
        bits_per_value=shape.bits_per_value,
        bytes_per_token=shape.bytes_per_token,
        tokens=plan.tokens if plan else 0,
        store_bytes=plan.bytes if plan else 0,
        contexts=tuple(_fit_context(config, ops, model, shape, room, lacking, tokens) for tokens in contexts),
    )


def _plan(config: EngineConfig, ops: Ops, model: ModelConfig, shape: CacheShape, room: int) -> StorePlan | None:
    """Return the plan of `Engine.load`; None if there is too little memory for one."""
    try:
        return store_plan(config, ops, model, shape, room)
    except EngineError:
        return None


def _fit_context(
    config: EngineConfig, ops: Ops, model: ModelConfig, shape: CacheShape, room: int, lacking: int, tokens: int
) -> ContextFit:
    def holds(count: int) -> bool:
        """Whether a store for `count` sequences at a time fits, and holds them."""
        settings = replace(config, ctx_size=count * tokens, parallel=count, kv_memory=None)
        plan = _plan(settings, ops, model, shape, room)
        return plan is not None and plan.tokens == count * tokens and plan.sequences(tokens) >= count

    if lacking or not holds(1):
        one = replace(config, ctx_size=tokens, parallel=1)
        needed = plan_for_tokens(shape, tokens, 1 + config.kept_sequences).bytes + work_bytes(one, ops, model, shape)(
            tokens
        )
        return ContextFit(tokens, 0, lacking + needed - room)
    more = range(2, 2 + room // max(1, shape.sequence_bytes(tokens)))
    return ContextFit(tokens, 1 + bisect_left(more, True, key=lambda count: not holds(count)), 0)


def steps_to(context: int) -> list[int]:
    """Return the contexts to show: powers of two from 4,096 up to the model's own, which is the last; five at most.

    >>> steps_to(40960)
    [4096, 8192, 16384, 32768, 40960]
    """
    found, step = [], 4096
    while step < context:
        found.append(step)
        step *= 2
    return [*found, context][-5:]


_SMALLEST = "take a smaller model, or a file of fewer bits"


def advise(found: Sequence[DeviceFit], config: EngineConfig, model: ModelConfig) -> Advice:
    """Return the settings to load the model with, from what fits on each device with `config`.

    Weights are converted only if they leave no room for 4,096 tokens on any device, and experts are read from the file
    only if not even that is enough.
    """
    target = config.ctx_size or model.max_context
    least = min(target, LEAST_CONTEXT)
    order = itertools.product((False, True), range(max(len(device.weights) for device in found)))
    for caches_experts, number in order:
        for device in found:
            weights = device.weights[number]
            if (weights.experts is not None) != caches_experts or weights.bytes > device.weights[0].bytes:
                continue
            if max(one.tokens for one in weights.caches) < least:
                continue
            cache, sentence = _best_cache(weights, target)
            if number:
                first = "as the file has them" if device.weights[0].weight_type == AS_STORED else ""
                first = first or f"as {device.weights[0].weight_type}"
                sentence = f"{weights.weight_type} is taken: {first}, the weights leave too little room. {sentence}"
            if weights.experts is not None:
                sentence = f"Not all experts fit. {_in_words(weights.experts)} {sentence}"
            changed: dict[str, str | int] = {}
            if device is not found[0]:
                changed["device"] = device.device
            if weights.weight_type != AS_STORED:
                changed["weight_type"] = weights.weight_type
            if cache.cache_type != DEFAULT_CACHE_TYPE:
                changed["cache_type"] = cache.cache_type
            if cache.tokens < target or config.ctx_size:
                changed["ctx_size"] = cache.tokens
            return Advice(sentence, changed)
    smallest = min(found[0].weights, key=lambda one: one.bytes)
    if smallest.lacking:
        lack = f"{format_bytes(smallest.bytes)} as {smallest.weight_type}, {format_bytes(smallest.lacking)} too much"
        return Advice(f"This model does not fit here: its weights take {lack}; {_SMALLEST}.", None)
    most = max(one.tokens for one in smallest.caches)
    return Advice(f"This model does not fit here: {most:,} tokens of context are left with it; {_SMALLEST}.", None)


def _in_words(experts: ExpertPlan) -> str:
    """Return a sentence about experts that are read from the file, and what a token then costs."""
    return (
        f"{format_bytes(experts.bytes)} of their {format_bytes(experts.whole)} are in memory at a time; if they are "
        f"chosen equally often, a token reads {format_bytes(experts.of_token)} from the file."
    )


def _best_cache(weights: WeightFit, target: int) -> tuple[CacheFit, str]:
    """Return the default preset if it holds `target` tokens, else the preset that holds most, and a sentence that says
    why. If no preset supports the model's heads, the choice is among all types."""
    usable = [one for one in weights.caches if not one.problem]
    presets = [one for one in usable if one.cache_type in PRESETS] or usable
    best = next((one for one in presets if one.cache_type == DEFAULT_CACHE_TYPE), presets[0])
    if best.tokens < target:
        best = max(presets, key=lambda one: one.tokens)
    rest = f"{best.cache_type} takes {format_bytes(best.store_bytes)} for its KV store"
    f16 = next((one for one in weights.caches if one.cache_type == codecs.FULL), None)
    if f16 is not None and f16.tokens == best.tokens:
        rest += f", f16 {format_bytes(f16.store_bytes)}"
    elif f16 is not None:
        rest += f"; with f16, {f16.tokens:,} tokens fit"
    if best.tokens >= target:
        return best, f"A context of {target:,} tokens fits: {rest}."
    return best, f"Of {target:,} tokens of context, {best.tokens:,} fit: {rest}."
