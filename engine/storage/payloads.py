"""Blocks of K/V as objects: the positions of all layers' arrays in a payload, and checks of payloads.

    "block"    a quantized block. "stored_as" is the representation of its arrays, see `engine.backends.transfer`
    "finer"    likewise, as linear8: a recent block of an earlier version, which becomes one in full precision
    "full"     a block in full precision with 1 to N tokens, whose ids are "ids"

"groups" says, as bits, which groups of layers have arrays: in other groups, the block has left the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.state.layer_shapes import ArraySpec, StateShape
from polarlm.engine.state.layer_state import BlockArrays
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.storage.objects import DamagedObject, Object
from polarlm.model_loaders.forks import cached_property

_ALIGNMENT = 8  # bytes; every array starts at a multiple of it
_NOT_FINITE = "not all of its numbers are finite"


@dataclass(frozen=True)
class Extent:
    """Where one array of a layer lies in a payload. shape: shape in one block, (K, …)."""

    layer: int
    name: str
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def view_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return this array of every payload in `rows` (B, bytes) uint8: a view (B, K, …)."""
        return rows[:, self.start : self.stop].view(self.dtype).reshape(len(rows), *self.shape)

    def stack(self, objects: Sequence[Object]) -> np.ndarray:
        """Return this array of B objects (B, K, …): a view of a single one, a copy of several."""
        pieces = [one.payload[self.start : self.stop] for one in objects]
        content = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return content.view(self.dtype).reshape(len(objects), *self.shape)


class Payloads:
    """The payloads of all kinds of blocks of a store of this shape."""

    def __init__(self, shape: CacheShape):
        self.shape = shape
        self._layouts: dict[tuple[object, ...], tuple[list[Extent], int]] = {}
        self._masks: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}

    @cached_property
    def every_group(self) -> int:
        return (1 << len(self.shape.groups)) - 1

    def quantized_extents(self, stored_as: str, groups: int) -> tuple[list[Extent], int]:
        """Return the extents of a quantized block's payload, and its bytes. Raises ValueError if a layer lacks them."""
        return self._lay_out(groups, lambda layer: layer.block_arrays(self.shape.block_size, stored_as), stored_as)

    def full_extents(self, tokens: int, groups: int) -> tuple[list[Extent], int]:
        """Return the extents of a full-precision block's payload, and its size in bytes."""
        return self._lay_out(groups, lambda layer: layer.full_arrays(tokens), tokens)

    def extents(self, block: Object) -> list[Extent]:
        """Return the extents of the payload of a block that has been checked."""
        return self._place(block)[0]

    def _lay_out(
        self, groups: int, specs: Callable[[StateShape], list[ArraySpec]], kind: object
    ) -> tuple[list[Extent], int]:
        """Return the extents of a payload with the arrays `specs` of each layer, and its size; cached by `kind`."""
        if (kind, groups) not in self._layouts:
            extents: list[Extent] = []
            start = 0
            for group, (_, layers) in enumerate(self.shape.groups):
                for layer in layers if groups >> group & 1 else ():
                    for name, shape, dtype in specs(self.shape.layers[layer]):
                        extents.append(Extent(layer, name, start, shape, dtype))
                        start = -(-extents[-1].stop // _ALIGNMENT) * _ALIGNMENT
            self._layouts[kind, groups] = extents, start
        return self._layouts[kind, groups]

    def _exponents(self, stored_as: str, groups: int) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays with a uint16 for each word of a quantized block's payload: a mask of the bits that are an
        exponent, and the value of these bits in a number that is not finite. For words without a number the value is 1,
        which no masked word has."""
        key = stored_as, groups
        if key not in self._masks:
            extents, size = self.quantized_extents(stored_as, groups)
            mask = np.zeros(size, np.uint8)
            for extent in extents:
                if extent.layer in self.shape.kv_layers:
                    bits = transfer.exponents(self.shape.format(extent.layer), stored_as)
                    mask[extent.start : extent.stop] = bits[extent.name]
                elif extent.dtype.kind == "f":
                    extent.view_rows(mask[None])[...] = np.inf
            words = mask.view(np.uint16)
            self._masks[key] = words, np.where(words, words, np.uint16(1))
        return self._masks[key]

    # -- checks ------------------------------------------------------------------------------------------------

    def check_block(self, block: Object) -> None:
        """Raises DamagedObject unless `block` is a quantized block of this shape whose numbers are all finite."""
        groups, stored_as = self._check_groups(block, "block"), str(block.header.get("stored_as"))
        try:
            _, size = self.quantized_extents(stored_as, groups)
        except ValueError as error:
            raise DamagedObject(str(error)) from None
        _check_size(block, size)
        bits, infinite = self._exponents(stored_as, groups)
        if (block.payload.view(np.uint16) & bits == infinite).any():
            raise DamagedObject(_NOT_FINITE)

    def check_full(self, block: Object) -> tuple[int, ...]:
        """Return the token ids of `block`, a full-precision block. Raises DamagedObject as `check_block` does."""
        groups, ids = self._check_groups(block, "full"), block.ids
        if not 0 < len(ids) <= self.shape.block_size:
            raise DamagedObject("it has no tokens, or too many")
        extents, size = self.full_extents(len(ids), groups)
        _check_size(block, size)
        if not all(np.isfinite(extent.stack([block])).all() for extent in extents):
            raise DamagedObject(_NOT_FINITE)
        return ids

    def widen(self, block: Object, ids: Sequence[int]) -> list[Object]:
        """Return the block with the tokens `ids` that a "finer" object has: in full precision, and what recurrent
        layers have of it. Raises DamagedObject."""
        kv, every = self.shape.kv_layers, enumerate(self.shape.groups)
        payloads = Payloads(self.shape.as_type("linear8"))
        codes = Object({**block.header, "kind": "block"}, block.payload)
        payloads.check_block(codes)
        attention = block.groups & sum(1 << bit for bit, (_, layers) in every if layers[0] in kv)
        others, extents = block.groups & ~attention, payloads.extents(codes)
        arrays = {(extent.layer, extent.name): extent.stack([codes]) for extent in extents}
        for layer in {extent.layer for extent in extents} & kv.keys():
            own = {name: array for (number, name), array in arrays.items() if number == layer}
            sides = transfer.decode_block(payloads.shape.format(layer), own)
            arrays |= {(layer, side): x.swapaxes(0, 1) for side, x in zip("kv", sides, strict=True)}
        widened = [
            Object({"kind": "full", "groups": attention, "ids": [*ids]}),
            Object({**codes.header, "groups": others}),
        ]
        return [replace(one, payload=join(*self._place(one), arrays)[0]) for one in widened if one.groups]

    def _place(self, block: Object) -> tuple[list[Extent], int]:
        """Return the extents of a block's payload, and its size."""
        if block.is_full:
            return self.full_extents(len(block.ids), block.groups)
        return self.quantized_extents(block.header["stored_as"], block.groups)

    def _check_groups(self, block: Object, kind: str) -> int:
        """Return the groups of an object. Raises DamagedObject if it is not of this kind."""
        groups = block.header.get("groups")
        if block.header.get("kind") != kind or type(groups) is not int or not 0 < groups <= self.every_group:
            raise DamagedObject("it is another object")
        return groups


def join(extents: Sequence[Extent], size: int, arrays: BlockArrays, count: int = 1) -> np.ndarray:
    """Return the payloads (B, size) of `count` blocks. arrays: by layer and name (B, K, …), or of one block (K, …)."""
    rows = np.zeros((count, size), np.uint8)
    for extent in extents:
        extent.view_rows(rows)[...] = arrays[extent.layer, extent.name]
    return rows


def _check_size(block: Object, size: int) -> None:
    if len(block.payload) != size:
        raise DamagedObject("it has another size")
