"""Engines whose models have recurrent layers: what they reuse of earlier prompts, and that answers do not change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import EngineError, SamplingParams
from polarlm.engine.outputs import fold
from tests.bare import bare_model, feed, prefill_logits, read_model
from tests.conftest import FIXTURES, TRAINED_HYBRID
from tests.hybrids import MODELS, Load, N, alone, answer, ids_of, loading
from tests.pairs import mostly_slow
from tests.requests.drafters import Known, Unpaced, drafting
from tests.sampling.constrained import InTurn
from tests.tiny import VOCABULARY, assert_idle

HYBRIDS = [
    "qwen3_next_shared_keys",
    "qwen3_5_tied",
    "granite_hybrid_tied",
    "lfm2_biases",
    "lfm3_gated_tied",
    "nemotron_h_dense",
    "kimi_linear_nope",
]
OF_EACH_KIND = [
    "qwen3_next_shared_keys",
    "granite_hybrid_tied",
    "lfm2_biases",
    "kimi_linear_nope",
]  # of recurrent layer


@pytest.fixture(params=MODELS)
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Load]:
    with loading(tmp_path, request.param) as load:
        yield load


@pytest.mark.parametrize("length", [N, 5 * N + 3])
def test_the_next_turn_computes_its_own_tokens_alone(load: Load, length: int) -> None:
    """After an answer that ends within a block, and at the end of one, where the state becomes a snapshot."""
    engine, ids = load(), ids_of(length)
    for tokens in (9, N - (length + 9) % N + 1, 20):
        ids += answer(engine, ids, tokens).token_ids
        ids += ids_of(5, seed=len(ids))
        found = answer(engine, ids)
        assert found.usage.cached_tokens == len(ids) - 6  # the newest token of an answer is not computed
        assert found.token_ids == alone(load, ids)
        ids += [*found.token_ids, *ids_of(3, seed=1)]
    assert_idle(engine)


@pytest.mark.parametrize("cut", [1, N])
def test_an_answer_that_is_replaced_costs_the_tokens_since_the_last_block_of_the_prompt(load: Load, cut: int) -> None:
    """As when a template leaves out an answer's thoughts."""
    engine, ids = load(), ids_of(5 * N + 6)
    answer(engine, ids, tokens=3 * N)
    prompt = [*ids, *ids_of(7, seed=1)]
    found = answer(engine, prompt)
    assert found.usage.cached_tokens == 5 * N
    assert found.token_ids == alone(load, prompt)
    prompt = [*ids[: 5 * N - cut], *ids_of(40, seed=2)]  # within the last block: a snapshot four blocks before it
    found = answer(engine, prompt)
    assert found.usage.cached_tokens in (0, N)  # block 0 has none
    assert found.token_ids == alone(load, prompt)


def test_where_prompts_part_is_learned(load: Load) -> None:
    """The first prompt that leaves another one is computed from the beginning, and keeps what they share."""
    engine, system = load(), ids_of(6 * N + 3)
    for seed, cached in ((1, 0), (2, 2 * N), (3, 6 * N)):
        prompt = [*system, *ids_of(5 * N, seed)]
        found = answer(engine, prompt, tokens=3)
        assert found.usage.cached_tokens <= cached, seed
        assert found.token_ids == alone(load, prompt, tokens=3)
    assert found.usage.cached_tokens == 6 * N


def changes(load: Load, state_type: str) -> float:
    """How much the largest log-probabilities of a token differ after an exact snapshot and after a coded one."""
    ids = ids_of(4 * N)
    more = [*ids, *ids_of(3 * N, seed=1)]
    scores = []
    for settings in ({}, {"state_type": state_type}):
        engine = load(**settings)
        answer(engine, ids, tokens=1)
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
        found = engine.generate(more, params)
        assert found.usage.cached_tokens == 4 * N
        scores.append(dict(found.logprobs[0].top))
    exact, coded = scores
    shared = exact.keys() & coded.keys()
    assert len(shared) >= 15
    return max(abs(exact[token] - coded[token]) for token in shared)


def test_coded_snapshots_change_little(load: Load) -> None:
    assert 0 < changes(load, "8bit") < 0.2


@pytest.mark.parametrize(
    ("state_type", "length"),
    [("8bit", 4 * N + 5), ("f32", 4 * N)],
)
def test_a_session_continues_to_the_bit(load: Load, tmp_path: Path, state_type: str, length: int) -> None:
    """Within a block, and at the end of one, where a session has a snapshot."""
    engine, ids = load(state_type=state_type), ids_of(length)
    answer(engine, ids, tokens=1)
    engine.save_session(tmp_path / "session", prompt=ids)
    prompt = [*ids, *ids_of(3, seed=1)]
    here = answer(engine, prompt)
    other = load(state_type=state_type)
    other.load_session(tmp_path / "session")
    there = answer(other, prompt)
    assert here.usage.cached_tokens == there.usage.cached_tokens == length
    assert here.token_ids == there.token_ids


def test_sessions_of_another_state_type_are_refused(load: Load, tmp_path: Path) -> None:
    engine, ids = load(), ids_of(3 * N)
    answer(engine, ids, tokens=1)
    engine.save_session(tmp_path / "session", prompt=ids)
    with pytest.raises(EngineError, match="state:f32"):
        load(state_type="8bit").load_session(tmp_path / "session")


def test_drafts_leave_no_trace(load: Load) -> None:
    ids = ids_of(3 * N + 7)
    plain = answer(load(), ids, tokens=60)
    engine = load()
    drafts = Unpaced(Known([*ids, *plain.token_ids], 0.7, VOCABULARY), lambda: 5)
    drafting(engine, lambda _: drafts)
    drafted = answer(engine, ids, tokens=60)
    assert drafts.drafted > drafts.accepted > 8
    assert drafted.token_ids == plain.token_ids
    following = [*ids, *plain.token_ids[:-1], *ids_of(4, seed=1)]
    assert answer(engine, following).token_ids == alone(load, following)


def test_memory_for_snapshots_is_bounded(load: Load) -> None:
    engine = load(state_cache="20k")
    few = [group.quantized.size for group in engine._store.groups if group.is_sparse]
    more = [group.quantized.size for group in load()._store.groups if group.is_sparse]
    assert 0 < few[0] < more[0]
    ids = ids_of(20 * N)
    for seed in range(4):
        prompt = [*ids[: 5 * seed * N + N], *ids_of(N, seed)]
        assert answer(engine, prompt, tokens=3).token_ids == alone(load, prompt, tokens=3)
    with pytest.raises(
        EngineError, match=r"GiB for snapshots of recurrent layers are too much: .* smaller state_cache"
    ):
        load(state_cache="100T")
    none = load(state_cache="500")
    for prompt in (ids[:100], ids[:110]):
        assert answer(none, prompt, tokens=3).token_ids == alone(load, prompt, tokens=3)
    assert_idle(engine)


@mostly_slow("name", HYBRIDS, OF_EACH_KIND)
def test_a_prompt_that_is_cut_anywhere_has_the_logits_of_transformers(name: str) -> None:
    reference = np.load(FIXTURES / name / "reference.npz")
    model, ids = bare_model(*read_model(FIXTURES / name), block_size=N), reference["ids"].tolist()
    for cut in range(1, len(ids)):
        kv = model.store.new_sequence()
        found = np.concatenate([feed(model, kv, ids[:cut]), feed(model, kv, ids[cut:])])
        np.testing.assert_allclose(found, reference["logits"], atol=2**-10 * np.ptp(reference["logits"]))  # halves
        model.store.release(kv)


def test_the_status_counts_snapshots_apart(load: Load) -> None:
    engine = load(state_cache="20k")
    before = engine.status()
    assert (before.snapshots.used, before.snapshots.kept) == (0, 0)
    assert before.snapshots.snapshots == engine._store.groups[0].quantized.size
    assert 20_000 - before.snapshots.bytes < before.snapshots.bytes / before.snapshots.snapshots
    answer(engine, ids_of(3 * N), tokens=2)
    after = engine.status()
    assert (after.snapshots.used, after.snapshots.kept) == (0, 1)  # at the end of the prompt's last block
    assert after.blocks == before.blocks == 512 // N - 1


def test_forced_tokens_change_the_state_as_steps_do(load: Load) -> None:
    """A constraint forces tokens, also over the end of a block, and the next step computes their rows together."""
    engine, ids = load(), ids_of(2 * N + 3)
    sets = [None, *([token] for token in ids_of(9, seed=1)), None, None]
    params = SamplingParams(max_tokens=37, temperature=1, seed=1, ignore_eos=True)
    found = fold(engine.stream(ids, params, constraint=InTurn(sets, VOCABULARY))).token_ids
    assert found[1:10] == tuple(ids_of(9, seed=1))
    following = [*ids, *found[:-1], *ids_of(4, seed=2)]
    again = answer(engine, following)
    assert again.usage.cached_tokens == len(following) - 4
    assert again.token_ids == alone(load, following)


def test_what_reads_a_prompt_neither_finds_nor_leaves_a_state(load: Load) -> None:
    """Its embedding and its tokens' log-probabilities are the same as in an engine that has computed nothing before."""
    engine, ids = load(), ids_of(3 * N + 4)
    read = SamplingParams(max_tokens=0, prompt_logprobs=3)
    fresh = load()
    vector, tokens = fresh.embed(ids).vector, fresh.generate(ids, read).prompt_logprobs
    answer(engine, ids)
    np.testing.assert_array_equal(engine.embed(ids).vector, vector)
    assert engine.generate(ids, read).prompt_logprobs == tokens
    scored = engine.score(ids).logprobs
    np.testing.assert_allclose([token.logprob for token in tokens], scored, atol=0.02)
    following = [*ids, *ids_of(4, seed=1)]
    assert answer(engine, following).token_ids == alone(load, following)
    assert_idle(engine)


def test_a_trained_hybrid_has_the_logits_of_transformers() -> None:
    reference = np.load(TRAINED_HYBRID / "reference.npz")
    logits = prefill_logits(bare_model(*read_model(TRAINED_HYBRID)), reference["ids"].tolist())
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=1e-4 * np.abs(reference["logits"]).max())
