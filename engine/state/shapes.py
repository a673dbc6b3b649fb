"""How all layers store their blocks: sizes of these, and of sequences. Allocates nothing."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from polarlm.engine import codecs
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.quantization.metric import Metric
from polarlm.engine.state.layer_shapes import LayerShape, SharedShape, StateShape
from polarlm.model_loaders.forks import cached_property


@dataclass(frozen=True)
class CacheShape:
    """How all layers store a block of K/V, or of another state."""

    block_size: int  # N
    layers: tuple[StateShape, ...]
    # Layer with K/V → the bytes of a quantized block and of a full-precision slot on the backend, all KV heads. Layers
    # that are absent have no padding.
    stored: Mapping[int, tuple[int, int]] = field(default_factory=dict, hash=False)
    has_host: bool = False  # whether snapshots are in the computer's memory, and all else in a GPU's memory

    def format(self, layer: int, metric_k: Metric | None = None, metric_v: Metric | None = None) -> CacheFormat:
        """Return the format of the cache of a layer with K/V, for the ops."""
        return self.kv_layers[layer].format(self.block_size, metric_k, metric_v)

    @property
    def recent_blocks(self) -> int:
        """How many of a sequence's newest complete blocks are in full precision, where there is room."""
        return max((layer.recent_blocks for layer in self.layers), default=0)

    def as_type(self, name: str) -> CacheShape:
        """The shape if all K/V had this type, without a backend's padding."""
        codec = codecs.get(name)
        layers = (
            replace(
                layer,
                codec_k=codec,
                codec_v=layer.codec_v and codec,
                mean_bits=layer.mean_bits if codecs.is_quantized(codec) else 0,
            )
            if isinstance(layer, LayerShape)
            else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers), stored={})

    @property
    def widest(self) -> CacheFormat:
        """The format of a layer with the most K/V values per token."""
        layers = self.kv_layers
        return self.format(max(layers, key=lambda layer: layers[layer].values))

    @cached_property
    def kv_layers(self) -> dict[int, LayerShape]:
        """The number of each layer with K/V → its shape."""
        return {number: layer for number, layer in enumerate(self.layers) if isinstance(layer, LayerShape)}

    def source(self, layer: int) -> int:
        """Return the layer whose state a layer reads: itself, unless it is shared."""
        shape = self.layers[layer]
        if not isinstance(shape, SharedShape):
            return layer
        return max(n for n, other in self.kv_layers.items() if n < layer and other.group == shape.group)

    @cached_property
    def groups(self) -> tuple[tuple[int | None, tuple[int, ...]], ...]:
        """(window, layers) of each group. The layers of a group share block tables and have heads of one shape."""
        members: dict[Hashable, list[int]] = {}
        for index, layer in enumerate(self.layers):
            members.setdefault(layer.group, []).append(index)
        return tuple((self.layers[layers[0]].window, tuple(layers)) for layers in members.values())

    def quantized_bytes(self, layers: Iterable[int]) -> int:
        """Return the bytes of a quantized block, summed over `layers`."""
        stored, plain = self.stored, self._quantized_bytes
        return sum(stored[layer][0] if layer in stored else plain[layer] for layer in layers)

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
        """Return the bytes of a sequence of `tokens`: its quantized blocks, and those in full precision. Blocks outside
        a layer's window do not count."""
        blocks = self._blocks(tokens)
        return sum(
            codes * self.quantized_bytes(layers) + full * self.full_bytes(layers) for layers, codes, full in blocks
        )

    def f16_bytes(self, tokens: int) -> int:
        """Return the bytes of the same blocks in half precision. The block that is being filled counts as a whole in
        both, so the difference is what the codecs save."""
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

    def bits_of_text(self, tokens: int) -> float:
        """Return the bits per value of K/V of the complete blocks of a text of `tokens` but its first one, of which the
        recent ones have 16."""
        blocks = max(1, tokens // self.block_size - 1)
        recent = min(blocks, self.recent_blocks)
        return (16 * recent + self.bits_per_value * (blocks - recent)) / blocks

    def quantized_blocks(self, tokens: int) -> tuple[int, ...]:
        """Return how many quantized blocks a sequence needs until it has `tokens`, per group."""
        return tuple(self.layers[layers[0]].needed_blocks(tokens, self.block_size) for _, layers in self.groups)

    def blocks_of_kv(self, blocks: tuple[int, ...]) -> int:
        """Return the sum of `blocks`, numbers for each group, over the groups that have K/V."""
        return sum(count for (_, layers), count in zip(self.groups, blocks, strict=True) if layers[0] in self.kv_layers)

    def more_blocks(self, full_slots: int, more: int) -> tuple[int, ...]:
        """Return how many quantized blocks a store has besides those that its longest sequence needs, per group."""
        return tuple(self.layers[layers[0]].more_blocks(full_slots, more) for _, layers in self.groups)

    def bytes(
        self,
        quantized_blocks: tuple[int, ...],
        full_slots: int,
        more: int = 0,
        recent: int = 0,
        of: Container[int] | None = None,
    ) -> int:
        """Return the bytes of a store with `quantized_blocks` per group, and slots as for `StateShape.slots`, without
        what is in the memory of a GPU's host. of: the layers to count; None for all."""
        total = 0
        for (_, layers), count in zip(self.groups, quantized_blocks, strict=True):
            shape, counted = self.layers[layers[0]], [layer for layer in layers if of is None or layer in of]
            total += shape.slots(full_slots, more, recent) * self.full_bytes(counted)
            if not (self.has_host and shape.is_sparse):
                total += count * self.quantized_bytes(counted)
        return total

    def snapshot_bytes(self, quantized_blocks: tuple[int, ...]) -> int:
        """Return the bytes of the snapshots among `quantized_blocks`."""
        blocks = zip(self.groups, quantized_blocks, strict=True)
        sparse = ((layers, count) for (_, layers), count in blocks if self.layers[layers[0]].is_sparse)
        return sum(count * self.quantized_bytes(layers) for layers, count in sparse)
