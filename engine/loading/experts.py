"""How many experts of a mixture are in memory at a time, where not all of them fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from polarlm import model_loaders
from polarlm.engine.backends.ops import Ops
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.sizes import is_calibrated, store_plan, weight_format
from polarlm.engine.model.weights import EXPERT_SLOTS, expert_bytes, weight_bytes
from polarlm.engine.state.plan import format_bytes, parse_size
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.weight_formats import WeightFormat
from polarlm.model_loaders.config import Experts, ModelConfig
from polarlm.model_loaders.families import tensors
from polarlm.model_loaders.files.weights import WeightSource

LEAST_CONTEXT = 4096  # tokens for which all weights leave room, unless experts are cached or weights converted
_SHARE = 0.9  # of what memory leaves
_MIB = 1 << 20
_UNIT_BYTES = 128 * _MIB


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights on the device."""

    weights: int
    of_layers: tuple[int, ...] = ()  # of these, the matrices of each layer's experts
    on_host: tuple[int, ...] = ()  # bytes of these in the memory of a GPU's host

    @property
    def experts(self) -> int:
        return sum(self.of_layers)


@dataclass(frozen=True)
class ExpertPlan:
    """The experts that are in memory at a time."""

    experts: int  # of each layer
    count: int  # experts that a layer has
    chosen: int  # for a token
    bytes: int  # that they take
    whole: int  # bytes of all experts
    room: int  # bytes for the KV store and for activations

    def __str__(self) -> str:
        return (
            f"experts: {format_bytes(self.bytes)} of {format_bytes(self.whole)} at a time, read from the file as they "
            "are chosen"
        )

    @property
    def of_token(self) -> int:
        """Bytes that a token reads from the file if all experts are chosen equally often."""
        return self.whole * self.chosen * (self.count - self.experts) // self.count**2


def no_cache(ops: Ops, model: ModelConfig) -> str:
    """Return why experts are not cached: "with cuda, …"; empty if they can be."""
    if not has_experts(model):
        return "on this model: it has no experts"
    if ops.cache_experts is None:
        return f"with {ops.backend}: the compiled kernels of a CPU read experts when they are chosen"
    return ""


def has_experts(model: ModelConfig) -> bool:
    """Return whether a layer is a mixture of experts."""
    return bool(_mixtures(model))


def _mixtures(model: ModelConfig) -> list[Experts]:
    return [layer.ffn for layer in model.layers if isinstance(layer.ffn, Experts)]


def sizes(ops: Ops, model: ModelConfig, source: WeightSource, weight_type: WeightFormat | None) -> Sizes:
    """Return the sizes of a model's weights, for the `weight_type` of `load_weights`."""
    of_layers, on_host = (
        () if one is None else tuple(expert_bytes(one, model, source, weight_type)) for one in (ops, ops.host)
    )
    return Sizes(weight_bytes(ops, source, weight_type), of_layers, on_host)


def estimated_sizes(ops: Ops, model: ModelConfig, weights: int) -> Sizes:
    """Return the sizes of weights of `weights` bytes of which no more is known: experts have their share of values."""
    every = sum(math.prod(spec.shape) for spec in tensors(model).specs())
    counts = (
        sum(math.prod(spec.shape) for slot in EXPERT_SLOTS for spec in slots.get(slot, ()))
        for slots in tensors(model).layers
    )
    of_layers = tuple(weights * count // every for count in counts)
    return Sizes(weights, of_layers, () if ops.host is None else of_layers)


def asked_expert_plan(
    config: EngineConfig,
    ops: Ops,
    source: model_loaders.Model,
    shape: CacheShape,
    more: Callable[[int], int],
    say: Callable[[str], None],
) -> ExpertPlan | None:
    """Return `expert_plan` for a model; say why expert_cache has no effect."""
    if config.expert_cache is not None and (why := no_cache(ops, source.config)):
        say(f"expert_cache has no effect {why}.")
    whole = sizes(ops, source.config, source.weights, weight_format(config))
    return expert_plan(config, ops, source.config, shape, whole, more)


def expert_plan(
    config: EngineConfig,
    ops: Ops,
    model: ModelConfig,
    shape: CacheShape,
    of: Sizes,
    more: Callable[[int], int] = lambda tokens: 0,
) -> ExpertPlan | None:
    """Return how many experts to keep in memory; None to load all. more: as in `store_plan`.

    By default all are loaded if that leaves room for the context, or for 4,096 tokens of it; otherwise those that fit
    beside the other weights and the KV store. Raises EngineError for a size that is too small for one token.
    """
    if no_cache(ops, model):
        return None
    mixtures = _mixtures(model)
    count, chosen = max(one.count for one in mixtures), max(one.top_k for one in mixtures)

    other, least = of.weights - of.experts, of.experts * chosen // count
    if config.expert_cache is not None:
        experts = parse_size(config.expert_cache, "expert_cache") * count // of.experts
        if experts < chosen:
            raise EngineError(
                f"expert_cache={config.expert_cache} has room for {experts} of the {count} experts of each layer, and "
                f"a token needs {chosen}: give at least {-(-least // _MIB)}M",
                settings=("expert_cache",),
            )
        room = ops.room_beside(other + of.experts * min(experts, count) // count)
    elif _all_fit(config, ops, model, shape, of, more):
        return None
    else:
        free = ops.free_memory() - other
        if free <= least:
            ops.room_beside(of.weights)  # raises the error that says how much all weights lack
            return None
        room = ops.room_beside(other + least)
        store = store_plan(config, ops, model, shape, room, more)
        fitting = _fitting_bytes(shape) if is_calibrated(config, shape) else 0
        left = free - store.bytes - max(fitting, _prompt_bytes(model, store.tokens)) - more(store.tokens)
        experts = max(chosen, int(_SHARE * left) * count // of.experts)
    if experts >= count:
        return None
    return ExpertPlan(experts, count, chosen, of.experts * experts // count, of.experts, room)


def _prompt_bytes(model: ModelConfig, tokens: int) -> int:
    """Return the bytes of activations of the longest prompt: of all tokens, and of a unit of them."""
    widest = max(mixer.kv_heads * mixer.head_dim for mixer in model.attentions.values())
    inputs = len(model.layers) * model.layer_embedding
    return 4 * tokens * (2 * model.hidden_size + 2 * widest + inputs) + _UNIT_BYTES


def _fitting_bytes(shape: CacheShape) -> int:
    """Return the bytes that fitting the cache takes: the metrics of all heads, of which at most eight arrays (D, D) in
    float64 are there at a time."""
    return sum(8 * 8 * one.kv_heads * one.head_dim**2 for one in shape.kv_layers.values())


def _all_fit(
    config: EngineConfig, ops: Ops, model: ModelConfig, shape: CacheShape, of: Sizes, more: Callable[[int], int]
) -> bool:
    """Return whether all weights fit into memory, with a KV store for 4,096 tokens or a shorter context."""
    tokens = min(config.ctx_size or model.max_context, LEAST_CONTEXT)
    try:
        room = ops.room_beside(of.weights)
        asked = replace(config, ctx_size=tokens)
        return of.weights < ops.free_memory() and store_plan(asked, ops, model, shape, room, more).tokens >= tokens
    except EngineError:
        return False
