"""What is read from a whole prompt: log-probabilities of its tokens, and embeddings, against transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model import prompt_readers
from polarlm.engine.model.batch import PromptBatch
from polarlm.engine.model.prompt_readers import Pooling, PromptLogprobs, read_chunks
from tests.bare import bare_model, forward, log_softmax, read_model, spread
from tests.conftest import FIXTURES
from tests.tiny import PLAIN, assert_idle, blocks_left, by_count, forget, load_tiny, make_model

NATIVE = FIXTURES / "llama_gqa_linear"  # the weights of the tiny model


@pytest.fixture(params=["gemma3_tied", "granite_hybrid_tied", "muse_glimmer_gated", "llama_gqa_linear"])
def fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with quantized K/V, the reference's ids and logits (T, V), and few rows to a unit."""
    monkeypatch.setattr(prompt_readers, "_ROWS", 7)
    path = FIXTURES / request.param
    reference = np.load(path / "reference.npz")
    model = bare_model(*read_model(path), ("polarquant", "polarquant"))
    return model, reference["ids"].tolist(), reference["logits"]


def read(model: Any, ids: list[int], reader: Any) -> Any:
    """The chunk of a prompt's reader."""
    kv = model.store.new_sequence()
    span = model.store.open(kv, len(ids))
    for _ in read_chunks(model, PromptBatch([span], ids), reader):
        pass
    model.store.commit(span)
    model.store.release(kv)
    return reader.chunk()


def final_states(model: Any, ids: list[int]) -> np.ndarray:
    """What the head sees of each token, (T, E), by a norm that is written here."""
    kv = model.store.new_sequence()
    span = model.store.open(kv, len(ids))
    hidden = np.array(forward(model, [span], ids), np.float64)
    model.store.commit(span)
    model.store.release(kv)
    mean_square = (hidden**2).mean(axis=1, keepdims=True)
    return hidden / np.sqrt(mean_square + model.config.norm_eps) * model.weights.norm


def test_log_probabilities_of_a_prompt_are_those_of_transformers(fixture: Any) -> None:
    model, ids, reference = fixture
    expected = log_softmax(reference)
    found = read(model, ids, PromptLogprobs(ids, 3, len(reference[0]))).prompt_logprobs
    assert [token.id for token in found] == ids[1:]
    tolerance = 2e-3 * spread(reference)
    for row, token in enumerate(found):
        assert abs(token.logprob - expected[row, token.id]) <= tolerance
        for other, logprob in token.top:
            assert abs(logprob - expected[row, other]) <= tolerance
        assert token.top[0][0] == expected[row].argmax()


def test_an_embedding_is_of_the_states_that_the_reference_makes_its_logits_from(fixture: Any) -> None:
    model, ids, reference = fixture
    states = final_states(model, ids)
    head = NumpyOps().rows(model.weights.head)[: reference.shape[1]].astype(np.float64)
    bias = 0 if model.weights.head.bias is None else np.asarray(model.weights.head.bias)
    logits, cap = states @ head.T + bias, model.config.logit_softcap
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    assert np.abs(logits - reference).max() <= 1e-3 * spread(reference)
    for kind, expected in {"mean": states.mean(axis=0), "last": states[-1]}.items():
        vector = read(model, ids, Pooling(kind)).embedding
        assert vector.dtype == np.float32
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)


# -- in the engine -------------------------------------------------------------------------------------------------


def reference_of_tiny() -> tuple[list[int], np.ndarray]:
    reference = np.load(NATIVE / "reference.npz")
    return reference["ids"].tolist(), log_softmax(reference["logits"])


@pytest.fixture(params=["numpy", "native"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The tiny model on each of the backends of a CPU."""
    ops = None
    if request.param == "numpy":
        ops = NumpyOps()
    else:
        pytest.importorskip("llvmlite", reason="compiled kernels need llvmlite")
    with load_tiny(make_model(tmp_path), ops=ops, **PLAIN) as engine:
        assert engine._model.ops.backend == request.param
        yield engine
        assert_idle(engine)


def test_an_answer_comes_with_the_log_probabilities_of_its_prompt(either: Engine) -> None:
    ids, expected = reference_of_tiny()
    plain = either.generate(ids, SamplingParams(temperature=0, max_tokens=5))  # leaves the prompt in the cache
    answer = either.generate(ids, SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=0))
    found = [token.logprob for token in answer.prompt_logprobs]
    np.testing.assert_allclose(found, [expected[row, token] for row, token in enumerate(ids[1:])], atol=0.01)
    assert answer.token_ids == plain.token_ids
    assert plain.prompt_logprobs == ()
    assert answer.usage.cached_tokens == 0
    again = either.generate(ids, SamplingParams(temperature=0, max_tokens=0))
    assert again.usage.cached_tokens > 0  # the computed prompt is found by others


def test_a_prompt_can_be_scored_alone(either: Engine) -> None:
    ids, expected = reference_of_tiny()
    score = either.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=2))
    assert score.token_ids == ()
    assert score.finish_reason == "length"
    assert len(score.prompt_logprobs) == len(ids) - 1
    assert [token.top[0][0] for token in score.prompt_logprobs] == expected.argmax(axis=1)[:-1].tolist()


def test_an_embedding_leaves_nothing_in_the_cache(tiny: Engine) -> None:
    ids, _ = reference_of_tiny()
    forget(tiny)
    tiny.embed(ids)
    assert tiny.status().blocks_kept == 0
    assert tiny.generate(ids, SamplingParams(max_tokens=1)).usage.cached_tokens == 0


def test_a_preempted_request_reports_its_prompt_once(tiny: Engine) -> None:
    from tests.tiny import preempt

    ids, _ = reference_of_tiny()
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1, ignore_eos=True)
    whole = tiny.generate(ids, params)
    forget(tiny)
    chunks = []
    for chunk in tiny.stream(ids, params):
        chunks.append(chunk)
        if len(chunks) == 4:
            preempt(tiny)
    assert [bool(chunk.prompt_logprobs) for chunk in chunks].count(True) == 1
    assert tuple(token for chunk in chunks for token in chunk.prompt_logprobs) == whole.prompt_logprobs
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == whole.token_ids


def test_others_take_their_steps_while_a_prompt_is_read(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_readers, "_ROWS", 1)
    by_count(tiny, monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    outbox: list[Any] = []
    tiny.submit("the rain", params, into=outbox)
    while not outbox:
        tiny.work()
    embedded: list[Any] = []
    tiny.submit([7] * 100, SamplingParams(max_tokens=0), PromptOptions(pooling="mean"), into=embedded)
    between = 0
    while not embedded:
        before = len(outbox)
        tiny.work()
        between += len(outbox) > before
    assert between > 3
    while tiny.work():
        pass


def test_states_that_are_not_finite_are_an_error(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny._model.ops, "to_host", lambda x: np.full(x.shape, np.nan, np.float32))
    with pytest.raises(EngineError) as caught:
        tiny.embed("the rain")
    assert caught.value.code == "model_damaged"


def test_a_prompt_is_read_for_one_purpose(tiny: Engine) -> None:
    with pytest.raises(EngineError, match="pooling and prompt_logprobs"):
        tiny.stream("the rain", SamplingParams(prompt_logprobs=0), PromptOptions(pooling="last"))


def test_a_prompt_that_the_store_has_no_room_for_has_no_embedding(tiny: Engine) -> None:
    with blocks_left(tiny, 0), pytest.raises(EngineError) as caught:
        tiny.embed([7] * 100)
    assert caught.value.code == "out_of_memory"
    assert len(tiny.embed([7] * 100).vector)
