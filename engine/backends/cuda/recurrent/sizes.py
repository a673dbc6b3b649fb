"""Launch configurations of the kernels of gated delta rules and of Mamba 2, and the memory that they need.

Letters as in `engine.backends.delta`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from polarlm.engine.backends.cuda.launch import WARP, LaunchConfig, threads_for
from polarlm.engine.backends.cuda.launch_configs import SHARED_BYTES, step_rows
from polarlm.engine.backends.delta import DeltaSlots
from polarlm.engine.quantization.snapshot_codes import LARGEST, LEAST
from polarlm.model_loaders.config import Mamba2, Recurrent

_FLOAT = 4
_STEP_THREADS = 512
_SCAN_THREADS = 256
_THREAD_ROWS = 8  # rows of a matrix that a thread of a step holds
_SLICES = (64, 32, 16)  # columns of a matrix of a block of delta_scan
_CHUNKS = (32, 16)  # terms of a product of delta_scan that are copied at a time
_SLOW_BYTES = 100 << 10  # shared memory of GPUs whose tensor cores add float32 at half their speed
_MEMBERS = 8  # heads of a block of mamba2_blocks
_CHANNELS = 128  # channels of queries and keys at a time
_STEP = 4  # between the ends of blocks whose states are kept: see `state.recurrent.delta.ends_to_keep`
_LARGEST_BLOCK = 64  # tokens whose products the threads of a block can share out
PROMPT_ROWS = 1024  # a prompt's rows that are computed at a time: more need more memory


@dataclass(frozen=True)
class DeltaSizes:
    """The sizes that the kernels of gated delta rules are compiled for."""

    name: ClassVar[str] = "gated delta rules"
    reads: ClassVar[bool] = True  # whether updates depend on what keys read

    key_dim: int
    value_dim: int
    block: int
    width: int

    @classmethod
    def from_slots(cls, slots: DeltaSlots) -> DeltaSizes:
        """The sizes of slots, or of one of them."""
        *_, key_dim, block = slots.keys.shape
        return cls(key_dim, slots.updates.shape[-1], block, slots.inputs.shape[-2] - block + 1)

    @property
    def defines(self) -> dict[str, int | float | str]:
        return {"KEY_DIM": self.key_dim, "VALUE_DIM": self.value_dim, "BLOCK": self.block, "WIDTH": self.width}

    def check(self) -> None:
        """Raises ValueError where there are no kernels for these sizes."""
        if self.key_dim % 8 or self.value_dim % 4:
            raise ValueError(
                f"On a GPU the keys of {self.name} have a multiple of 8 numbers and the values one of 4, "
                f"not {self.key_dim} and {self.value_dim}: choose device=cpu"
            )
        if self.block % 8 or self.block > _LARGEST_BLOCK or self.width > self.block:
            raise ValueError(
                f"On a GPU there are no kernels of {self.name} for blocks of {self.block} tokens: choose 64."
            )
        shared = max(self.blocks().shared, self.scan(1, 1, 0).shared, self.step(16).shared)
        if shared > SHARED_BYTES or self.value_dim > 4 * _STEP_THREADS:
            raise ValueError(
                f"On a GPU heads of {self.name} of {self.key_dim} × {self.value_dim} numbers do not fit into shared "
                "memory: choose device=cpu"
            )

    def _matrix_threads(self) -> int:
        """Threads that share out a matrix; each has 4 columns and at most 8 rows, if there are enough."""
        columns = self.value_dim // 4
        return threads_for(max(columns * -(-self.key_dim // _THREAD_ROWS), self.block // 4), _STEP_THREADS)

    def step(self, most_rows: int) -> LaunchConfig:
        """The launch of gated_delta, or of mamba2, for at most `most_rows` rows of a sequence."""
        rows, threads = step_rows(most_rows), self._matrix_threads()
        columns, tokens = self.value_dim // 4, self.block // 4
        groups, key_groups = (min(threads // width, self.key_dim) for width in (columns, tokens))
        products = 1 + self.reads  # a query's, and a key's
        sums = products * max(groups * self.value_dim, key_groups * self.block)
        row_floats = 2 * self.key_dim + 2 * self.value_dim + 1
        shared = _FLOAT * (sums + rows * row_floats + (products + 1) * self.block)
        return LaunchConfig({**self.defines, "MOST_ROWS": rows, "THREADS": threads, "SHARED": shared}, threads, shared)

    def advance(self) -> LaunchConfig:
        threads = self._matrix_threads()
        return LaunchConfig({**self.defines, "THREADS": threads}, threads)

    def blocks(self) -> LaunchConfig:
        threads = threads_for((self.block // 4) ** 2)
        rows = max(2 * (self.key_dim + 4), threads)
        shared = _FLOAT * self.block * (rows + self.block + 3)
        return LaunchConfig({**self.defines, "THREADS": threads, "SHARED": shared}, threads, shared)

    def scan(self, heads: int, processors: int, shared_memory: int) -> LaunchConfig:
        """The launch of delta_scan for `heads` value heads, with wide slices, which read less, if enough
        multiprocessors have one. shared_memory: bytes of a multiprocessor."""
        fitting = [columns for columns in _SLICES if self._scan_shared(columns, _CHUNKS[-1]) <= SHARED_BYTES]
        fitting = [columns for columns in fitting if columns < self.value_dim + 16] or [_SLICES[-1]]
        least = processors * (2 / 5 if shared_memory > _SLOW_BYTES else 7 / 8)
        columns = next((one for one in fitting if heads * -(-self.value_dim // one) >= least), fitting[-1])
        shared = {chunk: self._scan_shared(columns, chunk) for chunk in _CHUNKS}
        chunk = next((chunk for chunk in _CHUNKS if shared[chunk] <= SHARED_BYTES), _CHUNKS[-1])
        shares = {"SLICE": columns, "CHUNK": chunk, "READS": int(self.reads)}
        defines = {**self.defines, **shares, "THREADS": _SCAN_THREADS, "SHARED": shared[chunk]}
        return LaunchConfig(defines, _SCAN_THREADS, shared[chunk])

    def _scan_shared(self, columns: int, chunk: int) -> int:
        """Bytes of shared memory of delta_scan."""
        rows = self.block + max(self.reads * self.block, self.key_dim)
        terms = sum(-(-terms // 16) * 16 + 8 for terms in (self.key_dim, self.block))
        return _FLOAT * (2 * rows * chunk + columns * terms + _SCAN_THREADS // WARP)

    def finish(self) -> LaunchConfig:
        """The launches of delta_results and delta_inputs."""
        return LaunchConfig(self.defines, 256)

    def scratch(self, key_heads: int, heads: int, blocks: int) -> list[tuple[int, ...]]:
        """Return the shapes of what delta_blocks writes: queries, keys; faded, reads, news, weights, logs.
        mamba2_blocks writes neither keys nor reads, but after queries the largest of their magnitudes and of keys'."""
        a, d, n = self.key_dim, self.value_dim, self.block
        key_shapes = [(n, a), (a, n)] if self.reads else [(n, a), (2,)]
        head_shapes = [(a, n), *([(n, a)] if self.reads else []), (n, d), (n, n), (n,)]
        return [(blocks, key_heads, *shape) for shape in key_shapes] + [
            (blocks, heads, *shape) for shape in head_shapes
        ]


class Mamba2Sizes(DeltaSizes):
    name = "Mamba 2"
    reads = False

    def blocks(self) -> LaunchConfig:
        threads = threads_for((self.block // 4) ** 2)
        channels = min(self.key_dim, _CHANNELS)
        shared = _FLOAT * (self.block * (2 * (channels + 4) + 3 * _MEMBERS) + 2 * threads // WARP)
        shares = {"CHANNELS": channels, "MEMBERS": _MEMBERS, "THREADS": threads, "SHARED": shared}
        return LaunchConfig({**self.defines, **shares}, threads, shared)


def sizes_of(mixer: Recurrent, block: int) -> DeltaSizes:
    """The sizes of a layer, for blocks of `block` tokens."""
    kind = Mamba2Sizes if isinstance(mixer, Mamba2) else DeltaSizes
    return kind(mixer.key_dim, mixer.value_dim, block, mixer.width)


def heads_width(mixer: Recurrent) -> int:
    """H·D."""
    return mixer.value_heads * mixer.value_dim


def projected_columns(mixer: Recurrent) -> int:
    """Columns of a projected row, at most: q, k, v, z, b, a; or z, x, B, C, dt."""
    return mixer.channels + heads_width(mixer) + 2 * mixer.value_heads


def delta_prompt_bytes(mixers: Collection[Recurrent], chunk: int, tokens: int, block_size: int) -> tuple[int, int]:
    """Bytes of what the kernels of one part of a prompt write for each other, and of the states computed at a time."""
    blocks = tokens // block_size
    ends = 2 + sum(_STEP**power < blocks for power in range(1, 16)) if blocks else 0
    parts, states = [0], 0
    for mixer in mixers:
        count = min(-(-chunk // block_size) + 1, PROMPT_ROWS // block_size)
        shapes = sizes_of(mixer, block_size).scratch(mixer.key_heads, mixer.value_heads, count)
        parts.append(sum(map(math.prod, shapes)))
        matrices, before = mixer.value_heads * mixer.key_dim * mixer.value_dim, (mixer.width - 1) * mixer.channels
        token_floats = mixer.key_heads * mixer.key_dim + mixer.value_heads * (mixer.value_dim + 1) + mixer.channels
        states += (1 + ends) * (matrices + before) + block_size * token_floats
    return _FLOAT * max(parts), _FLOAT * states


def state_codes(key_dim: int, value_dim: int) -> LaunchConfig:
    """The launches of state_codes and state_matrices."""
    defines = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "LARGEST": float(LARGEST), "LEAST": LEAST}
    return LaunchConfig(defines, threads_for(value_dim))
