"""Blocks of a GPU's store as objects of tiers: a CPU reads them, and a GPU reads those of a CPU."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from polarlm.engine.backends import transfer
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.state.store import KVStore
from polarlm.engine.storage.copies import put, take_blocks, take_full
from polarlm.engine.storage.objects import unpack
from polarlm.engine.storage.payloads import Payloads
from tests.cuda.emulated import open_device
from tests.cuda.test_model_emulated import SameWeights, model_of
from tests.cuda.test_stored import talk
from tests.storage.arrays import of_block

FIXTURE, TYPES = "qwen2_mixed_windows", ("ring4", "ring3.5")
NAME = bytes(16)


def fields(store: KVStore, layer: int, blocks: list[int]) -> Mapping[str, np.ndarray]:
    arrays = store.ops.read_blocks(store.cache(layer), blocks)
    return transfer.converted(store.shape.format(layer), len(blocks), arrays, transfer.FIELDS)


@pytest.mark.parametrize("gpu_first", [True, False])
def test_codes_are_the_same_on_the_other_device(gpu_first: bool) -> None:
    device = CudaOps(open_device(checked=False))
    both = [device, SameWeights(device)]
    here, there = both if gpu_first else both[::-1]
    dialogue = talk(here, TYPES, FIXTURE)
    store, kv, other = dialogue.model.store, dialogue.sequences[0], model_of(there, FIXTURE, TYPES).store
    n = store.shape.block_size
    known = [[table.block(number) for table in kv.tables] for number in range(1, kv.length // n)]
    blocks = [own for own in known if None not in own]
    assert blocks
    found = [unpack(NAME, b"".join(one.pack(NAME))) for one in take_blocks(store, Payloads(store.shape), blocks)]
    for one in found:
        Payloads(other.shape).check_block(one)
        assert one.header["stored_as"] == store.ops.stored_as
    target = [group.quantized.allocate(len(blocks)) for group in other.groups]
    places = [[own[number] for own in target] for number in range(len(blocks))]
    put(other, Payloads(other.shape), places, found)
    for layer in range(len(store.shape.layers)):
        group = store.group_of(layer)
        given = fields(store, layer, [own[group] for own in blocks if own[group] is not None])
        for name, array in fields(other, layer, target[group]).items():
            np.testing.assert_array_equal(array, given[name], err_msg=f"{layer}.{name}")


def test_a_block_in_full_precision_of_a_gpu_has_half_precision() -> None:
    device = CudaOps(open_device(checked=False))
    dialogue = talk(device, TYPES, FIXTURE)
    store, kv = dialogue.model.store, dialogue.sequences[0]
    tokens = kv.length % store.shape.block_size
    payloads = Payloads(store.shape)
    block = take_full(store, payloads, [table.current for table in kv.tables], list(range(tokens)))
    assert payloads.check_full(unpack(NAME, b"".join(block.pack(NAME)))) == tuple(range(tokens))
    assert {array.dtype for array in of_block(payloads, block).values()} == {np.dtype(np.float16)}
