"""The error of each layer's attention output, when every layer is given the reference's input.

A `Recorder` taps the model in full precision. A `Replay` taps the model with a quantized cache: it replaces the input
of every layer by the recorded one and compares the attention output before the output projection. So a layer's figure
does not include errors of earlier layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.engine import Engine
from polarlm.engine.backends.ops import Array
from polarlm.engine.model.forward import Transformer


@dataclass(frozen=True)
class Recording:
    """Each layer's arrays in full precision, float32 on the host: for L layers 4·L·T·(E + H·D + K·D) bytes."""

    inputs: list[np.ndarray]  # (T, E)
    keys: list[np.ndarray]  # (T, K, D), after RoPE
    outputs: list[np.ndarray]  # (T, H·D), before the output projection


class _Watch(ABC):
    """Taps of a model, installed while it scores ids."""

    def install(self, model: Transformer) -> None:
        """Set the model that `run` taps."""
        self.model = model

    def run(self, engine: Engine, ids: Sequence[int], every_token_coded: bool = False) -> None:
        """Score `ids` with the taps installed."""
        self.model.taps = self
        try:
            engine.score(ids, every_token_coded)
        finally:
            self.model.taps = None

    @abstractmethod
    def __call__(self, name: str, layer: int, position: int, x: Array) -> None:
        """See `engine.model.prefill.Taps`."""


class Recorder(_Watch):
    """Records arrays of a model whose cache has full precision and no rotation."""

    def record(self, engine: Engine, ids: Sequence[int]) -> Recording:
        """The arrays of one pass over `ids` (T,)."""
        config = self.model.config
        widths = {
            "input": (config.hidden_size,),
            "keys": (config.attention.kv_heads, config.attention.head_dim),
            "attention": (config.attention.heads * config.attention.head_dim,),
        }
        self._seen = {
            name: [np.empty((len(ids), *width), np.float32) for _ in range(len(config.layers))]
            for name, width in widths.items()
        }
        self.run(engine, ids)
        seen, self._seen = self._seen, {}
        return Recording(seen["input"], seen["keys"], seen["attention"])

    def __call__(self, name: str, layer: int, position: int, x: Array) -> None:
        if name not in self._seen:
            return
        rows = self.model.ops.to_host(x)
        scales = self.model.store.conditioning[layer].scales(self.model.config.attention.heads)
        if name == "keys" and scales is not None:
            heads = self.model.config.attention.heads
            rows = rows / scales[heads : heads + rows.shape[1]]
        self._seen[name][layer][position : position + len(x)] = rows


class Replay(_Watch):
    """Compares a model with any cache to a recording of the same weights and ids."""

    def errors(
        self, engine: Engine, ids: Sequence[int], recording: Recording, every_token_coded: bool = False
    ) -> list[float]:
        """‖o − ô‖ / ‖o‖ over all rows, for each layer."""
        self._recording = recording
        # Sums of squares are kept for each row, since several threads may write rows.
        self._error, self._norm = np.zeros((2, len(recording.inputs), len(ids)))
        self.run(engine, ids, every_token_coded)
        error, norm = self._error.sum(1), self._norm.sum(1)
        # A layer whose attention output is 0 has the error 0.
        return np.sqrt(error / np.where(norm > 0, norm, 1)).tolist()

    def __call__(self, name: str, layer: int, position: int, x: Array) -> None:
        rows = slice(position, position + len(x))
        if name == "input":
            x[...] = self.model.ops.to_device(self._recording.inputs[layer][rows])
        elif name == "attention":
            expected = self._recording.outputs[layer][rows].astype(np.float64)
            self._error[layer, rows] = np.square(self.model.ops.to_host(x) - expected).sum(1)
            self._norm[layer, rows] = np.square(expected).sum(1)
