"""The forward pass against transformers in float32, for every family and kind of RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.backends.numpy.attention import LayerCache, read_blocks
from engine.backends.numpy.ops import NumpyOps
from engine.backends.ops import Place
from engine.model.forward import Model
from engine.model.score import score
from tests.bare import bare_model, feed, kl, log_softmax, prefill_logits, read_model, spread, step_logits
from tests.conftest import FIXTURES

MODELS = sorted(path.name for path in FIXTURES.iterdir())


@pytest.fixture(params=MODELS)
def fixture(request: pytest.FixtureRequest):
    path: Path = FIXTURES / request.param
    reference = np.load(path / "reference.npz")
    return *read_model(path), reference["ids"].tolist(), reference["logits"]


def scored(model, ids, **options):
    kv = model.store.new_sequence()
    result = score(model, kv, ids, logits=True, **options)
    model.store.release(kv)
    return result


def test_every_family_and_rope_kind_has_a_fixture() -> None:
    configs = [read_model(FIXTURES / name)[0] for name in MODELS]
    assert {c.family for c in configs} == {"llama", "mistral", "qwen2", "qwen3"}
    assert {c.rope.kind for c in configs} >= {"default", "linear", "llama3", "yarn"}
    assert {c.tied_head for c in configs} == {True, False}
    assert any(c.kv_heads == 1 for c in configs)
    assert any(1 < c.kv_heads < c.heads for c in configs)
    assert any(c.kv_heads == c.heads for c in configs)
    assert any(c.heads * c.head_dim != c.hidden_size for c in configs)


def test_logits_are_those_of_transformers(fixture) -> None:
    config, weights, ids, reference = fixture
    logits = prefill_logits(bare_model(config, weights), ids)
    assert np.abs(logits - reference).max() <= 1e-3 * spread(reference)
    assert (logits.argmax(-1) == reference.argmax(-1)).all()


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunk_size_never_changes_a_result(fixture, monkeypatch, chunk: int) -> None:
    config, weights, ids, reference = fixture
    monkeypatch.setattr(NumpyOps, "prefill_rows", chunk)
    logits = prefill_logits(bare_model(config, weights, ("polarquant", "polarquant")), ids)
    assert np.abs(logits - reference).max() <= 1e-3 * spread(reference)


def test_score_over_f16_equals_the_prefill(fixture) -> None:
    config, weights, ids, reference = fixture
    result = scored(bare_model(config, weights), ids)
    assert np.abs(result.logits - reference).max() <= 2e-3 * spread(reference)
    assert kl(reference, result.logits) <= 1e-5


@pytest.mark.parametrize("type", ["f16", "polarquant", "polarquant+dense"])
def test_score_equals_a_loop_of_steps(fixture, type: str) -> None:
    config, weights, ids, reference = fixture
    by_steps, by_chunks = (bare_model(config, weights, (type, type), block_size=8) for _ in range(2))
    step_blocks, chunk_blocks = recorded(by_steps), recorded(by_chunks)
    steps, result = step_logits(by_steps, ids), scored(by_chunks, ids)
    # Products of one row and of eight differ in their last bits, which now and then turns a value over the edge of its
    # code: at worst one in a hundred, for f16, whose codes lie a thousand times their error apart. Up to there the
    # logits are equal.
    flipped, share = first_difference(step_blocks, chunk_blocks)
    equal = slice(0, None if flipped is None else (flipped + 1) * 8)
    assert share <= 1e-2
    assert np.abs(result.logits[equal] - steps[equal]).max() <= 1e-5 * spread(reference)
    logprobs = np.take_along_axis(log_softmax(result.logits[:-1]), np.array(ids[1:])[:, None], 1)[:, 0]
    np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-5)


Blocks = list[list[np.ndarray]]


def recorded(model: Model) -> dict[int, Blocks]:
    """From now on, per layer, all arrays of every coded block in the order of encoding."""
    layers = {id(model.store.cache(layer)): layer for layer in range(model.config.layers)}
    blocks: dict[int, Blocks] = {layer: [] for layer in layers.values()}
    encode = model.store.ops.encode_blocks

    def encode_and_record(caches: Sequence[LayerCache], ids: Sequence[int], sources: Sequence[Place]) -> None:
        encode(caches, ids, sources)
        for cache in caches:
            arrays = [*cache.k.values(), *cache.v.values(), *cache.mean.values()]
            blocks[layers[id(cache)]] += [[array[:, block].copy() for array in arrays] for block in ids]

    model.store.ops.encode_blocks = encode_and_record
    return blocks


def first_difference(a: dict[int, Blocks], b: dict[int, Blocks]) -> tuple[int | None, float]:
    """The number in its sequence of the first block whose codes differ in any layer, and the share that differs there.

    Behind it everything differs a little, since that block has been read.
    """
    for number in range(max(map(len, a.values()))):
        pairs = [pair for layer in a for pair in zip(a[layer][number], b[layer][number], strict=True)]
        if different := sum(int((x != y).sum()) for x, y in pairs):
            return number + 1, different / sum(x.size for x, _ in pairs)  # block 0 is never coded
    return None, 0.0


def test_every_token_coded_reads_more_codes_than_steps_do(fixture) -> None:
    config, weights, ids, reference = fixture
    model = bare_model(config, weights, ("polarquant", "polarquant"), block_size=16)
    served, coded = scored(model, ids), scored(model, ids, every_token_coded=True)
    # The first block is exact either way; behind it the codes are what differs.
    assert np.abs(coded.logits[:16] - reference[:16]).max() <= 1e-3 * spread(reference)
    assert kl(reference[16:], coded.logits[16:]) > kl(reference[16:], served.logits[16:])


def test_a_part_of_a_block_can_be_read_as_codes(fixture) -> None:
    config, weights, ids, _ = fixture
    model = bare_model(config, weights, ("f16", "f16"), block_size=16)
    coded = scored(model, ids[:41], every_token_coded=True)
    assert np.abs(coded.logits - scored(model, ids[:41]).logits).max() <= 2e-3 * spread(coded.logits)


@pytest.mark.parametrize(("block_size", "count"), [(32, 64), (32, 33), (64, 128)])
def test_every_token_coded_does_not_depend_on_the_threads(fixture, block_size: int, count: int) -> None:
    """Threads share the rows of a chunk of 32 tokens or more; its block is encoded as a whole all the same."""
    config, weights, ids, reference = fixture
    scores = []
    try:
        for threads in (1, 2, 3):
            model = bare_model(config, weights, ("ring3", "ring3"), block_size=block_size, ops=NumpyOps(threads))
            scores.append(scored(model, (ids * 3)[:count], every_token_coded=True).logits)
    finally:
        NumpyOps(1)  # the limit is the process's
    for logits in scores[1:]:
        assert np.abs(logits - scores[0]).max() <= 1e-5 * spread(reference)


def test_every_token_coded_does_not_depend_on_the_rows_of_a_unit(fixture, monkeypatch) -> None:
    config, weights, ids, reference = fixture
    whole = scored(bare_model(config, weights, ("ring3", "ring3"), block_size=16), ids, every_token_coded=True)
    monkeypatch.setattr(NumpyOps, "prefill_rows", 5)
    pieces = scored(bare_model(config, weights, ("ring3", "ring3"), block_size=16), ids, every_token_coded=True)
    assert np.abs(pieces.logits - whole.logits).max() <= 1e-5 * spread(reference)


def test_every_token_coded_reads_each_block_as_it_is_stored(fixture) -> None:
    """What the last block's tokens see is what a later token sees of it."""
    config, weights, ids, _ = fixture
    model = bare_model(config, weights, ("ring3", "ring3"), block_size=16)
    store, kv, seen = model.store, model.store.new_sequence(), {}
    round_trip = store.round_trip

    def watched(layer, span):
        round_trip(layer, span)
        seen[layer] = [x[:, :16].copy() for x in span.buffer]

    store.round_trip = watched
    feed(model, kv, ids[:32])
    feed(model, kv, ids[32:48], round_trip=True)
    for layer, (k, v) in seen.items():
        cache, table = store.cache(layer), kv.tables[store.group_of(layer)]
        stored_k, stored_v, mean = read_blocks(cache, np.array(table.coded[-1:]))
        np.testing.assert_allclose(k, stored_k + (0 if mean is None else mean), atol=1e-6)
        np.testing.assert_allclose(v, stored_v, atol=1e-6)
    assert set(seen) == set(range(config.layers))


def test_a_second_turn_sees_the_first_as_codes(fixture) -> None:
    config, weights, ids, reference = fixture
    model = bare_model(config, weights, ("polarquant", "polarquant"), block_size=8)
    kv = model.store.new_sequence()
    feed(model, kv, ids[:29])
    second = feed(model, kv, ids[29:])
    single = model.store.new_sequence()
    feed(model, single, ids[:29])
    steps = np.concatenate([feed(model, single, [i]) for i in ids[29:]])
    # Up to the end of the current block (32) steps see exactly the same; then steps begin to read codes.
    assert np.abs(second[:3] - steps[:3]).max() <= 1e-5 * spread(reference)


def test_two_sequences_step_together_as_they_do_alone(fixture) -> None:
    config, weights, ids, reference = fixture
    model = bare_model(config, weights, ("polarquant", "polarquant"), block_size=8)
    first, second = model.store.new_sequence(), model.store.new_sequence()
    feed(model, first, ids[:20])
    feed(model, second, ids[:33])
    spans = [model.store.open_step(first), model.store.open_step(second)]
    together = model.logits(model.run(spans, [ids[20], ids[33]]))
    for span in spans:
        model.store.commit(span)
    alone = []
    for length in (20, 33):
        kv = model.store.new_sequence()
        feed(model, kv, ids[:length])
        alone.append(feed(model, kv, [ids[length]])[0])
    assert np.abs(together - np.array(alone)).max() <= 1e-5 * spread(reference)
