"""What a model needs of a device's memory, and whether it has it now: for a server that loads and ends models.

Sizes come from the functions that `Engine.load` plans with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from polarlm import model_loaders
from polarlm.engine.backends.select import cards_of, select
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.encoding import WHOLE
from polarlm.engine.loading.experts import sizes
from polarlm.engine.loading.gpu.cards import planned_split
from polarlm.engine.loading.sizes import (
    CONTEXT_TO_CHOOSE_BY,
    cache_shape,
    draft_bytes,
    fits_beside,
    store_plan,
    weight_format,
    work_bytes,
)
from polarlm.engine.model.adapters import adapter_bytes
from polarlm.engine.state.plan import plan_for_tokens
from polarlm.model_loaders import hub

# Resident memory of a model's process without weights and KV store, counted where that is the computer's memory.
# Measured in November 2026 on x86-64 with Python 3.11: 75 to 95 MB while it serves, most of it libraries.
PROCESS_BYTES = 80 << 20


@dataclass(frozen=True)
class Need:
    """What a model needs, and whether the device has it now."""

    device: str  # "cpu", or the name of a GPU
    bytes: int  # weights, KV store and process: for the context that fits, or for the least one that has to
    store: int  # of these, the KV store; 0 if it does not fit
    tokens: int  # the longest context that fits, of at most the model's own or ctx_size; 0 if it does not fit
    fits: bool
    free: int  # bytes of the device's memory


def fetched(config: EngineConfig, verbose: Callable[[str], None], progress: hub.Progress) -> EngineConfig:
    """Return `config` with the path of its model in place of a name on the hub, from which it is downloaded if need be.

    Of several GGUF files the best that fits in memory is taken. Raises EngineError.
    """
    path = str(config.weights)
    if not path.startswith(hub.PREFIX):
        return config
    ops, _ = select(config.device, config.threads)
    try:
        found = hub.fetch(hub.parse(path), fits_beside(config, WHOLE, ops), verbose, progress)
    except model_loaders.LoadError as error:
        raise EngineError(str(error), "model_unavailable") from error
    return replace(config, weights=str(found))


def need(config: EngineConfig, reserved: Mapping[str, int] | None = None, most: int | None = None) -> Need:
    """Return what the model of `config` needs, and whether it fits. Raises EngineError.

    It fits if all its weights do, and beside them the requested context, or else the model's own, up to 16,384 tokens.
    config: settled; its weights are the path of a model that is there.
    reserved: bytes that other processes will still take of each device's memory, by `Need.device`. most: bytes that
    weights, KV store and process may have; None for what is free.
    """
    ops, _ = select(config.device, config.threads)
    names = [ops.name] if ops.name == "cpu" else [card.name for card in cards_of(ops, beside=False)]
    beside = sum(size for device, size in (reserved or {}).items() if any(name in device for name in names))
    process = PROCESS_BYTES if ops.name == "cpu" else 0
    try:
        model, source, _ = model_loaders.load_weights(str(config.weights))
    except model_loaders.LoadError as error:
        raise EngineError(str(error), "model_unavailable") from error
    try:
        model = model.for_context(config.ctx_size)
        weights = sizes(ops, model, source, weight_format(config)).weights
        weights += adapter_bytes(config, ops, model, source)
        shape = cache_shape(config, WHOLE, ops, model)
        split = planned_split(config, ops, model, source, shape)
    finally:
        source.close()
    if split is not None:
        ops, weights = split.ops, sum(share.weights for share in split.shares)
    draft = draft_bytes(config, ops)
    work = work_bytes(config, ops, model, shape)
    context = config.ctx_size or min(model.max_context, CONTEXT_TO_CHOOSE_BY)
    least = process + weights + plan_for_tokens(shape, context, 1).bytes + draft(context)
    none = Need(ops.name, least, 0, 0, False, ops.free_memory())
    if split is not None and beside:
        return none  # how much of each card they will take is not known
    try:
        room = ops.room_beside(weights + beside) if split is None else split.room()
        if most is not None:
            room = min(room, most - weights - process)
        if split is None:
            plan = store_plan(config, ops, model, shape, room, draft)
        else:
            plan = split.plan(config, model, shape, draft)
    except EngineError:
        return none
    taken = plan.bytes + draft(plan.tokens)  # 0 of an encoder
    if taken + work(plan.tokens) > room or (plan.tokens < context and config.kv_memory is None):
        return none
    return Need(ops.name, process + weights + taken, plan.bytes, plan.tokens, True, ops.free_memory())
