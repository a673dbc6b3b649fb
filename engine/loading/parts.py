"""The parts of an engine, and the line about them for users."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from polarlm import model_loaders
from polarlm.engine import codecs
from polarlm.engine.config import EngineConfig, format_bytes
from polarlm.engine.loading.placement.experts import CpuExperts, ExpertPlan
from polarlm.engine.loading.placement.place import Placement
from polarlm.engine.loading.sizes import weight_format
from polarlm.engine.model.adapters import Adapters
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.weights import describe_formats, format_groups
from polarlm.engine.state import cache_types
from polarlm.engine.state.plan import StorePlan, f16_tokens, reserved_text
from polarlm.engine.storage.tiers.tier_store import TierStore


@dataclass
class Parts:
    """The parts of an engine. source: the model as it was loaded from its files. model: its forward pass."""

    config: EngineConfig
    source: model_loaders.Model
    placement: Placement
    model: Transformer
    adapters: Adapters = field(default_factory=Adapters)
    tiers: Sequence[TierStore] = ()
    draft: Parts | None = None  # the parts of the draft model
    warm_up_timer: threading.Timer | None = None  # warms up for later turns and for several requests

    @property
    def plan(self) -> StorePlan:
        return self.placement.store_plan

    @property
    def experts(self) -> ExpertPlan | CpuExperts | None:
        """Where experts are, if not all are in the device's memory."""
        return self.placement.experts or self.placement.on_host

    @property
    def is_compiled(self) -> bool:
        """Whether all kernels have been compiled that later turns and several requests need."""
        return self.warm_up_timer is None or not self.warm_up_timer.is_alive()

    @property
    def draft_model(self) -> Transformer | None:
        return None if self.draft is None else self.draft.model

    def close(self) -> None:
        """Close the weights' files, drop what is recorded, and begin no warm-up."""
        if self.warm_up_timer is not None:
            self.warm_up_timer.cancel()
        self.model.ops.forget()
        self.source.close()
        if self.draft is not None:
            self.draft.close()


def start_line(parts: Parts) -> str:
    """Return a short line for users: the model, its size, its context, and what its cache saves at full context."""
    plan, shape, model, ops = parts.plan, parts.plan.shape, parts.source, parts.model.ops
    if model.config.is_encoder:
        return fit_line(parts)
    smaller = shape.f16_bytes(plan.tokens) / max(1, shape.sequence_bytes(plan.tokens))
    cache = f"{shape.bits_of_text(plan.tokens):.2f} bits/value, {smaller:.1f}× smaller than f16"
    if smaller <= 1.05:
        cache = cache_types.describe_types(parts.config, shape)
    return " · ".join(
        [
            model.name,
            f"{model.dtype}, {format_bytes(parts.model.weights.bytes)} on the {ops.name}",
            f"context {plan.tokens:,} tokens",
            f"cache {cache}",
        ]
    )


def fit_line(parts: Parts) -> str:
    """Return a line for users: the model, how its weights are kept, the memory of weights and KV store, its context."""
    plan, shape, model, ops = parts.plan, parts.plan.shape, parts.source, parts.model.ops
    types = cache_types.describe_types(parts.config, shape)
    weights = describe_formats(format_groups(ops, model.weights, weight_format(parts.config)))
    name = f"{model.name} ({model.config.family}, {model.config.depth} layers)"
    where = f", {ops.inputs}" if ops.inputs else ""
    if parts.experts is not None:
        where += f" ({parts.experts})"
    if model.config.is_encoder:
        what = f"embedding model: vectors of {model.config.vector_size}, texts of up to {plan.tokens:,} tokens"
        if model.config.scores_pairs:
            what = f"reranker: queries and documents of up to {plan.tokens:,} tokens together"
        return f"{name}: {weights}, {format_bytes(parts.model.weights.bytes)} on the {ops.name}{where}; {what}"
    snapshots = plan.snapshot_bytes if shape.has_host else 0
    snapshot_clause = f" and {format_bytes(snapshots)} of snapshots in the computer's memory" if snapshots else ""
    line = (
        f"{name}: {weights}, {format_bytes(parts.model.weights.bytes)} on the {ops.name}{where}; "
        f"KV store {reserved_text(plan.bytes, shape.sequence_bytes(plan.tokens))}{snapshot_clause}, "
        f"{shape.blocks_of_kv(plan.quantized_blocks)} blocks of {shape.block_size} as {types} "
        f"({shape.bits_of_text(plan.tokens):.2f} bits/value): {plan.capacity:,} tokens fit"
    )
    if plan.recent_slots < (wanted := shape.recent_blocks * parts.config.parallel):
        line += f"; slots for {plan.recent_slots} of {wanted} recent blocks in full precision"
    return line if types == codecs.FULL else f"{line} (with an f16 cache: {f16_tokens(plan):,})"
