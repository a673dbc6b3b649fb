"""What the kernels of Mamba 2 are specialized for, their arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.records import Int64, Pointer

_STEP_ROWS, _PROMPT_ROWS = 2, 6  # whose sums stay in registers


@dataclass(frozen=True)
class Mamba2:
    """The properties that kernels are specialized for. is_prompt: whether slots advance at the ends of blocks."""

    groups: int
    shared: int  # heads of a group
    size: int  # of a state, A
    dim: int  # of a head, D
    block: int
    width: int
    has_bias: bool
    is_prompt: bool

    @property
    def heads(self) -> int:
        return self.groups * self.shared

    @property
    def inner(self) -> int:
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B, C."""
        return self.inner + 2 * self.groups * self.size

    @property
    def columns(self) -> int:
        """Of a projected row: z, x, B, C, dt."""
        return self.inner + self.channels + self.heads

    def name(self, kernel: str) -> str:
        sizes = f"{self.groups}x{self.shared}_{self.size}x{self.dim}_{self.block}_{self.width}"
        return f"mamba2_{kernel}_{sizes}{'_bias' * self.has_bias}{'_prompt' * self.is_prompt}"

    def tile(self, e: Emitter) -> tuple[int, int]:
        """Rows and vectors of a product's tile."""
        rows, vectors = e.level.float_tile
        return (min(rows, _PROMPT_ROWS), vectors) if self.is_prompt else (min(rows, _STEP_ROWS), 2 * vectors)


class Mamba2Arguments(NamedTuple):
    """Arguments of all kernels but `norm_parts`. T: rows; Q: groups.

    convolved (T, C): x, B and C after the convolution. block_keys: the keys of each block of a prompt, (blocks, Q, A,
    N). scores (T, Q, N): products of queries with the keys of the block. kept (blocks,) int32: for the end of each
    block, its row of `end_matrices` and `end_inputs`, or −1. Steps have neither block_keys nor kept.
    """

    projected: Pointer
    convolved: Pointer
    block_keys: Pointer
    scores: Pointer
    out: Pointer
    conv: Pointer
    bias: Pointer
    decay: Pointer
    dt_bias: Pointer
    skip: Pointer
    matrices: Pointer
    keys: Pointer
    updates: Pointer
    decays: Pointer
    inputs: Pointer
    spans: Pointer
    kept: Pointer
    end_matrices: Pointer
    end_inputs: Pointer
    blocks: Int64
