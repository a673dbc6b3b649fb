"""Two kinds of blocks in one memory of a GPU: what attention reads, what is coded again, and whole engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.backends.cuda.kv.cache import LayerCache
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.transfer import FIELDS, converted
from polarlm.engine.quantization.encode import encode_centred
from polarlm.engine.state.finer.blocks import FinerBlocks
from polarlm.engine.state.store import KVStore
from tests.cuda.emulated import EmulatedDevice, _program, open_device
from tests.state.fed import HEADS, KV_HEADS, D, Fed
from tests.state.reference import attention
from tests.state.test_finer_blocks import BY_ROOM, COMPACT, LAYERS, N, contents, make_store
from tests.tiny import load_tiny, make_model


class Shuffled(EmulatedDevice):
    """A device with some multiprocessors, whose blocks run in an order of their own, with every check on."""

    def __init__(self, processors: int, seed: int) -> None:
        super().__init__()
        self.processors, self._seed = processors, seed

    def launch(self, kernel: str, text: str, grid, block, args: Sequence[Any], shared: int = 0) -> None:
        assert kernel == "decode_two_kinds_kernel"
        _program(text, True).launch(kernel, grid, block, *args, shared=shared, seed=self._seed)


class Plain(Fed):
    """A sequence of which nothing is checked."""

    def check(self, *given: Any) -> None:
        """Nothing."""


def sequences(ops: Ops) -> list[Plain]:
    """Sequences without quantized blocks, of finer ones alone, of both kinds, and of the others alone."""
    store = make_store(ops, 800, COMPACT, BY_ROOM)
    found = [Plain(store, seed) for seed in range(4)]
    for fed, tokens in zip(found, (5, 4 * N, 9 * N + 3, 6 * N), strict=True):
        fed.feed(tokens)
    places = store.finer.blocks.places
    wanted = [*found[2].kv.tables[0].quantized[::2], *found[3].kv.tables[0].quantized]
    for block in wanted:  # whatever their age
        places.begin(block)
        store.finer.code_again()
    kinds = [{store.finer.is_finer(block) for block in fed.kv.tables[0].quantized} for fed in found]
    assert kinds == [set(), {True}, {True, False}, {False}]
    return found


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("processors", "rows"), [(1, 1), (6, 1), (40, 1), (6, 3)])
def test_a_step_attends_to_blocks_of_both_kinds(processors: int, rows: int) -> None:
    """Any number of CTAs, in any order, and a row that pads the batch; results are the same to the bit in any order."""
    ops = CudaOps(open_device(checked=False))
    found = sequences(ops)
    store, rng, results = found[0].store, np.random.default_rng(0), []
    spans = [store.open_step(fed.kv, rows) for fed in found]
    q, k, v = (rng.standard_normal((rows * len(found), heads, D), np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    k, v = (x.astype(np.float16).astype(np.float32) for x in (k, v))
    views = [
        store.view(0, span, slice(rows * number, rows * (number + 1)), span.start) for number, span in enumerate(spans)
    ]
    table = ops.spans(views, N)
    ops.append_kv(store.cache(0), table, ops.to_device(k), ops.to_device(v))
    given = q
    if rows == 1:
        table, given = table.filled_up(len(found) + 1), np.concatenate([q, q[:1]])
    for seed in (0, 1, 2):
        on = CudaOps(Shuffled(processors, seed)) if isinstance(ops._device, EmulatedDevice) else ops
        results.append(on.to_host(on.attention(on.to_device(given), store.cache(0), table, 0.3, None)))
        np.testing.assert_array_equal(results[-1], results[0])
    for number, fed in enumerate(found):
        own = slice(rows * number, rows * (number + 1))
        seen_k, seen_v = (np.concatenate(pair).astype(np.float64) for pair in ((fed.k, k[own]), (fed.v, v[own])))
        for at, block in enumerate(fed.kv.tables[0].quantized, 1):
            seen_k[at * N : (at + 1) * N], seen_v[at * N : (at + 1) * N] = contents(store, 0, block)
        # Queries, weights and what codes stand for are rounded to half precision.
        expected = attention(q[own], seen_k, seen_v, fed.kv.length, 0.3, None)
        np.testing.assert_allclose(results[0][own], expected, atol=0.005)
    assert not results[0][rows * len(found) :].any()


def test_codes_are_those_of_numpy() -> None:
    """Of blocks of both kinds, and of one that is coded again from what it decodes to; what lies between fields is
    read as zeros, whatever the memory was before."""
    stores = [make_store(ops, 800, COMPACT, BY_ROOM) for ops in (CudaOps(open_device()), NumpyOps())]
    for layer in range(LAYERS):
        stores[0].cache(layer).blocks[...] = 0xFF
    for store in stores:
        fed = Plain(store, 3)
        fed.feed(7 * N)
    blocks, (device, host) = fed.kv.tables[0].quantized, stores
    fields = [fields_of(store, blocks[0]) for store in stores]
    found = fields_of(device, blocks[0])
    number = device.finer.blocks.places[blocks[0]].number
    k, v = halves(device.ops, device.cache(1).finer, number)
    for x, exact in zip((k, v), contents(device, 1, blocks[0]), strict=True):
        # Points, norms and means are rounded to halves, and so is what they give.
        np.testing.assert_allclose(x, exact.swapaxes(0, 1), rtol=2**-9, atol=2**-9)
    for store in stores:
        assert store.finer.code_again()
    for block in blocks[1:]:
        for name, array in fields_of(device, block).items():
            np.testing.assert_array_equal(array, fields_of(host, block)[name], err_msg=name)
    assert fields[0].keys() == fields[1].keys() == found.keys()
    cache, coded = device.cache(1), fields_of(device, blocks[0])
    mean = {name.removeprefix("mean."): x for name, x in coded.items() if name.startswith("mean.")}
    again = encode_centred(COMPACT[0], k[:, None], None, 8), encode_centred(COMPACT[1], v[:, None], None)
    expected = {f"{side}.{name}": x for side, (own, _) in zip("kv", again, strict=True) for name, x in own.items()}
    expected |= {f"mean.{name}": x for name, x in again[0][1].items()}
    assert mean
    for name, array in coded.items():
        np.testing.assert_array_equal(array, expected[name].swapaxes(0, 1), err_msg=name)
    raw = device.ops.read_blocks(cache, [device.finer.blocks.places[blocks[0]].number])
    for name, layout in zip(("keys", "values"), cache.layouts, strict=True):
        np.testing.assert_array_equal(raw[name], layout.pack(*layout.unpack(raw[name])))


def fields_of(store: KVStore, block: int) -> dict[str, np.ndarray]:
    """The fields of a block of the second layer."""
    place = store.finer.blocks.places[block]
    own = store.cache(1).finer if place.is_finer else store.cache(1)
    return converted(own.format, 1, store.ops.read_blocks(own, [place.number]), FIELDS)


def halves(ops: CudaOps, cache: LayerCache, number: int) -> list[np.ndarray]:
    """What a block decodes to: k, v (K, N, D) float32."""
    buffer = ops.decode_blocks(cache, [number])
    sides = zip(buffer, cache.full_layouts, strict=True)
    return [layout.unpack(ops._device.to_host(x))[0]["values"][0].astype(np.float32) for x, layout in sides]


GREEDY = SamplingParams(max_tokens=2 * N + 5, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("cache_type", ["by-age", "auto"])
def test_an_engine_answers_as_on_the_cpu(tmp_path: Path, cache_type: str) -> None:
    """Blocks are coded again between the steps of an answer; a session and a second turn go on with what there is."""
    path = make_model(tmp_path, "llama_gqa_llama3_tied")
    settings: dict[str, Any] = {"block_size": N, "ctx_size": 256, "calibration": False, "cache_type": cache_type}
    prompt = [5 + 7 * i % 90 for i in range(7 * N + 3)]
    found: list[list[float]] = []
    for ops in (NumpyOps(), CudaOps(open_device(checked=False))):
        with load_tiny(path, ops=ops, **settings) as engine:
            finer, logprobs = engine._store.finer, []
            chunks = []
            for number, chunk in enumerate(engine.stream(prompt, GREEDY)):
                chunks.append(chunk)
                if cache_type == "auto" and number in (3, N):
                    assert code_again(engine)
            assert 0 < finer.blocks.places.counts()[0] < sum(finer.blocks.places.counts())
            ids = [token for chunk in chunks for token in chunk.token_ids]
            logprobs += [one.logprob for chunk in chunks for one in chunk.logprobs or ()]
            engine.save_session(tmp_path / f"{ops.backend}.session")
        with load_tiny(path, ops=ops, **settings) as engine:
            engine.load_session(tmp_path / f"{ops.backend}.session")
            # The same tokens on both, which the first one has chosen.
            after = found[0][0] if found else [*prompt, *ids]
            turn = engine.generate([*after, 9, 8, 7, 6], GREEDY)
            assert turn.usage.cached_tokens > len(prompt)
            logprobs += [one.logprob for one in turn.logprobs]
        found.append([after, ids, logprobs])
    (_, numpy_ids, numpy_logprobs), (_, ids, logprobs) = found
    assert ids == numpy_ids
    # Codes flip where a vector is near the edge of one.
    np.testing.assert_allclose(logprobs, numpy_logprobs, atol=0.05)


def code_again(engine: Engine) -> bool:
    blocks = engine._store.finer
    assert isinstance(blocks, FinerBlocks)
    return blocks.code_again()
