"""Checks the settings of an engine as far as that needs no model.

What it asks is imported when it checks: `--help` of a command needs none of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from polarlm.engine.config import AUTO, EngineConfig, parse_size
from polarlm.engine.errors import EngineError
from polarlm.engine.limits import DRAFT_MODEL, DRAFT_NAMES, MOST_DRAFTED

if TYPE_CHECKING:
    from polarlm.engine.backends.ops import Ops
    from polarlm.engine.state.store import KVStore


def settle(
    path: str | os.PathLike[str] | None, config: EngineConfig | None, settings: Mapping[str, Any]
) -> EngineConfig:
    """Return the checked EngineConfig of `Engine.load`'s arguments. Raises EngineError for an invalid setting."""
    from polarlm.model_loaders.hub import PREFIX

    config = replace(config or EngineConfig(), **settings)
    if path is not None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            raise EngineError(f"A model is the path of a folder or a file, or None for the demonstration, not {path!r}")
        config = replace(config, weights=os.fspath(path))
    if type(config.input_bits) is int:
        config = replace(config, input_bits=str(config.input_bits))
    for name, kind in get_type_hints(EngineConfig).items():
        value = getattr(config, name)
        types = (int, float) if kind is float else get_origin(kind) if get_origin(kind) is dict else kind
        if not isinstance(value, types) or (isinstance(value, bool) and kind is not bool):
            type_name = getattr(kind, "__name__", kind)
            raise EngineError(f"{name} is {value!r}, but must be of type {type_name}")
    config = replace(config, spec_type=DRAFT_NAMES.get(config.spec_type, config.spec_type))
    _check_values(config)
    config = _replayable(config) if config.replayable else config
    if config.hf_repo is not None:
        if config.weights is not None:
            raise _wrong("hf_repo", config, "a path is given as well; leave one of the two out")
        config = replace(config, weights=PREFIX + config.hf_repo.removeprefix(PREFIX), hf_repo=None)
    return config


def _check_values(config: EngineConfig) -> None:
    from polarlm.engine.backends.select import gpu_numbers
    from polarlm.engine.loading.placement.devices import split_shares
    from polarlm.engine.loading.sizes import weight_format
    from polarlm.engine.model.adapters import check_adapters
    from polarlm.engine.state import cache_types
    from polarlm.engine.storage.tiers.opening import check_settings

    for field in fields(EngineConfig):
        if (choices := field.metadata.get("choices")) is not None and getattr(config, field.name) not in choices:
            raise _wrong(field.name, config, f"choose from {', '.join(map(str, choices))}")
    if config.ctx_size < 0:
        raise _wrong("ctx_size", config, "give a number of tokens, or 0 for the model's own")
    if config.ctx_size == 1:
        raise _wrong("ctx_size", config, "a prompt and its answer take two tokens at least; give more, or 0")
    if config.threads < 0:
        raise _wrong("threads", config, "give a number of threads, or 0 to follow OMP_NUM_THREADS")
    if config.block_size < 4 or config.block_size % 4:
        raise EngineError(f"block_size is {config.block_size}, but must be a multiple of 4")
    if config.parallel < 1:
        raise _wrong("parallel", config, "give the number of requests to compute at a time, 1 or more")
    if not 0 <= config.draft_max <= MOST_DRAFTED:
        raise _wrong("draft_max", config, f"give the most tokens of a draft, 0 to {MOST_DRAFTED}")
    if config.spec_type == DRAFT_MODEL and config.model_draft is None:
        raise EngineError(
            f"spec_type={DRAFT_MODEL}: there is no draft model; give one with model_draft",
            settings=("spec_type", "model_draft"),
        )
    if config.kept_sequences < 0:
        raise EngineError(f"kept_sequences is {config.kept_sequences}, but must be 0 or more")
    for setting in ("kv_memory", "state_cache", "cache_disk", "cache_ram", "expert_cache"):
        if (size := getattr(config, setting)) is not None:
            parse_size(size, setting)
    if config.cpu_moe not in (None, AUTO) and not str(config.cpu_moe).isdecimal():
        raise _wrong("cpu_moe", config, f"give a number of layers, or {AUTO}")
    gpu_numbers(config.device)
    if config.tensor_split not in (None, AUTO):
        split_shares(config)
    check_settings(config)
    check_adapters(config.lora)
    weight_format(config)
    cache_types.check_names(config)


def _replayable(config: EngineConfig) -> EngineConfig:
    """Return settings with which answers can be replayed. Raises EngineError for others that have been asked for."""
    if config.device not in ("auto", "cpu"):
        raise _wrong("device", config, "replayable=True needs a CPU, whose sums are added in one order; leave it out")
    if config.input_bits == "bf16":
        raise _wrong("input_bits", config, "replayable=True needs sums that are exact; choose 16, 8 or auto")
    return replace(
        config,
        device="cpu",
        input_bits="16" if config.input_bits == AUTO else config.input_bits,
        calibration=False,  # a machine's own differs by its linear algebra
        state_type="f32",
    )


def check_replayable(ops: Ops, store: KVStore, parallel: int) -> None:
    """Raises EngineError if what is loaded computes steps in several ways, or lacks room for the recent blocks of
    `parallel` requests."""
    why = next(iter(store.numpy_fallbacks()), "")
    if not ops.is_replayable:
        why = "it needs compiled kernels of a CPU with AVX2 or NEON"
    if [one for layer in store.shape.kv_layers.values() for one in layer.codecs if one.name.startswith("polarquant")]:
        why = "polarquant has other factors on CPUs with VBMI; choose ring4 or another cache_type"
    if store.plan.recent_slots < parallel * store.shape.recent_blocks:
        why = "recent tokens of all requests find no room in full precision; raise kv_memory, or lower parallel"
    if why:
        raise EngineError(f"replayable=True cannot be had here: {why}", settings=("replayable",))


def _wrong(setting: str, config: EngineConfig, advice: str) -> EngineError:
    return EngineError(f"{setting}={getattr(config, setting)}: {advice}", settings=(setting,))
