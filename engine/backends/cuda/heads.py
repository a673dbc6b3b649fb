"""What becomes of the vectors of heads between the products of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.backends.cuda.cache import Layouts
from engine.backends.cuda.device import Array, Device
from engine.backends.cuda.launch import WARP, LaunchConfig, Launcher, threads_for
from engine.backends.cuda.rotation import NO_TURN, DeviceTransform, OnDevice, prepare
from engine.backends.ops import HeadTransform

_WARPS = 4  # of a block, a vector each
_VECTORS = 4  # of a block that multiplies by a matrix

Rope = tuple[Array, Array]  # cos and sin
Norms = tuple[Array, Array, float] | None  # weights for queries and for keys, eps


class HeadOps:
    """The op `transform_heads`, and rotations."""

    def __init__(self, device: Device, launch: Launcher):
        self._device, self._launch = device, launch

    def prepare(self, transforms: Sequence[HeadTransform]) -> list[DeviceTransform]:
        return prepare(self._device, transforms)

    def transform_heads(
        self, qkv: Array, rope: Rope, transform: DeviceTransform, norms: Norms = None
    ) -> tuple[Array, Array, Array]:
        rows, heads, dim = qkv.shape
        of_values = rows * transform.kv_heads
        of_queries = rows * heads - 2 * of_values
        # Keys lie behind queries, so that both are turned in one go where a launch of its own does it.
        qk = self._device.empty((of_queries + of_values, dim), np.float32)
        changed = transform.values is not NO_TURN or transform.scale is not None
        v = self._device.empty((of_values, dim), np.float32) if changed else None
        outputs = qk[:of_queries], qk[of_queries:], v
        vectors = len(qk) if v is None else len(qk) + of_values
        self.launch("transform_heads", outputs, qkv, rope, transform, norms, vectors)
        qk = self.dense(qk, transform.keys)
        q, k = qk[:of_queries].reshape(rows, -1, dim), qk[of_queries:].reshape(rows, -1, dim)
        if v is None:
            return q, k, qkv[:, heads - transform.kv_heads :]
        return q, k, self.dense(v, transform.values).reshape(rows, -1, dim)

    def launch(
        self,
        kernel: str,
        outputs: tuple[Array | None, ...],
        qkv: Array,
        rope: Rope,
        transform: DeviceTransform,
        norms: Norms,
        vectors: int,
        *spans: Any,
        layouts: Layouts | tuple[None, None] = (None, None),
        rows: int | None = None,
    ) -> None:
        """Launch a kernel that joins `cuda/heads/heads.cuh`; without dense rotations. rows: its STEP_ROWS, if any."""
        keys, values = transform.keys, transform.values
        q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
        defines: dict[str, int | str] = {
            "HEAD_DIM": qkv.shape[2],
            "HEAD_NORMS": int(norms is not None),
            "KEY_ORDER": max(1, keys.order),
            "VALUE_ORDER": max(1, values.order),
            **({} if rows is None else {"STEP_ROWS": rows}),
        }
        signs = keys.before, keys.behind, values.before, values.behind
        counts = vectors, qkv.shape[1] - 2 * transform.kv_heads, transform.kv_heads
        self._launch(
            kernel,
            (-(-vectors // _WARPS),),
            LaunchConfig(defines, WARP * _WARPS),
            *(*outputs, qkv, *rope, q_norm, k_norm, transform.scale, *signs, *spans, *counts, float(eps)),
            layouts=layouts,
        )

    def rotate(self, x: Array, turn: OnDevice) -> Array:
        """x (..., D) @ the rotation."""
        if turn.matrix is not None or turn.order == 1:
            return self.dense(x, turn)
        dim, vectors, y = x.shape[-1], x.size // x.shape[-1], self._device.empty(x.shape, np.float32)
        shape = LaunchConfig(rotate_defines(dim, turn.order), WARP * _WARPS)
        self._launch("rotate", (-(-vectors // _WARPS),), shape, y, x, turn.before, turn.behind, vectors)
        return y

    def dense(self, x: Array, turn: OnDevice) -> Array:
        """x (..., D) @ the rotation if that is a matrix, else x itself."""
        if turn.matrix is None:
            return x
        dim, vectors, y = x.shape[-1], x.size // x.shape[-1], self._device.empty(x.shape, np.float32)
        shape = LaunchConfig(rotate_defines(dim, 1), threads_for(dim))
        self._launch("rotate_dense", (-(-vectors // _VECTORS),), shape, y, x, turn.matrix, vectors, file="rotate")
        return y


def rotate_defines(head_dim: int, order: int) -> dict[str, int | str]:
    return {"ACT": "float", "D": head_dim, "ORDER": order, "VECTORS": _VECTORS}
