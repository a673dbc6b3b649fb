"""The draft model of an engine: its settings, and the memory that it takes."""

from __future__ import annotations

from dataclasses import replace

from polarlm import model_loaders
from polarlm.engine import codecs
from polarlm.engine.backends.ops import Ops
from polarlm.engine.config import AS_STORED, EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.limits import DRAFTS, MOST_DRAFTED
from polarlm.engine.loading.placement.wanted import More, nothing, wanted_of_source
from polarlm.engine.loading.sizes import check_layers
from polarlm.engine.state.plan import plan_for_tokens


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


def draft_bytes(config: EngineConfig, ops: Ops) -> More:
    """Return a function: tokens of a context → bytes of the draft model's weights, KV store and work; 0 without one.
    Raises EngineError if the backend lacks kernels of its layers."""
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
