"""The forward pass against transformers in float32, for every family and kind of RoPE."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import engine.model
from engine.backends.ops import LayerCache
from engine.kept import KeptSequences
from engine.kv.store import KVStore
from engine.score import score
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
    result = score(model, KeptSequences(model.store, 1), kv, ids, **options)
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
    monkeypatch.setattr(engine.model, "PREFILL_CHUNK", chunk)
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
    steps, result = step_logits(by_steps, ids), scored(by_chunks, ids)
    # Products of one row and of eight differ in their last bits, which now and then turns a value over the edge of its
    # code. Up to there the logits are equal; and it is rare.
    flipped, share = first_difference(by_steps.store, by_chunks.store)
    equal = slice(0, None if flipped is None else (flipped + 1) * 8)
    assert share <= 2e-3
    assert np.abs(result.logits[equal] - steps[equal]).max() <= 1e-5 * spread(reference)
    logprobs = np.take_along_axis(log_softmax(result.logits[:-1]), np.array(ids[1:])[:, None], 1)[:, 0]
    np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-5)


def first_difference(a: KVStore, b: KVStore) -> tuple[int | None, float]:
    """Two stores that were fed the same tokens: the first block whose codes differ, and the share of differing codes.

    Both took their blocks in order, so equal ids hold equal blocks; block 0 of a sequence is not among them.
    """
    blocks, different, total = [], 0, 0
    for window, layers in a.shape.groups:
        if window is not None:  # blocks move on with the window, and ids are used again
            continue
        for layer in layers:
            for one, other in zip(arrays(a.cache(layer)), arrays(b.cache(layer)), strict=True):
                unequal = one != other
                blocks += (np.argwhere(unequal)[:, 1] + 1).tolist()
                different, total = different + unequal.sum(), total + unequal.size
    return min(blocks, default=None), different / max(total, 1)


def arrays(cache: LayerCache) -> list[np.ndarray]:
    """Everything that a layer stores of its coded blocks, each (K, blocks, …)."""
    means = [] if cache.k_mean is None else [cache.k_mean]
    return [*cache.k.values(), *cache.v.values(), *means]


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
    spans = [model.store.open(first, 1), model.store.open(second, 1)]
    together = model.logits(model.run(spans, [ids[20], ids[33]]))
    for span in spans:
        model.store.commit(span)
    alone = []
    for length in (20, 33):
        kv = model.store.new_sequence()
        feed(model, kv, ids[:length])
        alone.append(feed(model, kv, [ids[length]])[0])
    assert np.abs(together - np.array(alone)).max() <= 1e-5 * spread(reference)
