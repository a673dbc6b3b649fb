"""Two kinds of blocks in one memory of a GPU: what attention reads, what is requantized, and whole engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.kv import AttentionRule
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.transfer import FIELDS, convert_blocks
from polarlm.engine.model.forward import Transformer
from polarlm.engine.outputs import Completion
from polarlm.engine.quantization.encode import encode_centred
from polarlm.engine.state.cache_types import PRESETS
from polarlm.engine.state.store import KVStore
from tests.cuda.emulated import EmulatedDevice, open_device
from tests.cuda.test_model_emulated import Rounded, SameWeights, Talk, close, model_of
from tests.ops import reference
from tests.state.fed import HEADS, KV_HEADS, D, Fed
from tests.state.test_mixed_precision import ALL_NEWEST, COMPACT, LAYERS, N, contents, decode, make_store
from tests.tiny import assert_idle, load_tiny, make_model


class Checked(EmulatedDevice):
    """A device with every check on where attention reads both kinds of blocks."""

    def run(self, text: str, kernel: str, grid: Sequence[int], block: Sequence[int], args: list, shared: int) -> None:
        self._checked = kernel == "decode_two_kinds_kernel"
        super().run(text, kernel, grid, block, args, shared)


class Plain(Fed):
    """A sequence without checks."""

    def check(self, *args: Any) -> None:
        """Nothing."""


def sequences(ops: Ops) -> list[Plain]:
    """Sequences without quantized blocks, of high-precision ones alone, of both kinds, and of the others alone."""
    store = make_store(ops, 800, COMPACT, ALL_NEWEST)
    kept = [Plain(store, seed) for seed in range(4)]
    for fed, tokens in zip(kept, (5, 4 * N, 9 * N + 3, 6 * N), strict=True):
        fed.feed(tokens)
    placement = store.mixed_precision.blocks.placement
    wanted = [*kept[2].kv.tables[0].quantized[::2], *kept[3].kv.tables[0].quantized]
    for block in wanted:  # whatever their age
        placement.begin(block)
        store.mixed_precision.requantize()
    kinds = [{store.mixed_precision.is_high_precision(block) for block in fed.kv.tables[0].quantized} for fed in kept]
    assert kinds == [set(), {True}, {True, False}, {False}]
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(("processors", "rows"), [(1, 1), (40, 1), (6, 3), (4, 3)])
def test_a_step_attends_to_blocks_of_both_kinds(processors: int, rows: int) -> None:
    """Any number of CTAs, in any order, and a row that pads the batch; results are the same to the bit in any order."""
    device: Any = Checked() if isinstance(open_device(), EmulatedDevice) else open_device()
    device.processors = processors
    ops = CudaOps(device)
    kept = sequences(ops)
    store, rng, results = kept[0].store, np.random.default_rng(0), []
    spans = [store.open_step(fed.kv, rows) for fed in kept]
    q, k, v = (rng.standard_normal((rows * len(kept), heads, D), np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    k, v = (x.astype(np.float16).astype(np.float32) for x in (k, v))
    views = [
        store.view(0, span, slice(rows * number, rows * (number + 1)), span.start) for number, span in enumerate(spans)
    ]
    table = ops.spans(views, N)
    ops.append_kv(store.cache(0), table, ops.to_device(k), ops.to_device(v))
    queries = q
    if rows == 1:
        table, queries = table.pad_rows(len(kept) + 1), np.concatenate([q, q[:1]])
    for device.seed in (0, 1, 2):
        results.append(ops.to_host(ops.attention(ops.to_device(queries), store.cache(0), table, AttentionRule(0.3))))
        np.testing.assert_array_equal(results[-1], results[0])
    for number, fed in enumerate(kept):
        mine = slice(rows * number, rows * (number + 1))
        seen_k, seen_v = (np.concatenate(pair).astype(np.float64) for pair in ((fed.k, k[mine]), (fed.v, v[mine])))
        for at, block in enumerate(fed.kv.tables[0].quantized, 1):
            seen_k[at * N : (at + 1) * N], seen_v[at * N : (at + 1) * N] = contents(store, 0, block)
        # Queries, weights and what codes stand for are rounded to half precision.
        visible = reference.causal_mask(fed.kv.length, rows, len(seen_k))
        expected = reference.attention(q[mine], seen_k, seen_v, visible, AttentionRule(0.3))
        np.testing.assert_allclose(results[0][mine], expected, atol=0.005)
    assert not results[0][rows * len(kept) :].any()


def test_codes_are_those_of_numpy() -> None:
    """Codes of high-precision blocks, and of one that is requantized from what it decodes to; what is between fields
    reads as zeros, whatever the memory was before."""
    stores = [make_store(ops, 800, COMPACT, ALL_NEWEST) for ops in (CudaOps(open_device()), NumpyOps())]
    for layer in range(LAYERS):
        stores[0].cache(layer).blocks[...] = 0xFF
    for store in stores:
        fed = Plain(store, 3)
        fed.feed(7 * N)
    first, *others = fed.kv.tables[0].quantized
    device, host = stores
    k, v = (x[:, None] for x in decode(device, 1, first))
    for store in stores:
        assert store.mixed_precision.requantize()
    for block in others:
        for name, array in fields_of(device, block).items():
            np.testing.assert_array_equal(array, fields_of(host, block)[name], err_msg=name)
    (keys, means), (values, _) = encode_centred(COMPACT[0], k, None, 8), encode_centred(COMPACT[1], v, None)
    sides = {"k": keys, "mean": means, "v": values}
    expected = {f"{side}.{name}": x.swapaxes(0, 1) for side, fields in sides.items() for name, x in fields.items()}
    stored = fields_of(device, first)
    assert stored.keys() == expected.keys()
    for name, array in stored.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    cache = device.cache(1)
    raw = device.ops.read_blocks(cache, [device.mixed_precision.blocks.placement[first].number])
    for name, layout in zip(("keys", "values"), cache.layouts, strict=True):
        np.testing.assert_array_equal(raw[name], layout.pack(*layout.unpack(raw[name])))


def fields_of(store: KVStore, block: int) -> dict[str, np.ndarray]:
    place = store.mixed_precision.blocks.placement[block]
    cache = store.cache(1).high_precision if place.is_high_precision else store.cache(1)
    return convert_blocks(cache.format, 1, store.ops.read_blocks(cache, [place.number]), FIELDS)


FIXTURE = "qwen3_qk_norm_tied"


def talk(model: Transformer) -> list[np.ndarray]:
    """A prompt, a second turn, steps over a block's end, and steps in company, some with several rows. In between,
    blocks are requantized that have become old."""
    ids = np.random.default_rng(4).integers(5, 96, 180).tolist()
    dialogue, high_precision = Talk(model, 2), model.store.mixed_precision
    seen: list[tuple[int, int]] = []

    def then() -> None:
        high_precision.requantize_aged()
        seen.append(high_precision.blocks.placement.counts())

    dialogue.prompt(ids[:97])
    then()
    dialogue.prompt(ids[97:109], outputs=1)
    for token in ids[109:115]:
        dialogue.step([token])
        then()
    dialogue.prompt(ids[115:147], index=1)
    for pair in np.reshape(ids[147:155], (-1, 2)).tolist():
        dialogue.step(pair)
        then()
    dialogue.step(ids[155:161], [4, 2], kept=2)
    dialogue.step(ids[161:173], [2, 10])
    assert min(map(min, seen)) > 0, "blocks of both kinds are read"
    assert len({*seen}) > 1
    return dialogue.logits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quality", "compact"])
def test_logits_equal_those_of_numpy(name: str) -> None:
    device, preset = CudaOps(open_device(checked=False)), PRESETS[name]
    types, newest = preset.low_precision, preset.high_precision_kind
    backends = device, SameWeights(device), Rounded(device)
    close(*(talk(model_of(ops, FIXTURE, types, high_precision=newest)) for ops in backends))


GREEDY = SamplingParams(max_tokens=N + 5, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.mark.slow
def test_an_engine_answers_alike_after_a_session(tmp_path: Path) -> None:
    """Blocks are requantized between the steps of an answer; a second turn reads them as they were saved."""
    path, ops = make_model(tmp_path, FIXTURE), CudaOps(open_device(checked=False))
    settings: dict[str, Any] = {"block_size": N, "ctx_size": 256, "calibration": False, "cache_type": "by-age"}
    prompt, ids, turns = [5 + 7 * i % 90 for i in range(7 * N + 3)], list[int](), list[Completion]()
    for is_first in (True, False):
        with load_tiny(path, ops=ops, **settings) as engine:
            placement, counts = engine._store.mixed_precision.blocks.placement, set()
            if is_first:
                for chunk in engine.stream(prompt, GREEDY):
                    ids += chunk.token_ids
                    counts.add(placement.counts())
                assert len(counts) > 1
                saved = placement.counts()
                assert min(saved) > 0
                engine.save_session(tmp_path / "session")
            else:
                engine.load_session(tmp_path / "session")
            assert placement.counts() == saved
            turns.append(engine.generate([*prompt, *ids, 9, 8, 7, 6], GREEDY))
            assert turns[-1].usage.cached_tokens > len(prompt)
            assert_idle(engine)
    assert turns[0].token_ids == turns[1].token_ids
    assert turns[0].logprobs == turns[1].logprobs
