"""Tiles of float32 for the codec f16, in plain code: what attention finds with them is exact but for float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.native.kernels.multiply import pieces
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, Value, vector


@dataclass(frozen=True)
class PlainKeys:
    """(D, N) float32."""

    block_size: int
    head_dim: int

    name = "plain"

    @property
    def nbytes(self) -> int:
        return 4 * self.block_size * self.head_dim

    @property
    def query_bytes(self) -> int:
        return -(-self.head_dim // 16) * 64

    def pack(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        values = np.ascontiguousarray(fields["values"].astype(np.float32).swapaxes(-1, -2))
        return values.view(np.uint8).reshape(*values.shape[:-2], -1)

    def unpack(self, tiles: np.ndarray) -> dict[str, np.ndarray]:
        values = np.ascontiguousarray(tiles).view(np.float32)
        values = values.reshape(*tiles.shape[:-1], self.head_dim, self.block_size)
        return {"values": values.swapaxes(-1, -2).astype(np.float16)}

    def emit_query(self, e: Emitter, q: Value, out: Value) -> None:
        for offset in range(0, self.query_bytes, 64):
            e.store(e.load(q, vector(F32, 16), offset), out, offset)

    def emit_scores(
        self, e: Emitter, block: Value, after: Value, queries: Sequence[Value], out: Sequence[Value]
    ) -> None:
        for query, scores in zip(queries, out, strict=True):
            with e.loop(0, 4 * self.block_size, 64) as token:
                total = e.variable(e.zero(vector(F32, 16)))
                with e.loop(0, self.head_dim) as channel:
                    own = e.load(block + channel * (4 * self.block_size) + token, vector(F32, 16))
                    total.set(e.fma(own, e.load(query + channel * 4, F32), total.get()))
                e.store(total.get(), scores + token)


@dataclass(frozen=True)
class PlainValues:
    """(N, D) float32."""

    block_size: int
    head_dim: int

    name = "plain"

    @property
    def nbytes(self) -> int:
        return 4 * self.block_size * self.head_dim

    def pack(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        values = np.ascontiguousarray(fields["values"].astype(np.float32))
        return values.view(np.uint8).reshape(*values.shape[:-2], -1)

    def unpack(self, tiles: np.ndarray) -> dict[str, np.ndarray]:
        values = np.ascontiguousarray(tiles).view(np.float32)
        return {"values": values.reshape(*tiles.shape[:-1], self.block_size, self.head_dim).astype(np.float16)}

    def emit_values(
        self, e: Emitter, block: Value, after: Value, weights: Sequence[Value], sums: Sequence[Value]
    ) -> None:
        for weight, mix in zip(weights, sums, strict=True):
            for first, lanes in pieces(self.head_dim):
                total = e.variable(e.load(mix, vector(F32, lanes), 4 * first))
                with e.loop(0, self.block_size) as token:
                    own = e.load(block + token * (4 * self.head_dim), vector(F32, lanes), 4 * first)
                    total.set(e.fma(own, e.load(weight + token * 4, F32), total.get()))
                e.store(total.get(), mix, 4 * first)
