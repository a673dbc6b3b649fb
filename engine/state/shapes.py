"""Shapes and sizes of stored state: of the blocks of each layer, and of sequences. Allocates nothing."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.codecs import Codec
from polarlm.engine.quantization.metric import Metric
from polarlm.model_loaders.forks import cached_property

if TYPE_CHECKING:
    from polarlm.engine.backends.ops import Ops
    from polarlm.engine.state.layer_state import LayerState


class ArraySpec(NamedTuple):
    """An array of one block of a layer."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


class TokenBlocks:
    """The blocks of a state that has something of every token in its window: K/V, or the inputs of a convolution."""

    window: int | None
    is_sparse = False

    def held_blocks(self, tokens: int, block_size: int) -> tuple[int, int]:
        """Return the quantized blocks and the full-precision blocks of a sequence of `tokens`."""
        complete, rest = divmod(tokens, block_size)
        first = 0 if self.window is None else max(0, tokens - self.window + 1) // block_size  # first visible block
        return max(0, complete - max(1, first)), (rest > 0) + (complete > 0 and first == 0)

    def needed_blocks(self, tokens: int, block_size: int) -> int:
        """Return the quantized blocks that a sequence needs until it has `tokens`. Block 0 is never quantized.

        A window needs its blocks twice: a prompt's first tokens see old blocks while its last ones are encoded.
        """
        complete = max(0, tokens // block_size - 1)
        return complete if self.window is None else min(complete, 2 * (self.window // block_size + 2))

    def slots(self, full_slots: int, more: int) -> int:
        """Return the number of full-precision slots in a store that has `full_slots` of K/V, and `more` of sequences
        that are only kept."""
        return full_slots + more

    def more_blocks(self, full_slots: int, more: int) -> int:
        """Return the number of quantized blocks that such a store has for what no sequence needs."""
        return 0


class StateShape(Protocol):
    """How one layer stores its state, in blocks of `block_size` tokens. That of K/V is LayerShape."""

    def held_blocks(self, tokens: int, block_size: int) -> tuple[int, int]:
        """See `TokenBlocks`, as for the next three."""

    def needed_blocks(self, tokens: int, block_size: int) -> int: ...

    def slots(self, full_slots: int, more: int) -> int: ...

    def more_blocks(self, full_slots: int, more: int) -> int: ...

    @property
    def is_sparse(self) -> bool:
        """Whether its quantized blocks are snapshots; see `LayerState.is_sparse`."""

    @property
    def group(self) -> Hashable:
        """Layers for which this is equal share block tables."""

    @property
    def window(self) -> int | None:
        """The number of tokens that a token sees, itself included; None: all before it."""

    @property
    def values(self) -> int:
        """The number of stored values per token."""

    def quantized_bytes(self, block_size: int) -> int:
        """Return the bytes of a complete block as it is stored."""

    def full_bytes(self, block_size: int) -> int:
        """Return the bytes of a full-precision slot."""

    def block_arrays(self, block_size: int, stored_as: str) -> list[ArraySpec]:
        """Return the arrays of a complete block in `LayerState.read_blocks`. stored_as: see `Ops.stored_as`."""

    def full_arrays(self, tokens: int) -> list[ArraySpec]:
        """Return the arrays of a full-precision block in `LayerState.read_full`."""


class OwnShape(StateShape, Protocol):
    """The shape of a state that is not K/V. It makes the state itself; for K/V, which need codecs, the store does."""

    def state(self, ops: Ops, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]) -> LayerState:
        """Return the state of `layers`. blocks: the numbers of quantized blocks and of full-precision slots."""


NEWEST = 3
"""Complete blocks at the end of a sequence that have more bits than older ones, where blocks are of two kinds: with the
current block they have more of a step's attention than all older ones."""


class FinerKind(NamedTuple):
    """The blocks of a layer that have more bits than others."""

    codec_k: Codec
    codec_v: Codec
    is_by_age: bool  # whether they are the newest ones of sequences, and not as many as there is room for


@dataclass(frozen=True)
class LayerShape(TokenBlocks):
    """How one layer stores its K/V."""

    codec_k: Codec
    codec_v: Codec
    kv_heads: int  # K
    head_dim: int  # D
    mean_bits: int = 0  # bits per channel of the block mean that is subtracted from keys: 8, 16, or 0 for none
    window: int | None = None
    finer: FinerKind | None = None

    @property
    def finest(self) -> LayerShape:
        """The shape if all blocks have the most bits that they can have."""
        if self.finer is None:
            return self
        return replace(self, codec_k=self.finer.codec_k, codec_v=self.finer.codec_v, finer=None)

    def needed_blocks(self, tokens: int, block_size: int) -> int:
        needed = super().needed_blocks(tokens, block_size)
        is_by_age = self.finer is not None and self.finer.is_by_age
        return needed + is_by_age * min(needed, NEWEST)  # a finer block takes no more than two others

    def more_blocks(self, full_slots: int, more: int) -> int:
        return int(self.finer is not None)  # for the block that is being coded again

    def block_arrays(self, block_size: int, stored_as: str) -> list[ArraySpec]:
        """Raises ValueError for a representation that the layer does not have."""
        arrays = transfer.block_arrays(self.format(block_size), stored_as)
        return [ArraySpec(name, (self.kv_heads, *field.shape), field.dtype) for name, field in arrays.items()]

    def full_arrays(self, tokens: int) -> list[ArraySpec]:
        return [ArraySpec(side, (self.kv_heads, tokens, self.head_dim), np.dtype(np.float16)) for side in "kv"]

    def format(self, block_size: int, metric_k: Metric | None = None, metric_v: Metric | None = None) -> CacheFormat:
        """Return the format of this layer's cache, for the ops."""
        finer = None if self.finer is None else self.finest.format(block_size, metric_k, metric_v)
        return CacheFormat(
            codec_k=self.codec_k,
            codec_v=self.codec_v,
            metric_k=metric_k,
            metric_v=metric_v,
            mean_bits=self.mean_bits,
            block_size=block_size,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            finer=finer,
        )

    @property
    def group(self) -> Hashable:
        return self.window, self.kv_heads, self.head_dim

    @property
    def values(self) -> int:
        """The number of values per token: a key and a value for every KV head."""
        return 2 * self.kv_heads * self.head_dim

    def quantized_bytes(self, block_size: int) -> int:
        """Return the bytes of a quantized block: both codecs' fields and the means of keys."""
        return transfer.nbytes(self.format(block_size), transfer.FIELDS)

    def full_bytes(self, block_size: int) -> int:
        """Return the bytes of a slot, in half precision."""
        return 2 * block_size * self.values


@dataclass(frozen=True)
class SharedShape(TokenBlocks):
    """A layer that stores nothing: its K/V are those of the last layer before it with a LayerShape of its group."""

    kv_heads: int  # K
    head_dim: int  # D
    window: int | None = None

    @property
    def group(self) -> Hashable:
        return self.window, self.kv_heads, self.head_dim

    @property
    def values(self) -> int:
        return 0

    def quantized_bytes(self, block_size: int) -> int:
        return 0

    def full_bytes(self, block_size: int) -> int:
        return 0

    def block_arrays(self, block_size: int, stored_as: str) -> list[ArraySpec]:
        return []

    def full_arrays(self, tokens: int) -> list[ArraySpec]:
        return []


@dataclass(frozen=True)
class CacheShape:
    """How all layers store a block of K/V, or of another state."""

    block_size: int  # N
    layers: tuple[LayerShape | SharedShape | OwnShape, ...]
    # Layer with K/V → the bytes of a quantized block and of a full-precision slot on the backend, all KV heads. Layers
    # that are absent have no padding.
    stored: Mapping[int, tuple[int, int]] = field(default_factory=dict, hash=False)
    has_host: bool = False  # whether snapshots are in the computer's memory, and all else in that of a GPU

    def format(self, layer: int, metric_k: Metric | None = None, metric_v: Metric | None = None) -> CacheFormat:
        """Return the format of the cache of a layer with K/V, for the ops."""
        return self.kv_layers[layer].format(self.block_size, metric_k, metric_v)

    @property
    def has_two_kinds(self) -> bool:
        """Whether some blocks have more bits than others."""
        return any(layer.finer for layer in self.kv_layers.values())

    @property
    def is_by_age(self) -> bool:
        """Whether these are the newest blocks of sequences."""
        return any(layer.finer and layer.finer.is_by_age for layer in self.kv_layers.values())

    @property
    def finest(self) -> CacheShape:
        """The shape if all blocks have the most bits that they can have, without a backend's padding of these."""
        if not self.has_two_kinds:
            return self
        own = (layer.finest if isinstance(layer, LayerShape) else layer for layer in self.layers)
        return replace(self, layers=tuple(own), stored={})

    @property
    def widest(self) -> CacheFormat:
        """The format of a layer with the most K/V values per token."""
        return self.format(max(self.kv_layers, key=lambda layer: self.kv_layers[layer].values))

    @cached_property
    def kv_layers(self) -> dict[int, LayerShape]:
        """The number of each layer with K/V → its shape."""
        return {number: layer for number, layer in enumerate(self.layers) if isinstance(layer, LayerShape)}

    def source(self, layer: int) -> int:
        """Return the layer whose state a layer reads: itself, unless it is shared."""
        shape = self.layers[layer]
        if not isinstance(shape, SharedShape):
            return layer
        return max(n for n, own in self.kv_layers.items() if n < layer and own.group == shape.group)

    @cached_property
    def groups(self) -> tuple[tuple[int | None, tuple[int, ...]], ...]:
        """(window, layers) of each group. The layers of a group share block tables and have heads of one shape."""
        members: dict[Hashable, list[int]] = {}
        for index, layer in enumerate(self.layers):
            members.setdefault(layer.group, []).append(index)
        return tuple((self.layers[layers[0]].window, tuple(layers)) for layers in members.values())

    def quantized_bytes(self, layers: Iterable[int]) -> int:
        """Return the bytes of a quantized block, summed over `layers`."""
        stored, own = self.stored, self._quantized_bytes
        return sum(stored[layer][0] if layer in stored else own[layer] for layer in layers)

    @cached_property
    def _quantized_bytes(self) -> tuple[int, ...]:
        return tuple(layer.quantized_bytes(self.block_size) for layer in self.layers)

    def full_bytes(self, layers: Iterable[int]) -> int:
        """Return the bytes of a full-precision slot, summed over `layers`."""
        stored, n = self.stored, self.block_size
        return sum(stored[layer][1] if layer in stored else self.layers[layer].full_bytes(n) for layer in layers)

    @property
    def f16_bytes_per_token(self) -> int:
        """Bytes per token of complete blocks in half precision, all layers."""
        return 2 * sum(layer.values for layer in self.layers)

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of quantized blocks, all layers, as the backend stores them; without snapshots."""
        every_token = (number for number, layer in enumerate(self.layers) if not layer.is_sparse)
        return self.quantized_bytes(every_token) / self.block_size

    def sequence_bytes(self, tokens: int) -> int:
        """Return the bytes of a sequence of `tokens`: of its quantized blocks, its sink and its current block.

        Blocks outside a layer's window are not counted. Bits that depend on the room are the fewest.
        """
        total = 0
        for layers, quantized, full in self._blocks(tokens):
            newest = min(quantized, NEWEST * self.is_by_age)
            total += (quantized - newest) * self.quantized_bytes(layers) + full * self.full_bytes(layers)
            total += newest * self.finest.quantized_bytes(layers)
        return total

    def f16_bytes(self, tokens: int) -> int:
        """Return the bytes of the same blocks if all of them were in half precision.

        As in `sequence_bytes`, the block that is being filled counts as a whole, so the difference between the two is
        what the codecs save.
        """
        return sum((quantized + full) * self.full_bytes(layers) for layers, quantized, full in self._blocks(tokens))

    def _blocks(self, tokens: int) -> Iterator[tuple[Sequence[int], int, int]]:
        """Yield, for each group, (layers, quantized blocks, full-precision blocks) of a sequence of `tokens`."""
        for _, layers in self.groups:
            yield layers, *self.layers[layers[0]].held_blocks(tokens, self.block_size)

    @property
    def bits_per_value(self) -> float:
        """Bits of a quantized block of K/V per value, over all layers that have K/V, without a backend's padding."""
        values = self.block_size * sum(layer.values for layer in self.kv_layers.values())
        return 8 * sum(self._quantized_bytes[layer] for layer in self.kv_layers) / max(1, values)

    def quantized_blocks(self, tokens: int) -> tuple[int, ...]:
        """Return how many quantized blocks a sequence needs until it has `tokens`, per group."""
        return tuple(self.layers[layers[0]].needed_blocks(tokens, self.block_size) for _, layers in self.groups)

    def blocks_of_kv(self, blocks: tuple[int, ...]) -> int:
        """Return the sum of `blocks`, numbers for each group, over the groups that have K/V."""
        return sum(count for (_, layers), count in zip(self.groups, blocks, strict=True) if layers[0] in self.kv_layers)

    def more_blocks(self, full_slots: int, more: int) -> tuple[int, ...]:
        """Return how many quantized blocks a store has besides those that sequences need, per group."""
        return tuple(self.layers[layers[0]].more_blocks(full_slots, more) for _, layers in self.groups)

    def bytes(
        self, quantized_blocks: tuple[int, ...], full_slots: int, more: int = 0, of: Container[int] | None = None
    ) -> int:
        """Return the bytes of a store with `quantized_blocks` per group, and `full_slots` and `more` in groups of K/V.

        What is in the computer's memory beside a GPU's is left out. of: the layers to count; None for all.
        """
        total = 0
        for (_, layers), count in zip(self.groups, quantized_blocks, strict=True):
            one, own = self.layers[layers[0]], [layer for layer in layers if of is None or layer in of]
            total += one.slots(full_slots, more) * self.full_bytes(own)
            if not (self.has_host and one.is_sparse):
                total += count * self.quantized_bytes(own)
        return total

    def snapshot_bytes(self, quantized_blocks: tuple[int, ...]) -> int:
        """Return the bytes of those of `quantized_blocks` that are snapshots."""
        blocks = zip(self.groups, quantized_blocks, strict=True)
        sparse = ((layers, count) for (_, layers), count in blocks if self.layers[layers[0]].is_sparse)
        return sum(count * self.quantized_bytes(layers) for layers, count in sparse)
