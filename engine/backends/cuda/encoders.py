"""The ops of encoders on a GPU, by the kernels in `cuda/encoders/`; vision encoders need them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.cuda.device import Array, row_stride
from polarlm.engine.backends.cuda.heads import DeviceTransform, HeadOps
from polarlm.engine.backends.cuda.launch import WARP, LaunchConfig, threads_for
from polarlm.engine.backends.kv import Norms, Rope

_WARPS, _WARP_ROWS = 4, 16


class EncoderOps(HeadOps):
    """See `engine.backends.ops.EncoderOps`."""

    def layer_norm(self, x: Array, norm: tuple[Array, Array, float]) -> None:
        (rows, n), (weight, bias, eps) = x.shape, norm
        config = LaunchConfig({}, threads_for(n))
        self._launch("layer_norm", (rows,), config, x, weight, bias, n, row_stride(x), float(eps))

    def clip(self, x: Array, least: float, most: float) -> None:
        (rows, n), threads = x.shape, threads_for(x.shape[1])
        bounds = float(least), float(most)
        self._launch("clip", (-(-n // threads), rows), LaunchConfig({}, threads), x, n, row_stride(x), *bounds)

    def self_attention(
        self,
        qkv: Array,
        rope: Rope | None,
        transform: DeviceTransform,
        lengths: Sequence[int],
        scale: float,
        window: int | None = None,
        norms: Norms = None,
    ) -> Array:
        kv_heads, tiles = transform.kv_heads, _tiles(lengths)
        q, k, v = qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads : -kv_heads], qkv[:, -kv_heads:]
        if rope is not None:
            q, k, v = self.transform_heads(qkv, rope, transform, norms)
        out, (_, heads, dim) = self._device.empty(q.shape, np.float32), q.shape
        defines = {"HEAD_DIM": dim, "GROUP": heads // kv_heads, "WARPS": _WARPS}
        self._launch(
            "text_attention",
            (len(tiles), heads),
            LaunchConfig(defines, _WARPS * WARP),
            *(out, q, k, v, self._device.from_host(tiles), heads),
            *(*map(row_stride, (q, k, v)), window or 0, float(scale)),
        )
        return out


def _tiles(lengths: Sequence[int]) -> np.ndarray:
    """The tiles (n, 3) int32 of `text_attention.cu`."""
    ends, step = np.cumsum(lengths), _WARPS * _WARP_ROWS
    tiles = [
        (end - length, end, first)
        for end, length in zip(ends.tolist(), lengths, strict=True)
        for first in range(end - length, end, step)
    ]
    return np.array(tiles, np.int32)
