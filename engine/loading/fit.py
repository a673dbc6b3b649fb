"""Tells what fits into a device's memory: a model's weights, its longest context, how many sequences at a time.

Only the model's configuration and the table of its tensors are read. Sizes come from the functions that `Engine.load`
plans with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from polarlm.engine import weight_formats
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import select, with_host
from polarlm.engine.config import AS_STORED, EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.encoding import WHOLE
from polarlm.engine.loading.experts import ExpertPlan, Sizes, estimated_sizes, expert_plan, sizes
from polarlm.engine.loading.gpu.cards import CardFit, Split, planned_split
from polarlm.engine.loading.gpu.cpu_experts import AUTO, CpuExperts, cpu_experts
from polarlm.engine.loading.sizes import (
    cache_shape,
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
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.files.weights import WeightSource

CACHE_TYPES = ("f16", "q8_0", *PRESETS)


_SplitOf = Callable[[EngineConfig], Split | None]


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
    cards: tuple[CardFit, ...] = ()  # of several GPUs that share the layers


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
        split_of = partial(_split, ops=ops, model=model, source=source)
        weights = fit_weights(settings, ops, model, of, cache_types, asked, split_of=split_of)
        found.append(replace(weights, kept=kept(ops, source, format)))
    return DeviceFit(device, ops.name, ops.free_memory(), tuple(found))


def fit_files(
    config: EngineConfig,
    device: str,
    ops: Ops,
    model: ModelConfig,
    files: Mapping[str, int],
    contexts: Sequence[int] = (),
) -> DeviceFit:
    """Return what fits on a device with each of several files of a model, none of which is downloaded yet.

    files: name, which replaces the weight type → bytes. contexts: as for `fit_device`, counted with the first file.
    """
    found = []
    for number, (name, size) in enumerate(files.items()):
        of = estimated_sizes(ops, model, loaded_bytes(config, ops, model, size))
        found.append(fit_weights(config, ops, model, of, CACHE_TYPES, () if number else contexts, name))
    return DeviceFit(device, ops.name, ops.free_memory(), tuple(found))


def _split(config: EngineConfig, ops: Ops, model: ModelConfig, source: WeightSource) -> Split | None:
    return planned_split(config, ops, model, source, cache_shape(config, WHOLE, ops, model))


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
    split_of: _SplitOf = lambda config: None,
) -> WeightFit:
    """Return what fits in the memory that weights of these sizes leave. name: replaces their type. split_of: returns
    how GPUs share the layers, for settings."""
    room, lacking, experts = 0, 0, None
    on_cpu = _cpu_experts(config, ops, model, of)
    try:
        if of.experts:
            experts = expert_plan(config, ops, model, cache_shape(config, WHOLE, ops, model), of)
        if (split := split_of(config)) is not None:
            room, of, on_cpu = split.room(), replace(of, weights=sum(share.weights for share in split.shares)), None
        elif experts is None:
            room = ops.room_beside(of.weights - on_cpu.saved if on_cpu else of.weights)
        else:
            room = experts.room
    except EngineError as error:
        lacking = error.numbers.get("lacking", 0)
    caches = [
        _fit_cache(replace(config, cache_type=cache_type), ops, model, room, lacking, contexts, split_of)
        for cache_type in cache_types
    ]
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
    contexts: Sequence[int],
    split_of: _SplitOf,
) -> CacheFit:
    try:
        shape = cache_shape(config, WHOLE, ops, model)
        split = None if lacking else split_of(config)
    except EngineError as error:
        return CacheFit(config.cache_type, str(error))

    def planned(config: EngineConfig) -> StorePlan | None:
        """The plan of `Engine.load`; None if there is too little memory for one."""
        try:
            return store_plan(config, ops, model, shape, room) if split is None else split.plan(config, model, shape)
        except EngineError:
            return None

    def lacks(config: EngineConfig, tokens: int) -> int:
        if split is not None:
            return split.lacking(config, model, shape, tokens)
        needed = plan_for_tokens(shape, tokens, config.parallel + config.kept_sequences).bytes
        return lacking + needed + work_bytes(config, ops, model, shape)(tokens) - room

    plan = None if lacking else planned(config)
    return CacheFit(
        config.cache_type,
        bits_per_value=shape.bits_per_value,
        bytes_per_token=shape.bytes_per_token,
        tokens=plan.tokens if plan else 0,
        store_bytes=plan.bytes if plan else 0,
        snapshot_bytes=plan.snapshot_bytes if plan else 0,
        contexts=tuple(_fit_context(config, planned, lacks, lacking, shape, room, tokens) for tokens in contexts),
        cards=() if split is None or plan is None else split.cards(config, model, plan),
    )


def _fit_context(
    config: EngineConfig,
    planned: Callable[[EngineConfig], StorePlan | None],
    lacks: Callable[[EngineConfig, int], int],
    lacking: int,
    shape: CacheShape,
    room: int,
    tokens: int,
) -> ContextFit:
    def holds(count: int) -> bool:
        """Whether a store for `count` sequences at a time fits, and holds them."""
        settings = replace(config, ctx_size=count * tokens, parallel=count, kv_memory=None)
        plan = planned(settings)
        return plan is not None and plan.tokens == count * tokens and plan.sequences(tokens) >= count

    if lacking or not holds(1):
        return ContextFit(tokens, 0, lacks(replace(config, ctx_size=tokens, parallel=1), tokens))
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
