"""Experts of a mixture that have no room on the device: in the memory of a GPU's host, or read from the file."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from polarlm.engine.backends.ops import Ops
from polarlm.engine.config import AUTO, format_bytes, parse_size
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.placement.request import PlacementRequest
from polarlm.engine.loading.sizes import is_calibrated
from polarlm.engine.state.shapes import CacheShape
from polarlm.model_loaders.config import Experts, ModelConfig

LEAST_CONTEXT = 4096  # tokens for which all weights leave room, unless experts are cached or weights converted
_SHARE = 0.9  # the part of the remaining memory that experts may take
_MIB = 1 << 20
_UNIT_BYTES = 128 * _MIB


@dataclass(frozen=True)
class ExpertPlan:
    """Experts that are read from the file when they are chosen, and those that are in memory at a time. The fields are
    keys of `polarlm fit --json`, as those of `CpuExperts`."""

    experts: int  # how many of each layer's experts are in memory at a time
    count: int  # experts that a layer has
    chosen: int  # for a token
    bytes: int  # what the experts in memory take
    whole: int  # bytes of all experts
    room: int  # bytes for the KV store and for activations

    def __str__(self) -> str:
        return (
            f"experts: {format_bytes(self.bytes)} of {format_bytes(self.whole)} at a time, read from the file as they "
            "are chosen"
        )

    @property
    def token_bytes(self) -> int:
        """Bytes that a token reads from the file if all experts are chosen equally often."""
        return self.whole * self.chosen * (self.count - self.experts) // self.count**2

    @property
    def saved(self) -> int:
        """Bytes of memory that all experts would take beyond these."""
        return self.whole - self.bytes


@dataclass(frozen=True)
class CpuExperts:
    layers: int  # the first ones of the model
    bytes: int  # in the computer's memory
    saved: int  # bytes on the GPU that they would take
    of_token: int  # bytes of the experts that a token chooses

    def __str__(self) -> str:
        return f"experts of the first {self.layers} layers in the computer's memory: {format_bytes(self.bytes)}"


def cpu_experts(
    request: PlacementRequest, ops: Ops, shape: CacheShape, say: Callable[[str], None]
) -> CpuExperts | None:
    """Return which experts stay in the computer's memory, as cpu_moe says; None for none, and a sentence if it has no
    effect. Raises EngineError if the CPU has no compiled kernels, or too little memory."""
    cpu_moe, sizes, layers = request.config.cpu_moe, request.sizes, request.model.layers
    if cpu_moe is None:
        return None
    if ops.backend != "cuda":
        say("cpu_moe has no effect on a CPU: all experts are in its memory.")
        return None
    if not _mixtures(request.model):
        say("cpu_moe has no effect on this model: it has no experts.")
        return None
    if ops.host is None:
        raise EngineError(
            "cpu_moe needs the compiled kernels of the CPU, which do not work here: leave it out, and choose a smaller "
            "model if the GPU has not enough memory",
            settings=("cpu_moe",),
        )
    saved, host_bytes = [0, *accumulate(sizes.expert_bytes)], [0, *accumulate(sizes.host_expert_bytes)]

    def fit(count: int) -> bool:
        """Whether the rest fits on the GPU, with a KV store for the context, or for 16,384 tokens of it."""
        return request.fits(ops, shape, sizes.weights - saved[count], request.context)

    count = bisect_left(range(len(layers) + 1), True, key=fit) if cpu_moe == AUTO else int(cpu_moe)
    count = min(len(layers), count)
    if not host_bytes[count]:
        return None
    ops.host.memory_left(host_bytes[count])
    chosen = (
        size * layer.ffn.top_k // layer.ffn.count
        for size, layer in zip(sizes.host_expert_bytes, layers[:count], strict=False)
        if isinstance(layer.ffn, Experts)
    )
    return CpuExperts(count, host_bytes[count], saved[count], sum(chosen))


def expert_plan(
    request: PlacementRequest, ops: Ops, shape: CacheShape, say: Callable[[str], None] = lambda sentence: None
) -> ExpertPlan | None:
    """Return how many experts to keep in memory; None to load all, and a sentence if expert_cache has no effect.

    By default all are loaded if that leaves room for the context, or for 4,096 tokens of it; otherwise what fits beside
    the other weights and the KV store. Raises EngineError if there is no room for the experts of one token.
    """
    sizes, mixtures = request.sizes, _mixtures(request.model)
    if not mixtures or ops.cache_experts is None:
        if request.config.expert_cache is not None:
            why = "on this model: it has no experts"
            if mixtures:
                why = f"with {ops.backend}: the compiled kernels of a CPU read experts when they are chosen"
            say(f"expert_cache has no effect {why}.")
        return None
    if not sizes.experts:  # their sizes are not known
        return None
    count, chosen = max(ffn.count for ffn in mixtures), max(ffn.top_k for ffn in mixtures)
    other, least = sizes.weights - sizes.experts, sizes.experts * chosen // count
    if request.config.expert_cache is not None:
        experts = _experts_that_fit(request.config.expert_cache, sizes.experts, count, chosen)
        room = request.room(ops, other + sizes.experts * min(experts, count) // count)
    elif not request.caches_experts or _all_fit(request, ops, shape):
        return None
    else:
        free = ops.free_memory() - other
        if free <= least:
            request.room(ops, sizes.weights)  # raises the error that says how much all weights lack
            return None
        room = request.room(ops, other + least)
        experts = max(chosen, int(_SHARE * (free - _store_bytes(request, ops, shape, room))) * count // sizes.experts)
    if experts >= count:
        return None
    return ExpertPlan(experts, count, chosen, sizes.experts * experts // count, sizes.experts, room)


def _experts_that_fit(size: str, whole: int, count: int, chosen: int) -> int:
    experts = parse_size(size, "expert_cache") * count // whole
    if experts < chosen:
        least = whole * chosen // count
        raise EngineError(
            f"expert_cache={size} has room for {experts} of the {count} experts of each layer, and a token needs "
            f"{chosen}: give at least {-(-least // _MIB)}M",
            settings=("expert_cache",),
        )
    return experts


def _all_fit(request: PlacementRequest, ops: Ops, shape: CacheShape) -> bool:
    """Return whether all weights fit into memory, with a KV store for 4,096 tokens or a shorter context."""
    weights = request.sizes.weights
    context = min(request.config.ctx_size or request.model.max_context, LEAST_CONTEXT)
    return weights < ops.free_memory() and request.fits(ops, shape, weights, context)


def _store_bytes(request: PlacementRequest, ops: Ops, shape: CacheShape, room: int) -> int:
    """Return the bytes of the KV store, and of the larger of what fitting it and the longest prompt take."""
    plan = request.plan(ops, shape, room)
    fitting = fitting_bytes(shape) if is_calibrated(request.config, shape) else 0
    return plan.bytes + max(fitting, _prompt_bytes(request.model, plan.tokens)) + request.other_bytes(plan.tokens)


def _prompt_bytes(model: ModelConfig, tokens: int) -> int:
    """Return the bytes of activations of the longest prompt: of all tokens, and of a unit of them."""
    widest = max(mixer.kv_heads * mixer.head_dim for mixer in model.attentions.values())
    inputs = len(model.layers) * model.layer_embedding
    return 4 * tokens * (2 * model.hidden_size + 2 * widest + inputs) + _UNIT_BYTES


def fitting_bytes(shape: CacheShape) -> int:
    """Return the bytes that fitting the cache takes: the metrics of all heads, in at most eight arrays (D, D) of
    float64 at a time."""
    return sum(8 * 8 * layer.kv_heads * layer.head_dim**2 for layer in shape.kv_layers.values())


def _mixtures(model: ModelConfig) -> list[Experts]:
    return [layer.ffn for layer in model.layers if isinstance(layer.ffn, Experts)]
