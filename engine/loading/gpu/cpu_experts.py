"""How many layers of a mixture have their experts in the computer's memory, where a GPU's is too small."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from polarlm import model_loaders
from polarlm.engine.backends.ops import Ops
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.experts import Sizes, has_experts, sizes
from polarlm.engine.loading.sizes import CONTEXT_TO_CHOOSE_BY, store_plan, weight_format, work_bytes
from polarlm.engine.state.plan import format_bytes
from polarlm.engine.state.shapes import CacheShape
from polarlm.model_loaders.config import Experts, ModelConfig

AUTO = "auto"


@dataclass(frozen=True)
class CpuExperts:
    """The experts that stay in the computer's memory."""

    layers: int  # the first ones of the model
    bytes: int  # in the computer's memory
    saved: int  # bytes on the GPU that they would take
    of_token: int  # bytes of those that a token chooses

    def __str__(self) -> str:
        return f"experts of the first {self.layers} layers in the computer's memory: {format_bytes(self.bytes)}"


def asked_cpu_experts(
    config: EngineConfig,
    ops: Ops,
    source: model_loaders.Model,
    shape: CacheShape,
    more: Callable[[int], int],
    say: Callable[[str], None],
) -> CpuExperts | None:
    """Return `cpu_experts` for a model; say why cpu_moe has no effect.

    Raises EngineError if the CPU has no compiled kernels.
    """
    if config.cpu_moe is None:
        return None
    if ops.backend != "cuda":
        say("cpu_moe has no effect on a CPU: all experts are in its memory.")
        return None
    if not has_experts(source.config):
        say("cpu_moe has no effect on this model: it has no experts.")
        return None
    if ops.host is None:
        raise EngineError(
            "cpu_moe needs the compiled kernels of the CPU, which do not work here: leave it out, and choose a smaller "
            "model if the GPU has not enough memory",
            settings=("cpu_moe",),
        )
    of = sizes(ops, source.config, source.weights, weight_format(config))
    return cpu_experts(config, ops, source.config, shape, of, more)


def cpu_experts(
    config: EngineConfig,
    ops: Ops,
    model: ModelConfig,
    shape: CacheShape,
    of: Sizes,
    more: Callable[[int], int] = lambda tokens: 0,
) -> CpuExperts | None:
    """Return which experts stay in the computer's memory, as cpu_moe says; None for none.

    more: as in `store_plan`. Raises EngineError if they do not fit into the computer's memory.
    """
    saved, held = [0, *accumulate(of.of_layers)], [0, *accumulate(of.on_host)]

    def fit(layers: int) -> bool:
        """Whether the rest fits on the GPU, with a KV store for the context, or for 16,384 tokens of it."""
        context = config.ctx_size or min(model.max_context, CONTEXT_TO_CHOOSE_BY)
        try:
            room = ops.room_beside(of.weights - saved[layers])
            plan = store_plan(replace(config, ctx_size=context), ops, model, shape, room, more)
        except EngineError:
            return False
        needed = plan.bytes + work_bytes(config, ops, model, shape)(plan.tokens) + more(plan.tokens)
        return needed <= room and (config.kv_memory is not None or plan.tokens >= context)

    assert config.cpu_moe is not None
    every = len(model.layers)
    if config.cpu_moe == AUTO:
        layers = min(every, bisect_left(range(every + 1), True, key=fit))
    else:
        layers = min(every, int(config.cpu_moe))
    if not held[layers]:
        return None
    assert ops.host is not None
    ops.host.room_beside(held[layers])
    mixtures = [layer.ffn for layer in model.layers[:layers]]
    chosen = (
        size * ffn.top_k // ffn.count
        for size, ffn in zip(of.on_host, mixtures, strict=False)
        if isinstance(ffn, Experts)
    )
    return CpuExperts(layers, held[layers], saved[layers], sum(chosen))
