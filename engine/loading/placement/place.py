"""Where a model goes, as one value: loading executes it, `polarlm fit` prints many, a server of models adds them up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from polarlm.engine.backends.ops import Ops
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.encoding import Encoding
from polarlm.engine.loading.placement.devices import ShareFit, Split, split_model
from polarlm.engine.loading.placement.experts import CpuExperts, ExpertPlan, cpu_experts, expert_plan
from polarlm.engine.loading.placement.request import PlacementRequest, no_bytes
from polarlm.engine.state.plan import StorePlan, plan_for_tokens
from polarlm.engine.state.shapes import CacheShape


@dataclass(frozen=True)
class Placement:
    """Where a model's weights go, and the KV store that fits beside them; or what is lacking for that."""

    request: PlacementRequest
    ops: Ops  # the device's, or all GPUs together
    shape: CacheShape
    weights: int  # bytes in the device's memory
    room: int = 0  # bytes beside them for the KV store and activations; 0 if the weights alone do not fit
    plan: StorePlan | None = None  # the KV store's; None if there is too little room
    split: Split | None = None  # if several GPUs share the layers
    on_host: CpuExperts | None = None  # experts in the memory of a GPU's host
    experts: ExpertPlan | None = None  # if not all experts are in memory at a time
    error: EngineError | None = None  # says what is lacking, if there is no plan

    @property
    def lacking(self) -> int:
        """Bytes by which the weights alone are too large; 0 if they fit."""
        return 0 if self.error is None else self.error.numbers.get("lacking", 0)

    @property
    def store_plan(self) -> StorePlan:
        """The plan of the KV store. Raises EngineError ("out_of_memory") if there is too little memory."""
        if self.plan is None:
            assert self.error is not None
            raise self.error
        return self.plan

    @property
    def is_met(self) -> bool:
        """Whether the KV store has what was asked for."""
        return self.plan is not None and self.request.is_met(self.ops, self.plan, self.weights, self.room)

    def store(self, config: EngineConfig) -> StorePlan:
        """Return the plan of another KV store beside the same weights, of the same types. Raises EngineError."""
        if self.room == 0 and self.error is not None:
            raise self.error
        request = replace(self.request, config=config)
        if self.split is not None:
            return self.split.plan(request, self.shape)
        return request.plan(self.ops, self.shape, self.room)

    def lacks(self, tokens: int, parallel: int) -> int:
        """Return the bytes that are lacking for a store of `tokens`, and for the work on a prompt of as many, with this
        many requests at a time."""
        request = self.request.with_settings(parallel=parallel)
        plan = plan_for_tokens(self.shape, tokens, parallel + request.config.kept_sequences, running=parallel)
        if self.split is not None:
            return sum(max(0, -device.left) for device in self.split.devices(request, plan))
        return self.lacking + plan.bytes + request.work(self.ops, self.shape, tokens) - self.room

    def devices(self) -> tuple[ShareFit, ...]:
        """Return what each of several GPUs has; nothing of one device."""
        return () if self.split is None or self.plan is None else self.split.devices(self.request, self.plan)

    def after_loading(self, config: EngineConfig, encoding: Encoding) -> Placement:
        """Return the placement of the same weights, which are there already, with a KV store for other settings. Raises
        EngineError."""
        request = replace(self.request, config=config, encoding=encoding, other_bytes=no_bytes)
        split, shape = None if self.split is None else self.split.without_weights(), request.shape(self.ops)
        placement = replace(self, request=request, shape=shape, room=self.ops.memory_left(0), split=split, error=None)
        return replace(placement, plan=placement.store(config))


def place(request: PlacementRequest, ops: Ops, say: Callable[[str], None] = lambda sentence: None) -> Placement:
    """Return where a model goes on a device, and beside other GPUs where one is too small.

    say: is called with sentences such as which settings have no effect. Raises EngineError for settings that do not
    suit the model or the device; of too little memory the placement tells.
    """
    shape = request.shape(ops)
    placement = Placement(request, ops, shape, request.sizes.weights)
    try:
        if (split := split_model(request, ops, shape, say)) is not None:
            placement = replace(placement, ops=split.ops, weights=split.weights, split=split)
        if (on_host := cpu_experts(request, placement.ops, shape, say)) is not None:
            placement = replace(placement, on_host=on_host, weights=placement.weights - on_host.saved)
        if (experts := expert_plan(request, placement.ops, shape, say)) is not None:
            placement = replace(
                placement, experts=experts, weights=placement.weights - experts.saved, room=experts.room
            )
        elif split is not None:
            placement = replace(placement, room=sum(split.rooms()))
        else:
            placement = replace(placement, room=request.room(placement.ops, placement.weights))
        return replace(placement, plan=placement.store(request.config))
    except EngineError as error:
        if error.code != "out_of_memory":
            raise
        return replace(placement, error=error)
