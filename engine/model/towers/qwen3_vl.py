"""The tower of Qwen3-VL, and of Qwen3.5, 3.6 and 3.8; see `model_loaders/towers/qwen3_vl.py`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.model.layers import slot
from polarlm.engine.model.towers import ImageRows, parts
from polarlm.engine.model.towers._qwen import Patches, patches, places
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders.towers import ImageShape
from polarlm.model_loaders.towers.qwen3_vl import DeepTower


@dataclass(frozen=True)
class Weights:
    """Matrices are (out, in)."""

    patches: Linear = slot("patches", "linear")  # (C, values of a patch)
    positions: Matrix = slot("positions", "matrix")  # (side², C)
    norm: Array = slot("merger_norm")  # (C,)
    norm_bias: Array = slot("merger_norm_bias")
    first: Linear = slot("merger_in", "linear")  # (C · merge², C · merge²)
    second: Linear = slot("merger_out", "linear")  # (E, C · merge²)


@dataclass(frozen=True)
class LayerWeights:
    """None in layers after which no rows are made."""

    norm: Array = slot("norm")  # (C,)
    norm_bias: Array = slot("norm_bias")
    qkv: Linear = slot("qkv", "linear")  # (3C, C)
    out: Linear = slot("out", "linear")  # (C, C)
    ffn_norm: Array = slot("ffn_norm")
    ffn_norm_bias: Array = slot("ffn_norm_bias")
    up: Linear = slot("up", "linear")  # (F, C)
    down: Linear = slot("down", "linear")  # (C, F)
    deep_norm: Array | None = slot("deep_norm")  # (C · merge²,)
    deep_norm_bias: Array | None = slot("deep_norm_bias")
    deep_in: Linear | None = slot("deep_in", "linear")  # (C · merge², C · merge²)
    deep_out: Linear | None = slot("deep_out", "linear")  # (E, C · merge²)


class Reader:
    def __init__(self, ops: Ops, tower: DeepTower, weights: Weights, layers: Sequence[LayerWeights], nbytes: int):
        self.tower, self.bytes = tower, nbytes
        self._ops, self._weights, self._layers, self._patches = ops, weights, layers, Patches(ops, tower)
        self._positions = ops.rows(weights.positions)

    def read(self, pixels: np.ndarray, shape: ImageShape) -> Generator[None, None, ImageRows]:
        ops, do, tower, w = self._ops, self._patches, self.tower, self._weights
        where, added = places(tower, shape), []
        x = ops.to_device(self._positions_of(where, shape))
        ops.linear(ops.to_device(patches(tower, pixels, shape)), w.patches, residual=x)
        rope, lengths = do.rope(where), [len(x)]
        for layer in self._layers:
            y = do.normed(x, layer.norm, layer.norm_bias)
            do.attend(x, y, (layer.qkv, layer.out), rope, lengths)
            for part in parts(ops, x):
                y = do.normed(part, layer.ffn_norm, layer.ffn_norm_bias)
                y = ops.linear(y, layer.up, activation="plain_gelu_tanh", then=layer.down)
                ops.linear(y, layer.down, residual=part)
            if layer.deep_in is not None and layer.deep_out is not None:
                y = do.normed(x.reshape(-1, tower.merged), layer.deep_norm, layer.deep_norm_bias)
                added.append((do.merged(y, layer.deep_in), layer.deep_out))
            yield
        merged = do.merged(do.normed(x, w.norm, w.norm_bias), w.first)
        return ImageRows(ops.linear(merged, w.second), tuple(added))

    def _positions_of(self, where: np.ndarray, shape: ImageShape) -> np.ndarray:
        """The positions (P, C) of patches, between the nearest four of the table."""
        (down, right), side = shape.grid, self.tower.side
        rows = _stretched(self._positions.reshape(side, side, -1), down * self.tower.merge)
        return _stretched(rows.swapaxes(0, 1), right * self.tower.merge)[where[1], where[0]]


def _stretched(x: np.ndarray, count: int) -> np.ndarray:
    """x (n, …) → (count, …): the first and the last are the same, the others lie between neighbours."""
    at = np.arange(count, dtype=np.float32) * np.float32((len(x) - 1) / max(1, count - 1))
    before = np.minimum(at.astype(np.int64), len(x) - 1)
    beyond = (at - before)[:, None, None]
    return x[before] * (1 - beyond) + x[np.minimum(before + 1, len(x) - 1)] * beyond
