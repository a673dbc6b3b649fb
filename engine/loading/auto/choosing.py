"""Chooses the types of `auto:BITS`: what errors of each layer cost is measured once for a model, and kept in the user's
cache folder; the types follow from it and from the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import numpy as np

from polarlm import model_loaders
from polarlm.engine import codecs
from polarlm.engine.cli.progress import SHARE, amounts, progress_bar
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading import calibration, kept_arrays
from polarlm.engine.loading.auto import allocation
from polarlm.engine.loading.auto.allocation import Costs
from polarlm.engine.loading.auto.sensitivity import TOKENS, measure
from polarlm.engine.loading.calibration import text_ids
from polarlm.engine.model.forward import Transformer
from polarlm.engine.state import cache_types
from polarlm.engine.storage.tiers.names import digest
from polarlm.engine.storage.tiers.opening import remembering

_KIND = "sensitivity"
_FORMAT = 1  # the version of the meaning of the kept numbers
_LEAST_BLOCKS = 3  # the first is not coded, the others are read in two ways


class HasModel(Protocol):
    """The parts of an engine."""

    model: Transformer


Loaded = Callable[[EngineConfig], AbstractContextManager[HasModel]]


def with_types(
    config: EngineConfig, source: model_loaders.Model, loaded: Loaded, verbose: Callable[[str], None] | None
) -> EngineConfig:
    """Return `config` with the types that auto:BITS stands for in its place, unless the model has no K/V.

    loaded: settings → a context with an engine's parts, to measure its model; called unless what errors cost is kept.
    Raises EngineError for bits that no types have, and for a text that is too short.
    """
    budget, layers = cache_types.auto_bits(config.cache_type), source.config.kv_attentions
    if budget is None or not layers:
        return config
    allocation.types(budget, layers, len(source.config.layers), config.block_size, None)  # the bits are possible
    size = config.block_size
    ids = text_ids(source.tokenizer, min(TOKENS, source.config.max_context))
    ids = ids[: len(ids) // size * size]
    if len(ids) < _LEAST_BLOCKS * size:
        raise EngineError(
            f"cache_type={config.cache_type}: measuring takes {_LEAST_BLOCKS} blocks of {size} tokens, and the "
            "calibration text is shorter here; choose a smaller block_size, or name the types",
            settings=("cache_type", "block_size"),
        )
    costs = _kept_or_measured(config, source, ids, loaded, verbose)
    chosen = allocation.types(budget, layers, len(source.config.layers), size, costs)
    return replace(config, cache_type=chosen)


def _kept_or_measured(
    config: EngineConfig,
    source: model_loaders.Model,
    ids: Sequence[int],
    loaded: Loaded,
    verbose: Callable[[str], None] | None,
) -> Costs:
    say = verbose or (lambda sentence: None)
    layers = [*source.config.kv_attentions]
    try:
        files = digest(sorted(source.weights.files()), remembering())
    except OSError as error:
        raise EngineError(f"The weights of {source.name} cannot be read: {error}", "model_unavailable") from error
    merged = getattr(source.weights, "merged", ())
    key = kept_arrays.key_of(_FORMAT, files.hex(), merged, config.weight_type, config.block_size, list(ids), layers)
    kept = kept_arrays.read(_KIND, key)
    if kept is None:
        say(f"Measuring on {len(ids)} tokens of text what errors of each layer's keys and values cost, once")
        with loaded(_for_measuring(config, len(ids))) as parts:
            found = _measured(parts.model, ids, config.block_size, verbose)
        kept = {"costs": np.array([found[layer] for layer in layers], np.float32)}
        kept_arrays.write(_KIND, key, kept, say)
    return {layer: (float(k), float(v)) for layer, (k, v) in zip(layers, kept["costs"], strict=True)}


def _for_measuring(config: EngineConfig, tokens: int) -> EngineConfig:
    """Return the settings of an engine that is measured: with the same weights and a store for nothing else."""
    return replace(
        config,
        ctx_size=tokens,
        cache_type=codecs.FULL,
        kv_memory=None,
        state_cache=None,
        cache_ram=None,
        cache_disk=None,
        cache_disk_folder=None,
        cache_remote=None,
        model_draft=None,
        kept_sequences=0,
        parallel=1,
    )


def _measured(
    model: Transformer, ids: Sequence[int], block_size: int, verbose: Callable[[str], None] | None
) -> dict[int, tuple[float, float]]:
    ops, config, weights = model.ops, model.config, model.weights
    fitted = ids[: calibration.TOKENS]
    with progress_bar(verbose is not None, desc="Measuring the layers", bar_format=SHARE) as bar:
        say = verbose or (lambda sentence: None)
        statistics = calibration.load_or_calibrate(ops, config, weights, fitted, block_size, say)
        return measure(ops, config, weights, ids, block_size, statistics, amounts(bar))
