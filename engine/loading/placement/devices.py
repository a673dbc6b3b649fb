"""How the layers of a model are shared among several GPUs, and what their memory leaves for the KV store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import multi_device_ops, ops_per_device
from polarlm.engine.config import AUTO, EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.placement.request import LayerSizes, PlacementRequest, no_bytes
from polarlm.engine.state.plan import StorePlan, common_plan, plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.model_loaders.config import ModelConfig


@dataclass(frozen=True)
class Share:
    """The part of a model that a GPU has."""

    device: Ops
    layers: range
    weights: int  # bytes

    def __str__(self) -> str:
        first, last = self.layers[0], self.layers[-1]
        return (
            f"layers {first} to {last} on {self.device.name}"
            if last > first
            else f"layer {first} on {self.device.name}"
        )


@dataclass(frozen=True)
class ShareFit:
    name: str
    free: int  # bytes of its memory before the model is loaded
    layers: tuple[int, int]  # the first one and the last one
    weights: int  # bytes, as all that follows
    store: int
    work: int  # on a prompt of the longest context
    left: int  # less than 0 if there is too little


@dataclass(frozen=True)
class Split:
    """A model whose layers are shared among several devices. ops: the ops of all devices together."""

    ops: Ops
    shares: Sequence[Share]

    def __str__(self) -> str:
        return ", ".join(map(str, self.shares))

    @property
    def weights(self) -> int:
        return sum(share.weights for share in self.shares)

    def without_weights(self) -> Split:
        """Return the same for GPUs that have the weights already."""
        return replace(self, shares=[replace(share, weights=0) for share in self.shares])

    def rooms(self) -> list[int]:
        """Return the bytes that remain on each GPU beside the weights. Raises EngineError if these do not fit."""
        return [share.device.memory_left(share.weights) for share in self.shares]

    def plan(self, request: PlacementRequest, shape: CacheShape) -> StorePlan:
        """Return the plan of a KV store that fits on every GPU, with `request.other_bytes` left on the last one. Raises
        EngineError ("out_of_memory"), which names the GPU that is full."""
        rooms = self.rooms()
        if request.config.kv_memory is not None:  # it is for all devices together
            return request.plan(self.ops, shape, sum(rooms))
        plans = []
        for share, room in zip(self.shares, rooms, strict=True):
            part = request if share is self.shares[-1] else replace(request, other_bytes=no_bytes)
            try:
                plans.append(part.plan(share.device, _shape_of(shape, share.layers), room))
            except EngineError as error:
                error.args = (f"{share}: {error}",)
                raise
        return common_plan(shape, plans)

    def devices(self, request: PlacementRequest, plan: StorePlan) -> tuple[ShareFit, ...]:
        """Return what every GPU has, with a store of `plan`."""
        fits = []
        for share in self.shares:
            room = share.device.memory_left(0) - share.weights
            store = plan.layer_bytes(share.layers)
            work = request.work(share.device, plan.shape, plan.tokens)
            ends = share.layers[0], share.layers[-1]
            free, name = share.device.free_memory(), share.device.name
            fits.append(ShareFit(name, free, ends, share.weights, store, work, room - store - work))
        return tuple(fits)


def split_model(request: PlacementRequest, ops: Ops, shape: CacheShape, say: Callable[[str], None]) -> Split | None:
    """Return how the layers are shared among the GPUs that `device` names, or else among all, if there is a
    `tensor_split` or the model does not fit on one: as `tensor_split` says, or so that the fullest has the most memory
    left. None if one device has them all. Raises EngineError for shares that do not suit the GPUs or the model."""
    config = request.config
    if ops.backend != "cuda":
        if config.tensor_split is not None:
            say("tensor_split has no effect on a CPU.")
        return None
    if request.layer_sizes is None:
        return None
    is_requested = len(ops_per_device(ops, with_others=False)) > 1 or config.tensor_split is not None
    whole = replace(request, reserved_bytes=0, memory_limit=None)
    if not is_requested and whole.fits(ops, shape, request.sizes.weights, request.context):
        return None
    devices = ops_per_device(ops, with_others=True)
    if config.tensor_split not in (None, AUTO) and len(devices) != len(shares := split_shares(config)):
        raise _wrong(config, f"there are {len(shares)} shares for {_count(devices)}")
    if len(devices) == 1:
        return None
    if (what := _why_one_gpu(config, request.model)) is not None:
        if not is_requested:
            return None  # the GPU says what it lacks
        raise _wrong(config, f"{what} on one GPU alone: name one, as in device=cuda:0, and leave tensor_split out")
    if len(devices) > (layers := len(shape.kv_layers)):
        raise _wrong(config, f"the model has {layers} layers with attention for {_count(devices)}: name fewer GPUs")
    split = _split_layers(request, devices, shape, request.layer_sizes(ops))
    say(f"{'Several GPUs' if is_requested else 'One GPU has too little memory'}: {split}.")
    return split


def _split_layers(request: PlacementRequest, devices: Sequence[Ops], shape: CacheShape, sizes: LayerSizes) -> Split:
    """Return the split among these devices. Raises EngineError for shares that leave one without attention."""
    if request.config.tensor_split in (None, AUTO):
        counts = _layers_by_memory(request, devices, shape, sizes)
    else:
        counts = _layers_by_shares(request.config, shape)
    ranges = [range(end - count, end) for count, end in zip(counts, itertools.accumulate(counts), strict=True)]
    shares = [Share(device, layers, sizes.total(layers)) for device, layers in zip(devices, ranges, strict=True)]
    return Split(multi_device_ops(devices, counts), shares)


def split_shares(config: EngineConfig) -> list[float]:
    """Return the numbers of tensor_split. Raises EngineError."""
    try:
        shares = [float(share) for share in str(config.tensor_split).split(",")]
    except ValueError:
        shares = []
    if not shares or not all(np.isfinite(share) and share > 0 for share in shares):
        raise _wrong(config, "give a number above 0 for each GPU, as in 3,1, or auto")
    return shares


def _layers_by_shares(config: EngineConfig, shape: CacheShape) -> list[int]:
    """Return the number of layers of each GPU. Raises EngineError if one gets none, or none with attention."""
    layers = len(shape.layers)
    shares = np.array(split_shares(config))
    ends = np.rint(layers * np.cumsum(shares) / shares.sum()).astype(int)
    counts = np.diff(ends, prepend=0).tolist()
    has_kv = np.isin(np.arange(layers), [*shape.kv_layers])
    for number, own_layers in enumerate(np.split(has_kv, ends[:-1])):
        if not own_layers.any():
            what = "of the layers with attention" if len(own_layers) else f"of the {layers} layers"
            raise _wrong(config, f"GPU number {number} would get none {what}: give it a larger share")
    return counts


def _layers_by_memory(
    request: PlacementRequest, devices: Sequence[Ops], shape: CacheShape, sizes: LayerSizes
) -> list[int]:
    """Return the number of layers of each GPU, such that the largest part of a GPU's memory that weights and the KV
    store of the requested context take is smallest."""
    config, tokens, count = request.config, request.context, len(request.model.layers)
    plan = plan_for_tokens(shape, tokens, config.kept_sequences + config.parallel, running=config.parallel)
    needed = np.cumsum([0, *(size + plan.layer_bytes((layer,)) for layer, size in enumerate(sizes.layers))])
    attentions = np.cumsum([0, *(layer in shape.kv_layers for layer in range(count))])
    # best[n]: the least of the largest parts, if the devices until now have the first n layers.
    best, cuts = np.full(count + 1, np.inf), []
    best[0] = 0.0
    for number, device in enumerate(devices):
        room = max(1, device.memory_left(0) - request.work(device, shape, tokens))
        extra = sizes.adapters + sizes.embedding * (number == 0) + sizes.head * (number == len(devices) - 1)
        parts = np.maximum(best[None, :], (needed[:, None] - needed[None, :] + extra) / room)
        parts[attentions[:, None] <= attentions[None, :]] = np.inf  # every GPU has a layer with attention
        cuts.append(parts.argmin(axis=1))
        best = parts.min(axis=1)
    ends = [count]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return np.diff(ends[::-1]).tolist()


def _why_one_gpu(config: EngineConfig, model: ModelConfig) -> str | None:
    """Return the beginning of a sentence about what runs on one GPU alone."""
    if config.cpu_moe is not None:
        return "Experts in the computer's memory (cpu_moe) run"
    if model.layer_embedding:
        return "Models with embeddings of layers run"
    if any(mixer.shares_kv for mixer in model.attentions.values()):
        return "Models whose layers share keys and values run"
    return None


def _shape_of(shape: CacheShape, layers: range) -> CacheShape:
    stored = {layer - layers.start: shape.stored[layer] for layer in layers if layer in shape.stored}
    return replace(shape, layers=shape.layers[layers.start : layers.stop], stored=stored)


def _count(devices: Sequence[Ops]) -> str:
    return f"{len(devices)} GPU{'s' * (len(devices) > 1)} ({', '.join(device.name for device in devices)})"


def _wrong(config: EngineConfig, why: str) -> EngineError:
    setting = "device" if config.tensor_split is None else "tensor_split"
    return EngineError(f"{setting}={getattr(config, setting)}: {why}", settings=(setting,))
