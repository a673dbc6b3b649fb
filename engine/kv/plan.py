"""Sizes of the KV store: bytes of blocks, sequences and plans, and the largest plan that fits. Allocates nothing."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.codecs import FULL, Codec, get
from polarlm.engine.errors import EngineError
from polarlm.engine.quantization.conditioning import mean_fields
from polarlm.engine.quantization.metric import Metric

if TYPE_CHECKING:
    from polarlm.engine.backends.ops import Ops
    from polarlm.engine.kv.layer_state import LayerState


class StateShape(Protocol):
    """How one layer stores its state, in blocks of `block_size` tokens. LayerShape is that of K/V."""

    @property
    def group(self) -> Hashable:
        """Layers for which this is equal share block tables."""

    @property
    def window(self) -> int | None:
        """How many last tokens the next one sees in this state, itself included; None: all."""

    @property
    def values(self) -> int:
        """Numbers of a token."""

    def quantized_bytes(self, block_size: int) -> int:
        """Bytes of a complete block as it is kept."""

    def full_bytes(self, block_size: int) -> int:
        """Bytes of a full-precision slot."""

    def state(self, ops: Ops, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]) -> LayerState:
        """The state of `layers`, with so many quantized blocks and full-precision slots. That of K/V, whose encoding
        takes more, is made by the store."""


@dataclass(frozen=True)
class LayerShape:
    """How one layer stores its K/V."""

    codec_k: Codec
    codec_v: Codec
    kv_heads: int  # K
    head_dim: int  # D
    mean_bits: int = 0  # bits per channel of the block mean that is subtracted from keys: 8, 16, or 0 for none
    window: int | None = None

    def state(self, ops: Ops, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]) -> LayerState:
        raise NotImplementedError("K/V are made by the store")

    @property
    def group(self) -> Hashable:
        return self.window, self.kv_heads, self.head_dim

    @property
    def values(self) -> int:
        """Numbers of a token: its key and its value of every KV head."""
        return 2 * self.kv_heads * self.head_dim

    def quantized_bytes(self, block_size: int) -> int:
        """Bytes of a quantized block: both codecs' fields and the means of keys."""
        n, d = block_size, self.head_dim
        fields = [*self.codec_k.fields(n, d).values(), *self.codec_v.fields(n, d).values()]
        means = mean_fields(self.mean_bits, d).values() if self.mean_bits else ()
        count = sum(field.nbytes for field in fields) + sum(math.prod(shape) * t.itemsize for shape, t in means)
        return self.kv_heads * count

    def full_bytes(self, block_size: int) -> int:
        """Bytes of a slot of halves."""
        return 2 * block_size * self.values


@dataclass(frozen=True)
class CacheShape:
    """How all layers store a block of K/V, or of another state."""

    block_size: int  # N
    layers: tuple[StateShape, ...]
    # Layer with K/V → the bytes of a quantized block and of a full-precision slot on the backend, all KV heads. Layers
    # that are absent have no padding.
    stored: Mapping[int, tuple[int, int]] = field(default_factory=dict, hash=False)

    def format(self, layer: int, metric_k: Metric | None = None, metric_v: Metric | None = None) -> CacheFormat:
        """The format of a layer with K/V, for the ops."""
        shape = self.kv_layers[layer]
        return CacheFormat(
            codec_k=shape.codec_k,
            codec_v=shape.codec_v,
            metric_k=metric_k,
            metric_v=metric_v,
            mean_bits=shape.mean_bits,
            block_size=self.block_size,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
        )

    @property
    def widest(self) -> CacheFormat:
        """The format of a layer with the most numbers of K/V."""
        return self.format(max(self.kv_layers, key=lambda layer: self.kv_layers[layer].values))

    @cached_property
    def kv_layers(self) -> dict[int, LayerShape]:
        """The number of each layer with K/V → its shape."""
        return {number: layer for number, layer in enumerate(self.layers) if isinstance(layer, LayerShape)}

    @cached_property
    def groups(self) -> tuple[tuple[int | None, tuple[int, ...]], ...]:
        """(window, its layers) of each group, whose layers share block tables, and have heads of one shape."""
        members: dict[Hashable, list[int]] = {}
        for index, layer in enumerate(self.layers):
            members.setdefault(layer.group, []).append(index)
        return tuple((self.layers[layers[0]].window, tuple(layers)) for layers in members.values())

    def quantized_bytes(self, layers: Iterable[int]) -> int:
        """Bytes of a quantized block of these layers."""
        stored, own = self.stored, self._quantized_bytes
        return sum(stored[layer][0] if layer in stored else own[layer] for layer in layers)

    @cached_property
    def _quantized_bytes(self) -> tuple[int, ...]:
        return tuple(layer.quantized_bytes(self.block_size) for layer in self.layers)

    def full_bytes(self, layers: Iterable[int]) -> int:
        """Bytes of a full-precision slot of these layers."""
        stored, n = self.stored, self.block_size
        return sum(stored[layer][1] if layer in stored else self.layers[layer].full_bytes(n) for layer in layers)

    @property
    def f16_bytes_per_token(self) -> int:
        """Bytes per token of complete blocks in half precision, all layers."""
        return 2 * sum(layer.values for layer in self.layers)

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of quantized blocks, all layers, as the backend stores them."""
        return self.quantized_bytes(range(len(self.layers))) / self.block_size

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of a sequence of `tokens`: its quantized blocks, and the slots of its sink and current block.

        Blocks outside a layer's window are not counted.
        """
        return sum(
            quantized * self.quantized_bytes(layers) + full * self.full_bytes(layers)
            for layers, quantized, full in self._blocks(tokens)
        )

    def f16_bytes(self, tokens: int) -> int:
        """Bytes of the same blocks if all of them were in half precision.

        Whole blocks, as in `sequence_bytes`: one that is being filled has its whole memory in both. So what a codec
        saves shows from the first quantized block on, and nothing else counts as saved or lost.
        """
        return sum((quantized + full) * self.full_bytes(layers) for layers, quantized, full in self._blocks(tokens))

    def _blocks(self, tokens: int) -> Iterator[tuple[Sequence[int], int, int]]:
        """Of a sequence of `tokens`: (layers of a group, its quantized blocks, those in full precision)."""
        complete, rest = divmod(tokens, self.block_size)
        for window, layers in self.groups:
            first = 0 if window is None else max(0, tokens - window + 1) // self.block_size  # first visible block
            yield layers, max(0, complete - max(1, first)), (rest > 0) + (complete > 0 and first == 0)

    @property
    def bits_per_value(self) -> float:
        """Bits of a quantized block per K/V value, over all layers, without a backend's padding."""
        values = self.block_size * sum(layer.values for layer in self.layers)
        return 8 * sum(self._quantized_bytes) / values

    def quantized_blocks(self, tokens: int) -> tuple[int, ...]:
        """Quantized blocks that a sequence of `tokens` needs, per group. Block 0 is never quantized.

        A window needs its blocks twice: a prompt's first tokens see the old ones while its last ones are encoded.
        """
        complete = max(0, tokens // self.block_size - 1)
        return tuple(
            complete if window is None else min(complete, 2 * (window // self.block_size + 2))
            for window, _ in self.groups
        )

    def bytes(self, quantized_blocks: tuple[int, ...], full_slots: int) -> int:
        """Bytes of a store with `quantized_blocks` per group, and `full_slots` in every group."""
        return sum(
            quantized * self.quantized_bytes(layers) + full_slots * self.full_bytes(layers)
            for (_, layers), quantized in zip(self.groups, quantized_blocks, strict=True)
        )


_SPARE_SLOTS = 1  # a prompt's span holds the slot of the block that it completes until commit


@dataclass(frozen=True)
class StorePlan:
    """The size of a store that holds one sequence of `tokens`, or several shorter ones."""

    shape: CacheShape
    tokens: int
    quantized_blocks: tuple[int, ...]  # per group
    full_slots: int

    @property
    def bytes(self) -> int:
        """Bytes of the store."""
        return self.shape.bytes(self.quantized_blocks, self.full_slots)

    def sequences(self, tokens: int) -> int:
        """How many sequences of `tokens` the store certainly holds at a time, whatever order they are computed in."""
        needed = zip(self.quantized_blocks, self.shape.quantized_blocks(tokens), strict=True)
        slots = (self.full_slots - _SPARE_SLOTS) // 2
        return min([slots, *(blocks // each for blocks, each in needed if each)])


def plan_for_tokens(shape: CacheShape, tokens: int, sequences: int, step_rows: int = 1) -> StorePlan:
    """The smallest store with quantized blocks for a sequence of `tokens`, and with full-precision slots for
    `sequences` sequences that have `step_rows` rows each in a step.
    """
    # Blocks that the rows of a step may lie in, the current block among them.
    touched = 1 + (shape.block_size + step_rows - 2) // shape.block_size
    slots = (1 + touched) * sequences + _SPARE_SLOTS
    return StorePlan(shape, tokens, shape.quantized_blocks(tokens), slots)


def plan_for_memory(
    shape: CacheShape,
    memory: int,
    max_tokens: int,
    sequences: int,
    beside: Callable[[int], int] = lambda tokens: 0,
) -> StorePlan:
    """The store for the longest sequence, up to `max_tokens`, that fits into `memory` bytes.

    beside: tokens of a sequence → bytes of `memory` that other things need; must not fall. sequences: how many get
    full-precision slots; fewer if these would take more than a quarter of `memory`. Raises EngineError
    ("out_of_memory") if two blocks do not fit.
    """

    def slots(sequences: int) -> int:
        return plan_for_tokens(shape, 0, sequences).bytes

    sequences = max(1, bisect_right(range(1, sequences + 1), memory // 4, key=slots))

    def plan(tokens: int) -> StorePlan:
        return plan_for_tokens(shape, tokens, sequences)

    least = plan(min(max_tokens, 2 * shape.block_size))
    left = memory - beside(least.tokens)
    if least.bytes > left:
        raise EngineError(
            f"{format_bytes(max(0, left))} for the KV store is too little for this model: the first blocks alone take "
            f"{format_bytes(least.bytes)}; raise kv_memory, or free some memory",
            "out_of_memory",
            ("kv_memory",),
        )
    low, high = least.tokens, max(least.tokens, max_tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if plan(middle).bytes + beside(middle) <= memory:
            low = middle
        else:
            high = middle - 1
    return plan(min(low, max_tokens))


def f16_tokens(plan: StorePlan, max_tokens: int) -> int:
    """Tokens, up to `max_tokens`, that an f16 cache would hold in the memory of `plan`."""
    half = get(FULL)
    layers = (
        replace(layer, codec_k=half, codec_v=half, mean_bits=0) if isinstance(layer, LayerShape) else layer
        for layer in plan.shape.layers
    )
    f16 = replace(plan.shape, layers=tuple(layers), stored={})
    low, high = 0, max_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if f16.bytes(f16.quantized_blocks(middle), plan.full_slots) <= plan.bytes:
            low = middle
        else:
            high = middle - 1
    return low


def parse_size(text: str, setting: str = "kv_memory") -> int:
    """Bytes of "512M", "2G", "1.5GiB", "800000". Raises EngineError, which names the setting.

    >>> parse_size("1.5G")
    1610612736
    """
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    scale = units.get(number[-1:], 1)
    try:
        size = float(number[:-1] if scale > 1 else number) * scale
        if not 0 < size < 1 << 60:
            raise ValueError
    except ValueError:
        sentence = f"{setting}={text}: this is not a size; write 512M, 2G or a number of bytes"
        raise EngineError(sentence, settings=(setting,)) from None
    return int(size)


def format_bytes(size: float) -> str:
    """A size as text, in binary units.

    >>> format_bytes(1536), format_bytes(3 << 30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1023.95:  # what would be shown as 1024.0 belongs to the next unit
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
