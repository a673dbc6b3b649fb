"""Tiles under test: random fields, and what kernels score and mix with one tile after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polarlm.engine.backends.native.codecs import KeyTiles, ValueTiles, keys, values
from polarlm.engine.backends.native.kernels.attention.prompts import DecodeArguments
from polarlm.engine.codecs import Codec
from polarlm.engine.jit.compile.target import levels
from polarlm.engine.jit.lang import F32, Emitter, Kernel, Level, Value, Values, vector
from polarlm.engine.jit.run.workers import aligned_bytes
from tests.codecs.data import random_fields
from tests.jit.levels import declared, run

# (head dim, block size, queries that read a block together)
SIZES = ((64, 64, 3), (48, 16, 2), (128, 64, 4), (80, 64, 1), (8, 128, 4), (96, 16, 3), (16, 64, 1), (256, 64, 2))


def sizes(codec: int, level: Level) -> tuple[int, int, int]:
    """One of the sizes: all of them appear among six levels and a few codecs, and kernels take long to compile."""
    return SIZES[(codec + levels().index(level)) % len(SIZES)]


def scored(
    codec: Codec, level: Level, n: int, d: int, heads: int
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The fields of three random blocks, random queries (H, D), and the scores by a level's kernel (3, H, N)."""
    rng = np.random.default_rng(1)
    fields, key_tiles = random_fields(rng, codec.fields(n, d), (3,)), keys(codec, n, d)
    assert key_tiles is not None
    queries = rng.standard_normal((heads, d)).astype(np.float32)
    return fields, queries, scores(key_tiles, level, key_tiles.pack(fields), queries, n)


def mix_of_random_blocks(
    codec: Codec, level: Level, n: int, d: int, heads: int
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The fields of three random blocks, weights (3, H, N), which are zeros for one head and block, and 7 plus the sums
    by a level's kernel (H, D)."""
    rng = np.random.default_rng(2)
    fields, value_tiles = random_fields(rng, codec.fields(n, d), (3,)), values(codec, n, d)
    assert value_tiles is not None
    weights = np.exp(2 * rng.standard_normal((3, heads, n))).astype(np.float32)
    weights[1, 0] = 0
    return fields, weights, mixed(value_tiles, level, value_tiles.pack(fields), weights, d)


def in_memory(x: np.ndarray) -> np.ndarray:
    """The same bytes at an aligned address."""
    memory = aligned_bytes(x.nbytes)
    memory[:] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return memory


class Expanding:
    """Tiles that are expanded before they are read."""

    def __init__(self, tiles: KeyTiles | ValueTiles, side: Any) -> None:
        self.name, self._tiles, self._side = f"{tiles.name}_expanded", tiles, side

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tiles, name)

    def emit_scores(self, e: Emitter, block: Value, next_tile: Value, queries: Values, out: Values) -> None:
        self._side.emit_scores(e, self._expand(e, block, next_tile), queries, out, None)

    def emit_values(self, e: Emitter, block: Value, next_tile: Value, weights: Values, sums: Values) -> None:
        self._side.emit_values(e, self._expand(e, block, next_tile), weights, sums)

    def _expand(self, e: Emitter, block: Value, next_tile: Value) -> Value:
        place = e.stack(self._side.nbytes)
        self._side.emit(e, block, next_tile, place)
        return place


def prepared(tiles: KeyTiles, level: Level, queries: np.ndarray) -> np.ndarray:
    """queries (H, D) → uint8 (H, query_bytes)."""
    padded = np.zeros((len(queries), -(-queries.shape[1] // 16) * 16), np.float32)
    padded[:, : queries.shape[1]] = queries

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as head:
            tiles.emit_query(e, args.q + head * padded.strides[0], args.out + head * tiles.query_bytes)

    out = aligned_bytes(len(queries) * tiles.query_bytes)
    run(Kernel(f"query_{tiles.name}", emit, declared("q out")), level, len(queries), (in_memory(padded), out))
    return out.reshape(len(queries), -1)


def decoded(
    memory: Sequence[np.ndarray],
    ids: np.ndarray,
    out: np.ndarray,
    mean: np.ndarray | None = None,
    mean_scale: np.ndarray | None = None,
) -> DecodeArguments:
    """Tiles of keys and of values (K, blocks, nbytes), whose blocks `ids` are decoded to out (2, K, B, N, D)."""
    (keys, values), (k, v) = memory, out
    return DecodeArguments(
        keys=keys,
        values=values,
        mean=mean,
        mean_scale=mean_scale,
        ids=ids,
        k=k,
        v=v,
        blocks=keys.shape[1],
        count=len(ids),
    )


def scores(tiles: KeyTiles, level: Level, packed: np.ndarray, queries: np.ndarray, n: int) -> np.ndarray:
    """packed (blocks, nbytes), queries (H, D) → (blocks, H, N) float32."""
    out = aligned_bytes(4 * len(packed) * len(queries) * n)
    kernel = scores_kernel(tiles, n, len(queries))
    run(kernel, level, len(packed), (in_memory(packed), prepared(tiles, level, queries), out))
    return out.view(np.float32).reshape(len(packed), len(queries), n)


def mixed(tiles: ValueTiles, level: Level, packed: np.ndarray, weights: np.ndarray, d: int) -> np.ndarray:
    """packed (blocks, nbytes), weights (blocks, H, N) → 7 plus the sums, (H, D) float32."""
    heads, n = weights.shape[1:]
    sums = aligned_bytes(heads * 4 * -(-d // 16) * 16)
    sums.view(np.float32)[:] = 7
    kernel = mix_kernel(tiles, n, d, heads)
    run(kernel, level, len(packed), (in_memory(packed), in_memory(weights.astype(np.float32)), sums))
    return sums.view(np.float32).reshape(heads, -1)[:, :d]


def scores_kernel(tiles: KeyTiles, n: int, heads: int) -> Kernel:
    """Scores of all heads with one tile after another: float32 (blocks, H, N)."""

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as block:
            queries = [args.queries + head * tiles.query_bytes for head in range(heads)]
            targets = [args.out + (block * heads + head) * (4 * n) for head in range(heads)]
            at = args.blocks + block * tiles.nbytes
            tiles.emit_scores(e, at, at, queries, targets)

    return Kernel(f"scores_{tiles.name}_{heads}", emit, declared("blocks queries out"))


def mix_kernel(tiles: ValueTiles, n: int, d: int, heads: int) -> Kernel:
    """The sums of all blocks; weights (blocks, H, N) float32, sums (H, D rounded up to 16)."""

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as block:
            weights = [scratch + head * (4 * n) for head in range(heads)]
            for head, target in enumerate(weights):
                for first in range(0, 4 * n, 64):
                    weight = e.load(args.weights + (block * heads + head) * (4 * n), vector(F32, 16), first)
                    e.store(weight, target, first)
            targets = [args.sums + head * (4 * -(-d // 16) * 16) for head in range(heads)]
            at = args.blocks + block * tiles.nbytes
            tiles.emit_values(e, at, at, weights, targets)

    return Kernel(f"mix_{tiles.name}_{heads}", emit, declared("blocks weights sums"))
