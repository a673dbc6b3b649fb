"""Advice from what fits on each device: the settings to load a model with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from polarlm.engine import codecs
from polarlm.engine.config import AS_STORED, DEFAULT_CACHE_TYPE, EngineConfig
from polarlm.engine.loading.fit import CacheFit, DeviceFit, WeightFit
from polarlm.engine.loading.placement.experts import LEAST_CONTEXT, CpuExperts, ExpertPlan
from polarlm.engine.state.cache_types import PRESETS
from polarlm.engine.state.plan import format_bytes
from polarlm.model_loaders.config import ModelConfig

_HOST_RATE = 50e9  # bytes a second from a desktop computer's memory
_SMALLEST = "take a smaller model, or a file of fewer bits"


@dataclass(frozen=True)
class Advice:
    """The settings to load a model with; None if it does not fit. sentence: the reason, for the user."""

    sentence: str
    settings: dict[str, str | int] | None


def advise(devices: Sequence[DeviceFit], config: EngineConfig, model: ModelConfig) -> Advice:
    """Return the settings to load the model with, from what fits on each device with `config`.

    Weights are converted only if they leave no room for 4,096 tokens on any device, and experts are read from the file
    only if not even that is enough.
    """
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
            sentence = f"Not all experts fit. {_of_cache(cache.experts)} {sentence}"
        if cache.cpu_experts is not None:
            sentence = f"Not all experts fit on the GPU. {_of_host(cache.cpu_experts)} {sentence}"
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


def _of_cache(experts: ExpertPlan) -> str:
    """Return a sentence about experts that are read from the file, and what a token then costs."""
    return (
        f"{format_bytes(experts.bytes)} of their {format_bytes(experts.whole)} are in memory at a time; if they are "
        f"chosen equally often, a token reads {format_bytes(experts.of_token)} from the file."
    )


def _of_host(experts: CpuExperts) -> str:
    """Return a sentence about experts in the memory of a GPU's host, and what a token then costs."""
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
    rest = f"{best.cache_type} takes {format_bytes(best.store_bytes)} for its KV store"
    f16 = next((cache for cache in weights.caches if cache.cache_type == codecs.FULL), None)
    if f16 is not None and f16.tokens == best.tokens:
        rest += f", f16 {format_bytes(f16.store_bytes)}"
    elif f16 is not None:
        rest += f"; with f16, {f16.tokens:,} tokens fit"
    if best.tokens >= target:
        return best, f"A context of {target:,} tokens fits: {rest}."
    return best, f"Of {target:,} tokens of context, {best.tokens:,} fit: {rest}."
