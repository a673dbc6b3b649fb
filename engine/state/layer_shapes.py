"""How one layer stores a block of K/V, or of another state: shapes and sizes. Allocates nothing."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.codecs import Codec
from polarlm.engine.quantization.metric import Metric

if TYPE_CHECKING:
    from polarlm.engine.backends.ops import Ops
    from polarlm.engine.state.layer_state import LayerState


class ArraySpec(NamedTuple):
    """An array of one block of a layer."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


class StateShape:
    """How one layer stores its state, in blocks of `block_size` tokens.

    Unless a subclass says otherwise, it has something of every token in its window: K/V, or inputs of a convolution.
    """

    window: int | None = None  # the number of tokens that a token sees, itself included; None: all before it
    images_whole: bool = False  # whether rows of an image see its later rows, too
    recent_blocks: int = 0  # how many of a sequence's newest complete blocks are in full precision
    is_sparse: ClassVar[bool] = False  # whether its quantized blocks are snapshots; see `LayerState.is_sparse`

    @property
    def group(self) -> Hashable:
        """Layers for which this is equal share block tables."""
        return self

    @property
    def values(self) -> int:
        """The number of stored K/V values per token."""
        return 0

    def held_blocks(self, tokens: int, block_size: int) -> tuple[int, int]:
        """Return the quantized blocks and the full-precision blocks of a sequence of `tokens`."""
        complete, rest = divmod(tokens, block_size)
        first = 0 if self.window is None else max(0, tokens - self.window + 1) // block_size  # first visible block
        blocks = max(0, complete - max(1, first))
        recent = min(blocks, self.recent_blocks)
        return blocks - recent, recent + (rest > 0) + (complete > 0 and first == 0)

    def needed_blocks(self, tokens: int, block_size: int) -> int:
        """Return the quantized blocks that a sequence needs until it has `tokens`, if recent blocks are quantized for
        want of slots. Block 0 is never quantized.

        A window needs its blocks twice: a prompt's first tokens see old blocks while its last ones are encoded.
        """
        complete = max(0, tokens // block_size - 1)
        return complete if self.window is None else min(complete, 2 * (self.window // block_size + 2))

    def slots(self, full_slots: int, more: int, recent: int) -> int:
        """Return the number of full-precision slots in a store that has `full_slots` of K/V for first and current
        blocks, `more` of sequences that are only kept, and `recent` for recent blocks."""
        return full_slots + more + recent

    def more_blocks(self, full_slots: int, more: int) -> int:
        """Return the number of quantized blocks that such a store has besides what its longest sequence needs."""
        return 0

    def block_arrays(self, block_size: int, stored_as: str) -> list[ArraySpec]:
        """Return the arrays of a complete block in `LayerState.read_blocks`. stored_as: see `Ops.stored_as`. Raises
        ValueError for a representation that the layer does not have."""
        raise NotImplementedError

    def full_arrays(self, tokens: int) -> list[ArraySpec]:
        """Return the arrays of a full-precision block in `LayerState.read_full`."""
        raise NotImplementedError

    def quantized_bytes(self, block_size: int) -> int:
        """Return the bytes of a complete block as it is stored."""
        return _bytes(self.block_arrays(block_size, ""))

    def full_bytes(self, block_size: int) -> int:
        """Return the bytes of a full-precision slot."""
        return _bytes(self.full_arrays(block_size))


def _bytes(arrays: Sequence[ArraySpec]) -> int:
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


class RecurrentShape(StateShape):
    """The shape of a recurrent state. It makes the state itself; for K/V, which need codecs, the store does."""

    def state(self, ops: Ops, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]) -> LayerState:
        """Return the state of `layers`. blocks: the numbers of quantized blocks and of full-precision slots."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayerShape(StateShape):
    """How one layer stores its K/V. codec_v: None if values are keys."""

    codec_k: Codec
    codec_v: Codec | None
    kv_heads: int  # K
    head_dim: int  # D
    mean_bits: int = 0  # bits per channel of the block mean that is subtracted from keys: 8, 16, or 0 for none
    window: int | None = None
    images_whole: bool = False
    recent_blocks: int = 0

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Of keys and, if they are stored, of values."""
        return (self.codec_k,) if self.codec_v is None else (self.codec_k, self.codec_v)

    def block_arrays(self, block_size: int, stored_as: str) -> list[ArraySpec]:
        arrays = transfer.block_arrays(self.format(block_size), stored_as)
        return [ArraySpec(name, (self.kv_heads, *field.shape), field.dtype) for name, field in arrays.items()]

    def full_arrays(self, tokens: int) -> list[ArraySpec]:
        shape, half = (self.kv_heads, tokens, self.head_dim), np.dtype(np.float16)
        return [ArraySpec(side, shape, half) for side in ("k" if self.codec_v is None else "kv")]

    def format(self, block_size: int, metric_k: Metric | None = None, metric_v: Metric | None = None) -> CacheFormat:
        """Return the format of this layer's cache, for the ops."""
        return CacheFormat(
            codec_k=self.codec_k,
            codec_v=self.codec_v,
            metric_k=metric_k if self.codec_k.takes_metric else None,
            metric_v=metric_v if self.codec_v is not None and self.codec_v.takes_metric else None,
            mean_bits=self.mean_bits,
            block_size=block_size,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )

    @property
    def group(self) -> Hashable:
        return self.window, self.kv_heads, self.head_dim

    @property
    def values(self) -> int:
        """A key and a value for every KV head, or a key alone."""
        return len(self.codecs) * self.kv_heads * self.head_dim

    def quantized_bytes(self, block_size: int) -> int:
        return transfer.nbytes(self.format(block_size), transfer.FIELDS)

    def full_bytes(self, block_size: int) -> int:
        return 2 * block_size * self.values  # in half precision


@dataclass(frozen=True)
class SharedShape(StateShape):
    """A layer that stores nothing: it reads the K/V of the last layer before it with a LayerShape of its group."""

    kv_heads: int  # K
    head_dim: int  # D
    window: int | None = None

    @property
    def group(self) -> Hashable:
        return self.window, self.kv_heads, self.head_dim

    def block_arrays(self, block_size: int, stored_as: str) -> list[ArraySpec]:
        return []

    def full_arrays(self, tokens: int) -> list[ArraySpec]:
        return []
