"""The arrays in a snapshot, for comparisons."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.state.store import KVStore, SequenceKV
from polarlm.engine.storage.copies import Snapshot, export
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.payloads import Payloads


def block_arrays(payloads: Payloads, block: Object, stored_as: str | None = None) -> dict[tuple[int, str], np.ndarray]:
    """(layer, name) → array (K, …); quantized blocks are converted to `stored_as` if it is given."""
    arrays = {(one.layer, one.name): one.stack([block]) for one in payloads.extents(block)}
    if stored_as is not None and not block.is_full:
        layers = {layer: {name: x for (number, name), x in arrays.items() if number == layer} for layer, _ in arrays}
        arrays = {
            (layer, name): x
            for layer, of_layer in layers.items()
            for name, x in transfer.convert_blocks(payloads.shape.format(layer), 1, of_layer, stored_as).items()
        }
    return {key: array[0] for key, array in arrays.items()}


def arrays_of(store: KVStore, saved: Snapshot, stored_as: str | None = None) -> dict[tuple[int, int, str], np.ndarray]:
    """(number of a block, layer, name) → array, for all blocks; see `block_arrays`."""
    payloads = Payloads(store.shape)
    every = ((number, block) for number, blocks in saved.blocks.items() for block in blocks)
    blocks = ((number, block_arrays(payloads, block, stored_as)) for number, block in every)
    return {(number, *key): array for number, arrays in blocks for key, array in arrays.items()}


def stored(
    store: KVStore, sequence: SequenceKV, stored_as: str | None = None
) -> dict[tuple[int, int, str], np.ndarray]:
    """The arrays of all that the store holds of a sequence, whose ids do not matter."""
    return arrays_of(store, export(store, sequence, [0] * sequence.length), stored_as)


def assert_same(a: dict[tuple[int, int, str], np.ndarray], b: dict[tuple[int, int, str], np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_array_equal(a[key], b[key], err_msg=str(key))
