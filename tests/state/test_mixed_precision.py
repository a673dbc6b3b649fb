"""A store with two kinds of blocks: attention reads each block as it was coded last, on both backends of a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import select
from polarlm.engine.backends.transfer import FIELDS, convert_blocks
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.quantization.encode import decode_centred, encode_centred
from polarlm.engine.state.layer_shapes import HighPrecisionKind, LayerShape
from polarlm.engine.state.plan import plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore
from tests.state.fed import KV_HEADS, D, Fed, held, plan_for_sequences
from tests.state.reference import attention

N, LAYERS = 16, 2
QUALITY = codecs.get("ring5"), codecs.get("ring4")
BY_AGE, ALL_NEWEST = HighPrecisionKind(*QUALITY), HighPrecisionKind(*QUALITY, newest=999)
NEWEST = BY_AGE.newest
COMPACT = codecs.get("ring3"), codecs.get("ring3.5")
_SIDES = "k.", "mean.", "v."


@pytest.fixture(params=["numpy", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    ops = NumpyOps() if request.param == "numpy" else select("cpu", 1)[0]
    if ops.backend != request.param:
        pytest.skip("llvmlite is missing")
    return ops


def make_store(ops: Ops, tokens: int, codec=COMPACT, high_precision=None) -> KVStore:
    layer = LayerShape(*codec, KV_HEADS, D, 8, high_precision=high_precision)
    stored = dict.fromkeys(range(LAYERS), ops.cache_bytes(layer.format(N)))
    shape = CacheShape(N, (layer,) * LAYERS, stored)
    return KVStore(ops, plan_for_tokens(shape, tokens, 4), [Conditioning()] * LAYERS)


def contents(store: KVStore, layer: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """What a block decodes to: k, v (N, K, D)."""
    place, cache = store.mixed_precision.blocks.placement[block], store.cache(layer)
    own = cache.high_precision if place.is_high_precision else cache
    stored = convert_blocks(own.format, 1, store.ops.read_blocks(own, [place.number]), FIELDS)
    sides = [{name.removeprefix(side): x for name, x in stored.items() if name.startswith(side)} for side in _SIDES]
    k, mean, v = ({name: x[0] for name, x in side.items()} for side in sides)
    k, v = decode_centred(own.format.codec_k, k, mean), decode_centred(own.format.codec_v, v, {})
    return k.swapaxes(0, 1), v.swapaxes(0, 1)


def decode(store: KVStore, layer: int, block: int) -> list[np.ndarray]:
    """What coding a high-precision block again begins with: k, v (K, N, D) float32."""
    cache, ops = store.cache(layer).high_precision, store.ops
    buffer = ops.decode_blocks(cache, [store.mixed_precision.blocks.placement[block].number])
    if not isinstance(ops, CudaOps):
        return [side.copy() for side in buffer]
    sides = zip(cache.full_layouts, map(ops._device.to_host, cache.pools(buffer)), strict=True)
    return [layout.unpack(records[0])[0]["values"].astype(np.float32) for layout, records in sides]


class Unchecked(Fed):
    def check(self, *given) -> None:
        """Nothing."""


class Checked(Fed):
    """A sequence whose attention is that over what its blocks decode to."""

    def check(self, out, q, k, v, start, position, layer) -> None:
        k, v = k.astype(np.float64), v.astype(np.float64)
        for number, block in enumerate(self.kv.tables[0].quantized, 1):
            own = slice(number * N, (number + 1) * N)
            k[own], v[own] = contents(self.store, layer, block)
        # Compiled kernels read codes with queries of 8 bits, and sum the values' weights in 8 bits.
        tolerance = 2e-5 if self.store.ops.backend == "numpy" else 0.03
        np.testing.assert_allclose(out, attention(q, k, v, position, 0.3, None), atol=tolerance)


def test_the_newest_blocks_alone_are_a_store_of_more_bits(ops: Ops) -> None:
    kinds = (2048, COMPACT, ALL_NEWEST), (2048, QUALITY)
    newest, quality = (Unchecked(make_store(ops, *given)) for given in kinds)
    for count, chunk, step in [(40, None, False), (1, None, True), (100, 7, False), (5, None, True), (50, None, False)]:
        both = [fed.feed(count, chunk, step=step) for fed in (newest, quality)]
        np.testing.assert_array_equal(*both)
    assert newest.store.mixed_precision.blocks.placement.counts() == (196 // N - 1, 0)
    assert newest.store.bytes_held(newest.kv) == quality.store.bytes_held(quality.kv)


def test_attention_reads_each_block_as_it_was_coded_last(ops: Ops) -> None:
    store = make_store(ops, 800, COMPACT, ALL_NEWEST)
    sequences = [Checked(store, seed) for seed in range(2)]
    rng, seen = np.random.default_rng(0), set()
    while sum(fed.kv.length for fed in sequences) < 640:
        fed = sequences[rng.integers(2)]
        fed.feed(int(rng.integers(30, 90)))
        for _ in range(1):
            fed.feed(1, step=True)
        for _ in range(rng.integers(4) if fed.kv.length > 10 * N else 0):
            store.mixed_precision.requantize()
        high_precision, others = store.mixed_precision.blocks.placement.counts()
        seen.add((high_precision > 0, others > 0))
        assert high_precision + others == sum(len(fed.kv.tables[0].quantized) for fed in sequences)
    assert {(True, False), (True, True)} <= seen
    while store.mixed_precision.requantize():
        pass
    for fed in sequences:
        fed.feed(3, step=True)
        store.release(fed.kv)
    assert store.mixed_precision.blocks.placement.counts() == (0, 0)
    assert held(store) == [(0, 0)]


def test_a_block_is_requantized_from_what_it_decodes_to(ops: Ops) -> None:
    fed = Unchecked(make_store(ops, 800, COMPACT, ALL_NEWEST))
    fed.feed((NEWEST + 4) * N)
    first, *others = fed.kv.tables[0].quantized
    before = [[contents(fed.store, layer, block) for block in (first, *others)] for layer in range(LAYERS)]
    decoded = [decode(fed.store, layer, first) for layer in range(LAYERS)]
    assert fed.store.mixed_precision.requantize()  # the oldest
    assert not fed.store.mixed_precision.blocks.placement[first].is_high_precision
    for layer in range(LAYERS):
        for own, given in zip(decoded[layer], before[layer][0], strict=True):
            np.testing.assert_allclose(own, given.swapaxes(0, 1), rtol=1e-6, atol=1e-6)
        k, v = (np.ascontiguousarray(x[:, None]) for x in decoded[layer])
        expected = (
            decode_centred(COMPACT[0], *encode_centred(COMPACT[0], k, None, 8)),
            decode_centred(COMPACT[1], encode_centred(COMPACT[1], v, None)[0], {}),
        )
        for own, given in zip(contents(fed.store, layer, first), expected, strict=True):
            np.testing.assert_allclose(own.swapaxes(0, 1), given[:, 0], atol=1e-5)
        for block, given in zip(others, before[layer][1:], strict=True):
            np.testing.assert_array_equal(contents(fed.store, layer, block), given)


def test_by_age_the_newest_blocks_alone_are_high_precision(ops: Ops) -> None:
    """In prompts and in steps. Older blocks are due for coding at once, and no others."""
    store = make_store(ops, 800, COMPACT, BY_AGE)
    sequences, rng = [Checked(store, seed) for seed in range(2)], np.random.default_rng(0)
    while sum(fed.kv.length for fed in sequences) < 640:
        fed = sequences[rng.integers(2)]
        fed.feed(int(rng.integers(1, 90)))
        fed.feed(int(rng.integers(1, 4)), step=True)
        assert store.mixed_precision.blocks.has_due == (
            store.mixed_precision.blocks.placement.counts()[0] > newest(store, sequences)
        )
        store.mixed_precision.requantize_aged()
        assert not store.mixed_precision.blocks.has_due
        assert store.mixed_precision.blocks.placement.counts()[0] == newest(store, sequences)
    kept, released = sequences
    store.release(released.kv)
    assert store.mixed_precision.blocks.placement.counts()[0] == newest(store, [kept])


def test_blocks_of_several_sequences_age_together(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no step may read any more at once; then, while the last of the newest blocks is still read, a layer at a
    step, until it is ready."""
    store = make_store(ops, 800, COMPACT, BY_AGE)
    sequences = [Unchecked(store, seed) for seed in range(3)]
    for fed in sequences:
        fed.feed((NEWEST + 1) * N)
        fed.feed(2 * N)
    calls, encode = list[list[int]](), ops.encode_blocks
    monkeypatch.setattr(
        ops, "encode_blocks", lambda filled: calls.append([len(f.blocks) for f in filled]) or encode(filled)
    )
    store.mixed_precision.requantize_aged()
    assert calls == [[len(sequences) * 2] * LAYERS, [len(sequences)]]
    assert store.mixed_precision.blocks.placement.counts()[0] == newest(store, sequences)
    calls.clear()
    for _ in range(N):
        for fed in sequences:
            fed.feed(1, step=True)
        written = len(calls)
        store.mixed_precision.requantize_aged()
        assert calls[written:] in ([], [[len(sequences)]])
        assert store.mixed_precision.blocks.placement.counts()[0] == newest(store, sequences)
    aged = [calls[number] for number in range(len(calls)) if calls[number] == [len(sequences)]]
    assert len(aged) == LAYERS  # of one block the rest, and of the next one the first


@pytest.mark.parametrize("most", [5, 2, 1])
def test_fewer_blocks_and_layers_are_coded_together_without_memory(
    ops: Ops, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """For what they decode to: `most` blocks of a layer at the same time. The codes are the same."""
    stores = [make_store(ops, 800, COMPACT, BY_AGE) for _ in range(2)]
    sequences = [[Unchecked(store, seed) for seed in range(3)] for store in stores]
    for fed in (*sequences[0], *sequences[1]):
        fed.feed((NEWEST + 3) * N)
    stores[0].mixed_precision.requantize_aged()
    alive, decode_blocks = list[Any](), ops.decode_blocks

    def limited(cache: Any, blocks: Sequence[int]) -> Any:
        alive[:] = [one for one in alive if one[0]() is not None]
        if sum(count for _, count in alive) + len(blocks) > most:
            raise MemoryError
        buffer = decode_blocks(cache, blocks)
        alive.append((weakref.ref(buffer[0]), len(blocks)))
        return buffer

    monkeypatch.setattr(ops, "decode_blocks", limited)
    stores[1].mixed_precision.requantize_aged()
    assert stores[1].mixed_precision.blocks.placement.counts() == stores[0].mixed_precision.blocks.placement.counts()
    monkeypatch.setattr(ops, "decode_blocks", decode_blocks)
    for one, other in zip(*sequences, strict=True):
        for a, b in zip(one.kv.tables[0].quantized, other.kv.tables[0].quantized, strict=True):
            for x, y in zip(contents(stores[0], 1, a), contents(stores[1], 1, b), strict=True):
                np.testing.assert_array_equal(x, y)


def newest(store: KVStore, sequences: list[Fed]) -> int:
    """How many blocks are the newest of a sequence. All of these must be high-precision."""
    blocks = [block for fed in sequences for block in fed.kv.tables[0].quantized[-NEWEST:]]
    assert all(map(store.mixed_precision.is_high_precision, blocks))
    return len(blocks)


def test_by_age_the_room_for_the_newest_blocks_is_planned(ops: Ops) -> None:
    """As many sequences as the plan is for, and each of its tokens, without giving up their newest blocks."""
    layer = LayerShape(*COMPACT, KV_HEADS, D, 8, high_precision=BY_AGE)
    shape = CacheShape(N, (layer,) * LAYERS, dict.fromkeys(range(LAYERS), ops.cache_bytes(layer.format(N))))
    store = KVStore(ops, plan_for_sequences(shape, 10 * N, 4), [Conditioning()] * LAYERS)
    sequences = [Unchecked(store, seed) for seed in range(4)]
    for _ in range(10):
        for fed in sequences:
            fed.feed(N)
            store.mixed_precision.requantize_aged()
    assert store.mixed_precision.blocks.placement.counts() == (4 * NEWEST, 4 * (9 - NEWEST))
    newest(store, sequences)


def test_an_error_while_a_block_is_requantized_leaves_it_as_it_was(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Unchecked(make_store(ops, 800, COMPACT, ALL_NEWEST))
    fed.feed((NEWEST + 4) * N)
    blocks, placement = fed.kv.tables[0].quantized, fed.store.mixed_precision.blocks.placement
    before = [contents(fed.store, LAYERS - 1, block) for block in blocks]
    with monkeypatch.context() as patched:
        patched.setattr(ops, "encode_blocks", lambda filled: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fed.store.mixed_precision.requantize()
    assert all(placement[block].is_high_precision for block in blocks)
    for block, given in zip(blocks, before, strict=True):
        np.testing.assert_array_equal(contents(fed.store, LAYERS - 1, block), given)
    assert fed.store.mixed_precision.requantize()  # it goes on
    assert placement.counts() == (len(blocks) - 1, 1)
    assert not placement.targets


def test_a_block_is_written_to_the_kind_that_there_is_room_for(ops: Ops) -> None:
    """A high-precision block stays one where its place is one, and else is requantized; another one is never
    high-precision."""
    for held_high_precision in (True, False):
        fed = Unchecked(make_store(ops, 800, COMPACT, ALL_NEWEST))
        fed.feed((NEWEST + 4) * N)
        high_precision, blocks = fed.store.mixed_precision, fed.kv.tables[0].quantized
        copied, target = blocks[0], blocks[2]
        given, exact = high_precision.read_blocks([copied]), contents(fed.store, 0, copied)
        assert high_precision.requantize()
        assert not high_precision.is_high_precision(copied)
        low_precision, again = high_precision.read_blocks([copied]), contents(fed.store, 0, copied)
        while high_precision.is_high_precision(target) and not held_high_precision:
            high_precision.requantize()
        high_precision.write_high_precision([target], given)
        for own, expected in zip(contents(fed.store, 0, target), exact if held_high_precision else again, strict=True):
            np.testing.assert_allclose(own, expected, atol=0 if held_high_precision else 1e-6)
        high_precision.write_blocks([target], low_precision)
        assert not high_precision.is_high_precision(target)
        for own, expected in zip(contents(fed.store, 0, target), again, strict=True):
            np.testing.assert_array_equal(own, expected)
        fed.store.release(fed.kv)
        assert high_precision.blocks.placement.counts() == (0, 0)
        assert held(fed.store) == [(0, 0)]
