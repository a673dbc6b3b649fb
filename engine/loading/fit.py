"""Tells what fits into a device's memory: a model's weights, its longest context, how many sequences at a time.

Only the model's configuration and the table of its tensors are read. Sizes come from the functions that `Engine.load`
plans with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from polarlm import model_loaders
from polarlm.engine import weight_formats
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import select, with_host
from polarlm.engine.config import AS_STORED, EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.cpu_experts import AUTO, CpuExperts, cpu_experts
from polarlm.engine.loading.encoding import WHOLE
from polarlm.engine.loading.experts import ExpertPlan, Sizes, estimated_sizes, expert_plan, sizes
from polarlm.engine.loading.sizes import (
    CONTEXT_TO_CHOOSE_BY,
    cache_shape,
    draft_bytes,
    fits_beside,
    loaded_bytes,
    store_plan,
    weight_format,
    work_bytes,
)
from polarlm.engine.model.adapters import adapter_bytes
from polarlm.engine.model.weights import Kept, kept
from polarlm.engine.state.cache_types import PRESETS
from polarlm.engine.state.plan import StorePlan, plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.model_loaders import hub
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
    store_bytes: int = 0  # bytes of the KV store for that context, in the device's memory
    snapshot_bytes: int = 0  # bytes of snapshots of recurrent layers, in the computer's memory; see StorePlan
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
    cpu_experts: CpuExperts | None = None  # those that stay in the computer's memory, if not all of them fit on the GPU

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
class Need:
    """What a model needs, and whether the device has it now."""

    device: str  # "cpu", or the name of a GPU
    bytes: int  # weights and KV store: for the context that fits, or for the least one that has to
    store: int  # of these, the KV store; 0 if it does not fit
    tokens: int  # the longest context that fits, of at most the model's own or ctx_size; 0 if it does not fit
    fits: bool
    free: int  # bytes of the device's memory


def devices(device: str, threads: int = 0) -> list[tuple[str, Ops]]:
    """Return (value of EngineConfig.device, its ops) of the device that `Engine.load` takes; if that is a GPU that
    "auto" has selected, also those of the CPU. Raises EngineError."""
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
) -> DeviceFit:
    """Return what fits on a device with `config`: first with its weight type, then with every other one.

    contexts: lengths in tokens; sequences of these lengths are counted with the first weight type.
    """
    others = [AS_STORED, *sorted(weight_formats.writable(), key=lambda name: -_bits(name))]
    found, added = [], adapter_bytes(config, ops, model, source)
    for weight_type in dict.fromkeys((config.weight_type, *others)):
        settings = replace(config, weight_type=weight_type)
        format = weight_format(settings)
        asked = contexts if weight_type == config.weight_type else ()
        of = sizes(ops, model, source, format)
        of = replace(of, weights=of.weights + added)
        weights = fit_weights(settings, ops, model, of, cache_types, asked)
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
        of = estimated_sizes(ops, model, loaded_bytes(config, ops, model, size))
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
    on_cpu = _cpu_experts(config, ops, model, of)
    try:
        if of.experts:
            experts = expert_plan(config, ops, model, cache_shape(config, WHOLE, ops, model), of)
        room = ops.room_beside(of.weights - on_cpu.saved if on_cpu else of.weights) if experts is None else experts.room
    except EngineError as error:
        lacking = error.numbers.get("lacking", 0)
    caches = [_fit_cache(config, ops, model, room, lacking, cache_type, contexts) for cache_type in cache_types]
    kind = name or config.weight_type
    return WeightFit(kind, of.weights, room, lacking, tuple(caches), experts=experts, cpu_experts=on_cpu)


def _cpu_experts(config: EngineConfig, ops: Ops, model: ModelConfig, of: Sizes) -> CpuExperts | None:
    """Return which experts have to stay in the memory of a GPU's host; None if none, or if they do not fit there."""
    if not of.experts or ops.host is None:
        return None
    asked = replace(config, cpu_moe=AUTO)
    try:
        return cpu_experts(asked, ops, model, cache_shape(asked, WHOLE, ops, model), of)
    except EngineError:
        return None


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
        snapshot_bytes=plan.snapshot_bytes if plan else 0,
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


def need(config: EngineConfig, reserved: int = 0, most: int | None = None) -> Need:
    """Return what the model of `config` needs, and whether it fits. Raises EngineError.

    It fits if all its weights do, and beside them the requested context, or else the model's own, up to 16,384 tokens.
    config: settled; its weights are the path of a model that is there.
    reserved: bytes that other processes will still take of the computer's memory. most: bytes that weights and KV store
    may have; None for what is free.
    """
    ops, _ = select(config.device, config.threads)
    reserved = reserved if ops.name == "cpu" else 0  # on a GPU all memory is taken while a model is loaded
    try:
        model, source, _ = model_loaders.load_weights(str(config.weights), config.mmap)
    except model_loaders.LoadError as error:
        raise EngineError(str(error), "model_unavailable") from error
    try:
        model = model.for_context(config.ctx_size)
        weights = sizes(ops, model, source, weight_format(config)).weights
        weights += adapter_bytes(config, ops, model, source)
    finally:
        source.close()
    shape, draft = cache_shape(config, WHOLE, ops, model), draft_bytes(config, ops)
    work = work_bytes(config, ops, model, shape)
    context = config.ctx_size or min(model.max_context, CONTEXT_TO_CHOOSE_BY)
    least = weights + plan_for_tokens(shape, context, 1).bytes + draft(context)
    none = Need(ops.name, least, 0, 0, False, ops.free_memory())
    try:
        room = ops.room_beside(weights + reserved)
        if most is not None:
            room = min(room, most - weights)
        plan = store_plan(config, ops, model, shape, room, draft)
    except EngineError:
        return none
    taken = plan.bytes + draft(plan.tokens)  # 0 of an encoder
    if taken + work(plan.tokens) > room or (plan.tokens < context and config.kv_memory is None):
        return none
    return Need(ops.name, weights + taken, plan.bytes, plan.tokens, True, ops.free_memory())


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
