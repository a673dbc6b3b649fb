"""What the kernel of gated delta rules is specialized for, its arguments, and the addresses of one unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.multiply import Left, product
from polarlm.engine.backends.native.kernels.recurrent.block_end import Matrix
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.records import Float32, Int64, Pointer
from polarlm.engine.jit.lang.values import Value
from polarlm.engine.jit.run.workers import SCRATCH

_STEP_TILE, _PROMPT_TILE = 2, 6  # rows whose sums stay in registers


@dataclass(frozen=True)
class Delta:
    """The properties that a kernel is specialized for.

    shared: value heads of a key head. block: N. is_prompt: whether the launch has many rows, and slots advance.
    """

    key_heads: int
    shared: int
    key_dim: int
    value_dim: int
    block: int
    width: int
    tiled: bool
    is_prompt: bool

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def value_heads(self) -> int:
        return self.key_heads * self.shared

    @property
    def columns(self) -> int:
        """Of a projected row: q, k, v, z, b, a."""
        return self.channels + self.value_heads * (self.value_dim + 2)

    @property
    def name(self) -> str:
        sizes = f"{self.key_heads}x{self.shared}_{self.key_dim}x{self.value_dim}_{self.block}_{self.width}"
        return f"gated_delta_{sizes}{'_tiled' * self.tiled}{'_prompt' * self.is_prompt}"


class Scratch:
    """Offsets in bytes of a unit's arrays in scratch, float32. n: the rows of a block.

    rows (2n, A): keys, then queries. scores (2n, N): products with the block's keys. weights (2n, N): of updates, in
    later updates and in results. read (2n, D): what keys and queries read of M, then the results. scaled (N, D):
    updates, decayed to the end of the block. beta, since (n,): σ(b), and how much M has decayed.
    """

    def __init__(self, spec: Delta) -> None:
        self.end, n = 0, spec.block
        self.rows = self._room(2 * n * spec.key_dim)
        self.scores = self._room(2 * n * n)
        self.weights = self._room(2 * n * n)
        self.read = self._room(2 * n * spec.value_dim)
        self.scaled = self._room(n * spec.value_dim)
        self.beta, self.since = self._room(n), self._room(n)

    def _room(self, numbers: int) -> int:
        start = self.end
        self.end += -(-numbers // 16) * 64
        return start


def supports(spec: Delta) -> bool:
    """Whether scratch has room for a unit."""
    return Scratch(spec).end <= SCRATCH


class DeltaArguments(NamedTuple):
    """Arguments of `gated_delta`. kept (blocks,) int32: for the end of each block, its row of `end_matrices` and
    `end_inputs`, or −1; for a prompt alone."""

    projected: Pointer
    out: Pointer
    conv: Pointer
    decay: Pointer
    dt_bias: Pointer
    norm: Pointer
    matrices: Pointer
    keys: Pointer
    updates: Pointer
    decays: Pointer
    inputs: Pointer
    spans: Pointer
    kept: Pointer
    end_matrices: Pointer
    end_inputs: Pointer
    eps: Float32
    blocks: Int64


class Unit:
    """A unit of the kernel: one key head in one slot."""

    def __init__(self, e: Emitter, spec: Delta, args: DeltaArguments, scratch: Value, slot: Value, head: Value) -> None:
        layout = Scratch(spec)
        self.e, self.spec, self.args, self.slot, self.head = e, spec, args, slot, head
        self.rows, self.scores, self.weights, self.read, self.scaled, self.beta, self.since = (
            scratch + at
            for at in (
                *(layout.rows, layout.scores, layout.weights, layout.read, layout.scaled),
                *(layout.beta, layout.since),
            )
        )
        self.keys = args.keys + (slot * spec.key_heads + head) * (4 * spec.key_dim * spec.block)
        self.inputs = args.inputs + slot * (4 * spec.channels * (spec.width - 1 + spec.block))
        rows, vectors = e.level.float_tile
        self.tile = min(rows, _PROMPT_TILE if spec.is_prompt else _STEP_TILE)
        self.vectors = vectors * (1 if spec.is_prompt else 2)

    def parts(self) -> list[tuple[Value, int]]:
        """The first channel, and the number of channels, of this head's queries and keys."""
        spec, own = self.spec, self.head * self.spec.key_dim
        return [(own, spec.key_dim), (own + spec.key_heads * spec.key_dim, spec.key_dim)]

    def value_head(self, member: Value) -> Value:
        """The number of a value head that has this key."""
        spec = self.spec
        return self.head + member * spec.key_heads if spec.tiled else self.head * spec.shared + member

    def value_channel(self, head: Value) -> Value:
        return head * self.spec.value_dim + 2 * self.spec.key_heads * self.spec.key_dim

    def matrix(self, head: Value) -> Value:
        spec = self.spec
        return self.args.matrices + (self.slot * spec.value_heads + head) * (4 * spec.key_dim * spec.value_dim)

    def state(self, head: Value) -> Matrix:
        """The state of a value head."""
        spec, of_slot = self.spec, self.slot * self.spec.value_heads + head
        return Matrix(
            self.matrix(head),
            self.keys,
            self.args.updates + of_slot * (4 * spec.block * spec.value_dim),
            self.args.decays + of_slot * (4 * spec.block),
            spec.key_dim,
            spec.value_dim,
            spec.block,
        )

    def product(
        self,
        left: Left,
        right: tuple[Value, int],
        start: Callable[..., Value],
        finish: Callable[..., None],
        *,
        seen: Value | None = None,
        tile: int = 0,
    ) -> None:
        """See `product`; tile: 0 for the launch's own."""
        product(self.e, left, right, start, finish, (tile or self.tile, self.vectors), seen)
