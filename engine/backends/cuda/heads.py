"""QK-norm, RoPE, scale and rotation of heads on a GPU, by the kernels in `cuda/heads/`.

A rotation that is a signed Hadamard matrix is stored as its signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.backends.cuda.device import Array, Device, row_stride
from polarlm.engine.backends.cuda.launch import WARP, DeviceOps, LaunchConfig, threads_for
from polarlm.engine.backends.hadamard import hadamard_signs, with_rotations
from polarlm.engine.backends.kv import HeadRule, HeadTransform, Rope
from polarlm.engine.records import Layouts

_WARPS = 4  # warps per block; a warp has one vector
_VECTORS = 4  # vectors per block of rotate_dense


class DeviceRotation(NamedTuple):
    """A rotation on the device: `matrix` (D, D) float32 with order 0, or the signs (D,) of a Hadamard matrix."""

    order: int
    matrix: Array | None
    input_signs: Array | None
    output_signs: Array | None


NO_ROTATION = DeviceRotation(1, None, None, None)  # a Hadamard matrix of order 1, without signs


class DeviceTransform(NamedTuple):
    """A `HeadTransform` on the device. inverse: of the rotation `values`."""

    kv_heads: int
    scale: Array | None
    keys: DeviceRotation
    values: DeviceRotation
    inverse: DeviceRotation
    scale_back: Array | None
    value_eps: float | None
    sides: int  # 1 if values are keys, else 2


def prepare(device: Device, transforms: Sequence[HeadTransform]) -> list[DeviceTransform]:
    """`transforms` on the device. A rotation array that several share is uploaded once."""

    def rotation(matrix: np.ndarray) -> DeviceRotation:
        signs = hadamard_signs(matrix)
        if signs is None:
            return DeviceRotation(0, array(matrix), None, None)
        return DeviceRotation(
            signs.order, None, device.from_host(signs.input_signs), device.from_host(signs.output_signs)
        )

    def array(x: np.ndarray | None) -> Array | None:
        return None if x is None else device.from_host(np.ascontiguousarray(x, np.float32))

    return [
        DeviceTransform(
            *(one.kv_heads, array(one.scale), keys, values, inverse),
            *(array(one.scale_back), one.value_eps, 1 if one.values_are_keys else 2),
        )
        for one, keys, values, inverse in with_rotations(transforms, rotation, NO_ROTATION)
    ]


class HeadOps(DeviceOps):
    """The op `transform_heads`, rotations, and the parts of latent vectors."""

    def join_latents(self, absorbed: Array, rotated: Array, kv: Array) -> Array:
        (rows, columns), size = kv.shape, rotated.shape[1]
        heads, latent = len(absorbed) // rows, columns - size
        joined = self._device.empty((rows, heads + 1, columns), np.float32)
        args = joined, absorbed, rotated, kv, latent, size, row_stride(rotated)
        self._launch("join_latents", (rows, heads + 1), LaunchConfig({}, threads_for(columns)), *args)
        return joined

    def take_latents(self, x: Array, latent: int) -> Array:
        tokens, heads, columns = x.shape
        out = self._device.empty((tokens * heads, latent), np.float32)
        config = LaunchConfig({}, threads_for(latent))
        self._launch("take_latents", (tokens * heads,), config, out, x, latent, columns)
        return out

    def transform_heads(self, qkv: Array, rope: Rope, rule: HeadRule) -> tuple[Array, Array, Array]:
        transform: DeviceTransform = rule.transform
        rows, heads, dim = qkv.shape
        values = rows * transform.kv_heads
        queries = rows * heads - transform.sides * values
        # Keys follow queries in memory, so that one launch of rotate_dense rotates both.
        qk = self._device.empty((queries + values, dim), np.float32)
        changes_values = (
            transform.values is not NO_ROTATION or transform.scale is not None or transform.value_eps is not None
        )
        changes_values &= values > 0 and transform.sides == 2
        v = self._device.empty((rows, transform.kv_heads, dim), np.float32) if changes_values else None
        outputs = qk[:queries], qk[queries:], v
        vectors = queries + (values if v is None else 2 * values)
        self._launch_heads("transform_heads", outputs, qkv, rope, rule, vectors)
        qk = self.rotate_dense(qk, transform.keys)
        q, k = qk[:queries].reshape(rows, -1, dim), qk[queries:].reshape(rows, -1, dim)
        if transform.sides == 1:
            return q, k, k
        if v is None:
            return q, k, qkv[:, heads - transform.kv_heads :]
        return q, k, self.rotate_dense(v, transform.values)

    def _launch_heads(
        self,
        kernel: str,
        outputs: tuple[Array | None, ...],
        qkv: Array,
        rope: Rope,
        rule: HeadRule,
        vectors: int,
        *spans: Any,
        layouts: Layouts | tuple[None, None] = (None, None),
        rows: int | None = None,
    ) -> None:
        """Launch a kernel that JOINS `cuda/heads/heads.cuh`: it does all of the transform but dense rotations.

        vectors: number of heads in all rows that it transforms. spans: its arguments after the transform's.
        rows: its STEP_ROWS.
        """
        transform: DeviceTransform = rule.transform
        (_, heads, dim), keys, values = qkv.shape, transform.keys, transform.values
        q_norm, k_norm, eps = rule.norms or (None, None, 0.0)
        signs = keys.input_signs, keys.output_signs, values.input_signs, values.output_signs
        counts = vectors, heads - transform.sides * transform.kv_heads, transform.kv_heads
        self._launch(
            kernel,
            (-(-vectors // _WARPS),),
            _heads_config(
                dim, rule.norms is not None, transform.value_eps, keys.order, values.order, rows, transform.sides
            ),
            *(*outputs, qkv, *rope, q_norm, k_norm, transform.scale, *signs, *spans, *counts, float(eps)),
            layouts=layouts,
        )

    def rotate(self, x: Array, rotation: DeviceRotation) -> Array:
        """x (..., D) @ rotation → (..., D) float32: x itself, rotated in place unless the rotation is dense."""
        if rotation.matrix is not None or rotation.order == 1:
            return self.rotate_dense(x, rotation)
        dim = x.shape[-1]
        vectors, config = x.size // dim, rotate_config(dim, rotation.order, WARP * _WARPS)
        self._launch(
            "rotate", (-(-vectors // _WARPS),), config, x, x, rotation.input_signs, rotation.output_signs, vectors
        )
        return x

    def rotate_dense(self, x: Array, rotation: DeviceRotation) -> Array:
        """x (..., D) @ rotation → (..., D) float32 if the rotation is dense, else x itself."""
        if rotation.matrix is None:
            return x
        dim, vectors, y = x.shape[-1], x.size // x.shape[-1], self._device.empty(x.shape, np.float32)
        config = rotate_config(dim, 1, threads_for(dim))
        self._launch("rotate_dense", (-(-vectors // _VECTORS),), config, y, x, rotation.matrix, vectors, file="rotate")
        return y


@cache
def _heads_config(
    dim: int, normed: bool, value_eps: float | None, key_order: int, value_order: int, rows: int | None, sides: int
) -> LaunchConfig:
    """The launch of a kernel that JOINS `cuda/heads/heads.cuh`; see `HeadOps`."""
    defines: dict[str, int | float | None] = {"HEAD_DIM": dim, "HEAD_NORMS": int(normed), "VALUE_EPS": value_eps}
    defines |= {"KEY_ORDER": max(1, key_order), "VALUE_ORDER": max(1, value_order), "STEP_ROWS": rows}
    defines["SIDES"] = 1 if sides == 1 else None
    return LaunchConfig({name: value for name, value in defines.items() if value is not None}, WARP * _WARPS)


@cache
def rotate_config(head_dim: int, order: int, threads: int) -> LaunchConfig:
    """The launch of a kernel of `cuda/heads/rotate.cu`."""
    return LaunchConfig({"D": head_dim, "ORDER": order, "VECTORS": _VECTORS}, threads)
