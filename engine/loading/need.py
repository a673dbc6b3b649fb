"""What a model needs of a device's memory beside other models, and whether it is free now: for a server of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from polarlm import model_loaders
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import ops_per_device, select, with_host
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.placement.place import Placement, place
from polarlm.engine.loading.placement.request import companion_bytes, fit_check, request_from_source
from polarlm.engine.model.adapters import read_adapters
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
    store: int  # bytes of the KV store, which `bytes` contains; 0 if it does not fit
    tokens: int  # the longest context that fits, of at most the model's own or ctx_size; 0 if it does not fit
    fits: bool
    free: int  # bytes of the device's memory


def fetch_model(
    config: EngineConfig, verbose: Callable[[str], None], progress: hub.Progress | None = None
) -> EngineConfig:
    """Return `config` with the path of its model in place of a name, which is downloaded if need be: of several GGUF
    files on the hub the best that fits in memory. Raises EngineError."""
    ops, _ = select(config.device, config.threads)
    try:
        file = model_loaders.locate(config.weights, fit_check(config, ops), verbose, progress)
    except model_loaders.LoadError as error:
        raise EngineError(str(error), "model_unavailable") from error
    return replace(config, weights=str(file))


def need(config: EngineConfig, reserved: Mapping[str, int] | None = None, limit: int | None = None) -> Need:
    """Return what the model of `config`, settled and with a path, needs, and whether it fits. Raises EngineError.

    It fits if all its weights do, and beside them the requested context, or else the model's own, up to 16,384 tokens.
    Experts are left out only if `expert_cache` or `cpu_moe` says so. reserved: bytes that other processes will still
    take, by `Need.device`. limit: bytes that weights, KV store and process may have; None for what is free.
    """
    ops, _ = select(config.device, config.threads)
    if config.cpu_moe is not None:
        ops, _ = with_host(ops, config.threads)
    names = [ops.name] if ops.name == "cpu" else [device.name for device in ops_per_device(ops, with_others=False)]
    other_models = sum(size for device, size in (reserved or {}).items() if any(name in device for name in names))
    process = PROCESS_BYTES if ops.name == "cpu" else 0
    placement = _place(config, ops, other_models, None if limit is None else limit - process)
    request, plan, weights = placement.request, placement.plan, process + placement.weights
    device, free = placement.ops.name, placement.ops.free_memory()
    if plan is not None and placement.is_met and not (placement.split is not None and other_models):
        store = plan.bytes + request.other_bytes(plan.tokens)
        if limit is None or weights + store <= limit:
            return Need(device, weights + store, plan.bytes, plan.tokens, True, free)
    # How much of each of several GPUs others will take is not known.
    least = weights + plan_for_tokens(placement.shape, request.context, 1).bytes + request.other_bytes(request.context)
    return Need(device, least, 0, 0, False, free)


def _place(config: EngineConfig, ops: Ops, reserved_bytes: int, memory_limit: int | None) -> Placement:
    try:
        model, source, _ = model_loaders.load_weights(str(config.weights), mtp=config.mtp, head=config.head)
    except model_loaders.LoadError as error:
        raise EngineError(str(error), "model_unavailable") from error
    try:
        model = model.for_context(config.ctx_size)
        request = request_from_source(config, ops, model, source, read_adapters(config, model, source).all)
        request = replace(
            request,
            other_bytes=companion_bytes(config, ops, model, Path(str(config.weights))),
            reserved_bytes=reserved_bytes,
            memory_limit=memory_limit,
            caches_experts=False,
        )
        return place(request, ops)
    finally:
        source.close()
