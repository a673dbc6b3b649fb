"""How far each layer's attention output is from the exact one, every layer being given its exact input.

A `Recorder` watches the model in full precision; a `Replay` watches it with a quantized cache, puts the recorded input
in front of every layer, and compares what attention gives before the output projection. What earlier layers lost is
no part of a layer's figure then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine import Engine
from engine.backends.ops import Array, Cache, Spans, StoredSpace
from engine.model.forward import Model


@dataclass(frozen=True)
class Recording:
    """What went through each layer in full precision, float32 on the host: for L layers 4·L·T·(E + H·D + K·D) bytes."""

    inputs: list[np.ndarray]  # (T, E)
    keys: list[np.ndarray]  # (T, K, D), after RoPE
    outputs: list[np.ndarray]  # (T, H·D), before the output projection


class _Watch:
    """Ops that pass everything on, and while `active` show what goes into and out of the attention of each layer.

    Layers are told apart by the weights they are called with, so the forward pass needs no hook.
    """

    def __init__(self) -> None:
        self.active = False
        self.layer = 0  # in work
        self.ops: Any = None

    def install(self, model: Model) -> None:
        """Stand between `model` and its ops from now on."""
        self.ops, self.model = model.ops, model
        self._norms = {id(layer.attention_norm): i for i, layer in enumerate(model.weights.layers)}
        self._projections = {id(layer.out): i for i, layer in enumerate(model.weights.layers)}
        watched: Any = self
        model.ops = watched

    def run(self, engine: Engine, ids: Sequence[int], every_token_coded: bool = False) -> None:
        """Score `ids` with the watch on."""
        self.active = True
        try:
            engine.score(ids, every_token_coded)
        finally:
            self.active = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def parts(self, rows: slice) -> list[slice]:
        """Rows in one part: what is watched comes in order of position then."""
        return [rows] if self.active else self.ops.parts(rows)

    def linear(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        *,
        norm: tuple[Array, float] | None = None,
        onto: Array | None = None,
        gated: bool = False,
    ) -> Array:
        begun = None if norm is None else self._norms.get(id(norm[0]))
        if self.active and begun is not None:
            self.layer = begun
            self.on_input(begun, x)
        ended = self._projections.get(id(weight))
        if self.active and ended is not None:
            self.on_output(ended, self.ops.to_host(x))
        return self.ops.linear(x, weight, bias, norm=norm, onto=onto, gated=gated)

    def place_kv(
        self,
        qkv: Array,
        turns: tuple[Array, Array],
        space: StoredSpace,
        cache: Cache,
        spans: Spans,
        norms: tuple[Array, Array, float] | None = None,
    ) -> Array:
        if not self.active:
            return self.ops.place_kv(qkv, turns, space, cache, spans, norms)
        q, k, v = self.ops.condition(qkv, turns, space, norms)
        keys = self.ops.to_host(k)
        self.on_keys(self.layer, keys if space.scale is None else keys / space.scale[q.shape[1] : -space.kv_heads])
        self.ops.append_kv(cache, spans, k, v)
        return q

    def on_input(self, layer: int, x: Array) -> None:
        """Rows (T, E) that `layer` is about to work on; may be changed in place."""

    def on_keys(self, layer: int, k: np.ndarray) -> None:
        """Keys (T, K, D) of those rows, not scaled; as RoPE leaves them where the cache has no rotation."""

    def on_output(self, layer: int, x: np.ndarray) -> None:
        """Attention output (T, H·D) of those rows."""


@dataclass
class _Rows:
    """What has been seen of one layer so far."""

    inputs: list[np.ndarray] = field(default_factory=list)
    keys: list[np.ndarray] = field(default_factory=list)
    outputs: list[np.ndarray] = field(default_factory=list)


class Recorder(_Watch):
    """For a model whose cache is exact and unrotated."""

    def record(self, engine: Engine, ids: Sequence[int]) -> Recording:
        """One pass over `ids` (T,)."""
        self._seen = [_Rows() for _ in self.model.weights.layers]
        self.run(engine, ids)
        seen, self._seen = self._seen, []
        return Recording(
            inputs=[np.concatenate(layer.inputs) for layer in seen],
            keys=[np.concatenate(layer.keys) for layer in seen],
            outputs=[np.concatenate(layer.outputs) for layer in seen],
        )

    def on_input(self, layer: int, x: Array) -> None:
        self._seen[layer].inputs.append(np.array(self.ops.to_host(x)))

    def on_keys(self, layer: int, k: np.ndarray) -> None:
        self._seen[layer].keys.append(np.array(k))

    def on_output(self, layer: int, x: np.ndarray) -> None:
        self._seen[layer].outputs.append(np.array(x))


class Replay(_Watch):
    """For a model with any cache, against a recording of the same weights and ids."""

    def errors(
        self, engine: Engine, ids: Sequence[int], recording: Recording, every_token_coded: bool = False
    ) -> list[float]:
        """‖o − ô‖ / ‖o‖ over all rows, for each layer."""
        self._recording = recording
        layers = len(recording.inputs)
        self._begun, self._ended = [0] * layers, [0] * layers
        self._wrong, self._whole = np.zeros(layers), np.zeros(layers)
        self.run(engine, ids, every_token_coded)
        # A layer whose attention gives nothing has nothing to lose.
        return np.sqrt(self._wrong / np.where(self._whole > 0, self._whole, 1)).tolist()

    def on_input(self, layer: int, x: Array) -> None:
        start = self._begun[layer]
        self._begun[layer] += len(x)
        x[...] = self.ops.to_device(self._recording.inputs[layer][start : start + len(x)])

    def on_output(self, layer: int, x: np.ndarray) -> None:
        start = self._ended[layer]
        self._ended[layer] += len(x)
        exact = self._recording.outputs[layer][start : start + len(x)].astype(np.float64)
        self._wrong[layer] += np.square(x - exact).sum()
        self._whole[layer] += np.square(exact).sum()
