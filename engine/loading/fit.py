"""Tells what fits into a device's memory: a model's weights, its longest context, how many sequences at a time; and
advises with which settings to load it.

Every cell of the grid is a `Placement`, as `Engine.load` executes it. Only the model's configuration and the table of
its tensors are read.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polarlm.engine import codecs, weight_formats
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import select, with_host
from polarlm.engine.config import AS_STORED, AUTO, DEFAULT_CACHE_TYPE, EngineConfig, format_bytes
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.placement.devices import ShareFit
from polarlm.engine.loading.placement.experts import LEAST_CONTEXT, CpuExperts, ExpertPlan
from polarlm.engine.loading.placement.place import Placement, place
from polarlm.engine.loading.placement.request import (
    ContextBytes,
    PlacementRequest,
    no_bytes,
    request_from_bytes,
    request_from_source,
)
from polarlm.engine.loading.sizes import weight_format
from polarlm.engine.model.adapters import read_adapters
from polarlm.engine.model.weights import FormatGroup, format_groups
from polarlm.engine.state.cache_types import PRESETS
from polarlm.engine.state.plan import reserved_text
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.files.weights import WeightSource

CACHE_TYPES = ("f16", *PRESETS)
_HOST_RATE = 50e9  # bytes a second from a desktop computer's memory
_SMALLEST = "take a smaller model, or a file of fewer bits"


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
    bits_per_value: float = 0.0  # of a sequence that fills the longest context
    bytes_per_token: float = 0.0  # of that sequence, all layers, as the device stores them
    tokens: int = 0  # the longest context that fits, of at most the model's own or ctx_size
    store_bytes: int = 0  # bytes of the KV store for that context, in the device's memory
    snapshot_bytes: int = 0  # bytes of snapshots of recurrent layers, in the computer's memory; see StorePlan
    contexts: tuple[ContextFit, ...] = ()
    cards: tuple[ShareFit, ...] = ()  # what each of several GPUs has; the name is a key of `polarlm fit --json`
    experts: ExpertPlan | None = None  # experts in memory at a time, if not all fit
    cpu_experts: CpuExperts | None = None  # experts in the computer's memory, if not all fit on the GPU


@dataclass(frozen=True)
class WeightFit:
    """What fits in the memory that weights of one type leave."""

    weight_type: str  # a value of EngineConfig.weight_type, or the name of a file
    bytes: int
    room: int  # bytes for the KV store and for activations, with the default cache type
    lacking: int  # bytes by which the weights alone are too large; 0 if they fit
    caches: tuple[CacheFit, ...]
    kept: tuple[FormatGroup, ...] = ()  # how the matrices are kept; empty if only the size of a file is known
    experts: ExpertPlan | None = None  # with the default cache type, as `CacheFit.experts`
    cpu_experts: CpuExperts | None = None  # with the default cache type, as `CacheFit.cpu_experts`

    def cache(self, cache_type: str) -> CacheFit:
        return next(one for one in self.caches if one.cache_type == cache_type)


@dataclass(frozen=True)
class DeviceFit:
    """What fits on one device. The first weight type is the requested one."""

    device: str  # a value of EngineConfig.device
    name: str
    free: int  # bytes of its memory
    weights: tuple[WeightFit, ...]


def devices(device: str, threads: int = 0) -> list[tuple[str, Ops]]:
    """Return (value of EngineConfig.device, its ops) of the device that `Engine.load` takes; if that is a GPU that
    "auto" has selected, also the ops of the CPU. Raises EngineError."""
    first, _ = with_host(select(device, threads)[0], threads)
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
    other_bytes: ContextBytes = no_bytes,
) -> DeviceFit:
    """Return what fits on a device with `config`: first with its weight type, then with every other one. contexts:
    lengths in tokens; sequences of these lengths are counted with the first weight type. other_bytes: as in
    `PlacementRequest`."""
    rows, adapters = [], read_adapters(config, model, source).all
    for number, weight_type in enumerate(weight_types(config)):
        settings = replace(config, weight_type=weight_type)
        request = replace(request_from_source(settings, ops, model, source, adapters), other_bytes=other_bytes)
        row = fit_weights(request, ops, cache_types, () if number else contexts)
        rows.append(replace(row, kept=format_groups(ops, source, weight_format(settings))))
    return DeviceFit(device, ops.name, ops.free_memory(), tuple(rows))


def fit_files(
    config: EngineConfig,
    device: str,
    ops: Ops,
    model: ModelConfig,
    files: Mapping[str, int],
    contexts: Sequence[int] = (),
) -> DeviceFit:
    """Return what fits on a device of a model that is not downloaded yet: with each of its GGUF files, or with
    safetensors as each type of weights. files: name, empty for safetensors → bytes. contexts: as for `fit_device`."""
    rows = []
    names = {name: (config, size) for name, size in files.items()}
    if "" in files:
        types = weight_types(config)
        names = {weight_type: (replace(config, weight_type=weight_type), files[""]) for weight_type in types}
    for number, (name, (settings, size)) in enumerate(names.items()):
        request = request_from_bytes(settings, ops, model, size)
        rows.append(replace(fit_weights(request, ops, CACHE_TYPES, () if number else contexts), weight_type=name))
    return DeviceFit(device, ops.name, ops.free_memory(), tuple(rows))


def weight_types(config: EngineConfig) -> list[str]:
    """Return the requested weight type and all others, from most bits to fewest."""

    def bits(name: str) -> float:
        format = weight_formats.get(name)
        return 8 * format.nbytes / format.values

    others = sorted(weight_formats.writable(), key=bits, reverse=True)
    return [*dict.fromkeys((config.weight_type, AS_STORED, *others))]


def fit_weights(
    request: PlacementRequest, ops: Ops, cache_types: Sequence[str] = CACHE_TYPES, contexts: Sequence[int] = ()
) -> WeightFit:
    """Return what fits in the memory that weights leave, with every cache type."""
    names = dict.fromkeys((request.config.cache_type, *cache_types))
    placements = {name: _try_place(request.with_settings(cache_type=name), ops) for name in names}
    caches = tuple(_fit_cache(name, placements[name], contexts) for name in cache_types)
    weight_type, size = request.config.weight_type, request.sizes.weights
    first = next((placement for placement in placements.values() if isinstance(placement, Placement)), None)
    if first is None:
        return WeightFit(weight_type, size, 0, 0, caches)
    if first.split is not None:
        size = first.weights
    return WeightFit(
        weight_type, size, first.room, first.lacking, caches, experts=first.experts, cpu_experts=first.on_host
    )


def _try_place(request: PlacementRequest, ops: Ops) -> Placement | EngineError:
    """Return where the model goes, or why it cannot have these settings. With a GPU's host, as many experts as need be
    stay in its memory."""
    try:
        placement = place(request, ops)
        if placement.split is None and request.sizes.experts and ops.host is not None:
            host_placement = place(request.with_settings(cpu_moe=AUTO), ops)
            return placement if host_placement.on_host is None else host_placement
        return placement
    except EngineError as error:
        return error


def _fit_cache(cache_type: str, placement: Placement | EngineError, contexts: Sequence[int]) -> CacheFit:
    if isinstance(placement, EngineError):
        return CacheFit(cache_type, str(placement))
    plan, shape, request = placement.plan, placement.shape, placement.request
    context = plan.tokens if plan else request.config.ctx_size or request.model.max_context
    return CacheFit(
        cache_type,
        bits_per_value=shape.bits_of_text(context),
        bytes_per_token=shape.sequence_bytes(context) / context,
        tokens=plan.tokens if plan else 0,
        store_bytes=plan.bytes if plan else 0,
        snapshot_bytes=plan.snapshot_bytes if plan else 0,
        contexts=tuple(_fit_context(placement, tokens) for tokens in contexts),
        cards=placement.devices(),
        experts=placement.experts,
        cpu_experts=placement.on_host,
    )


def _fit_context(placement: Placement, tokens: int) -> ContextFit:
    config = placement.request.config

    def holds(count: int) -> bool:
        """Whether a store for `count` sequences at a time fits, and holds them."""
        try:
            plan = placement.store(replace(config, ctx_size=count * tokens, parallel=count, kv_memory=None))
        except EngineError:
            return False
        return plan.tokens == count * tokens and plan.sequences(tokens) >= count

    if placement.lacking or not holds(1):
        return ContextFit(tokens, 0, placement.lacks(tokens, parallel=1))
    counts = range(2, 2 + placement.room // max(1, placement.shape.sequence_bytes(tokens)))
    return ContextFit(tokens, 1 + bisect_left(counts, True, key=lambda count: not holds(count)), 0)


def context_steps(context: int) -> list[int]:
    """Return the contexts to show: powers of two from 4,096 up to the model's own, which is the last; five at most.

    >>> context_steps(40960)
    [4096, 8192, 16384, 32768, 40960]
    """
    steps = [4096]
    while steps[-1] < context:
        steps.append(2 * steps[-1])
    return [*steps[:-1], context][-5:]


@dataclass(frozen=True)
class Advice:
    """The settings to load a model with; None if it does not fit. sentence: the reason, for the user."""

    sentence: str
    settings: dict[str, str | int] | None


def advise(devices: Sequence[DeviceFit], config: EngineConfig, model: ModelConfig) -> Advice:
    """Return the settings to load the model with, from what fits on each device with `config`. Weights are converted
    only if they leave no room for 4,096 tokens anywhere, and experts read from the file only if that is not enough."""
    target = config.ctx_size or model.max_context
    least = min(target, LEAST_CONTEXT)
    rows = range(max(len(device.weights) for device in devices))
    for caches_experts, number, device in itertools.product((False, True), rows, devices):
        weights = device.weights[number]
        if (weights.experts is not None) != caches_experts or weights.bytes > device.weights[0].bytes:
            continue
        if max(cache.tokens for cache in weights.caches) < least:
            continue
        cache, sentence = _best_cache(weights, target)
        if number:
            first = device.weights[0].weight_type
            first = "as the file has them" if first == AS_STORED else f"as {first}"
            sentence = f"{weights.weight_type} is taken: {first}, the weights leave too little room. {sentence}"
        if cache.experts is not None:
            sentence = f"Not all experts fit. {_cache_sentence(cache.experts)} {sentence}"
        if cache.cpu_experts is not None:
            sentence = f"Not all experts fit on the GPU. {_host_sentence(cache.cpu_experts)} {sentence}"
        settings: dict[str, str | int] = {}
        if device is not devices[0]:
            settings["device"] = device.device
        if cache.cpu_experts is not None:
            settings["cpu_moe"] = str(cache.cpu_experts.layers)
        if weights.weight_type != AS_STORED:
            settings["weight_type"] = weights.weight_type
        if cache.cache_type != DEFAULT_CACHE_TYPE:
            settings["cache_type"] = cache.cache_type
        if cache.tokens < target or config.ctx_size:
            settings["ctx_size"] = cache.tokens
        return Advice(sentence, settings)
    smallest = min(devices[0].weights, key=lambda weights: weights.bytes)
    if smallest.lacking:
        lack = f"{format_bytes(smallest.bytes)} as {smallest.weight_type}, {format_bytes(smallest.lacking)} too much"
        return Advice(f"This model does not fit here: its weights take {lack}; {_SMALLEST}.", None)
    most = max(cache.tokens for cache in smallest.caches)
    return Advice(f"This model does not fit here: {most:,} tokens of context are left with it; {_SMALLEST}.", None)


def _cache_sentence(experts: ExpertPlan) -> str:
    return (
        f"{format_bytes(experts.bytes)} of their {format_bytes(experts.whole)} are in memory at a time; if they are "
        f"chosen equally often, a token reads {format_bytes(experts.token_bytes)} from the file."
    )


def _host_sentence(experts: CpuExperts) -> str:
    return (
        f"The experts of the first {experts.layers} layers, {format_bytes(experts.bytes)}, stay in the computer's "
        f"memory; a token reads {format_bytes(experts.of_token)}: {experts.of_token / _HOST_RATE * 1e3:.1f} ms at "
        f"{_HOST_RATE / 1e9:.0f} GB/s."
    )


def _best_cache(weights: WeightFit, target: int) -> tuple[CacheFit, str]:
    """Return the default preset if it holds `target` tokens, else the preset that holds most, and a sentence that says
    why. If no preset supports the model's heads, the choice is among all types."""
    usable = [cache for cache in weights.caches if not cache.problem]
    presets = [cache for cache in usable if cache.cache_type in PRESETS] or usable
    best = next((cache for cache in presets if cache.cache_type == DEFAULT_CACHE_TYPE), presets[0])
    if best.tokens < target:
        best = max(presets, key=lambda cache: cache.tokens)
    size = best.tokens * best.bytes_per_token
    rest = f"{best.cache_type} takes {format_bytes(size)} ({reserved_text(best.store_bytes, size)})"
    f16 = next((cache for cache in weights.caches if cache.cache_type == codecs.FULL), None)
    if f16 is not None and f16.tokens == best.tokens:
        rest += f", f16 {format_bytes(f16.tokens * f16.bytes_per_token)}"
    elif f16 is not None:
        rest += f"; with f16, {f16.tokens:,} tokens fit"
    if best.tokens >= target:
        return best, f"A context of {target:,} tokens fits: {rest}."
    return best, f"Of {target:,} tokens of context, {best.tokens:,} fit: {rest}."
