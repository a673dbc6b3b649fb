"""Streams of the engine: chunks, ends, errors, and the state of the engine after a stream that did not finish."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import Chunk, Engine, PromptOptions, SamplingParams
from polarlm.engine.model import score
from polarlm.engine.outputs import fold
from tests.cpu import CpuOps
from tests.tiny import (
    CONTEXT,
    EOS,
    PLAIN,
    VOCABULARY,
    assert_idle,
    blocks_left,
    forget,
    load_tiny,
    refused,
    runs_nothing,
)

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = [9, 20, 33, 47, 5, 61, 72, 8, 90, 11, 12, 13]


def with_max(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def test_a_context_beyond_the_models_is_warned_of_without_verbose(tiny_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"goes beyond the {CONTEXT} that this model was trained on"):
        Engine.load(tiny_path, device="cpu", ctx_size=2 * CONTEXT, calibration=False).close()


@pytest.mark.parametrize("prompt", ["the end", [{"role": "user", "content": "the end"}], PROMPT, np.array(PROMPT)])
def test_a_stream_folds_to_the_same_answer(tiny: Engine, prompt) -> None:
    chunks = list(tiny.stream(prompt, GREEDY))
    forget(tiny)
    answer = tiny.generate(prompt, GREEDY)
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == answer.token_ids
    assert len(answer.token_ids) == answer.usage.completion_tokens == 24
    assert all(chunk.finish_reason is None and chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].finish_reason == answer.finish_reason == "length"
    assert answer.usage.prompt_tokens == chunks[-1].usage.prompt_tokens


def test_an_eos_token_ends_the_answer_and_is_not_part_of_it(tiny: Engine) -> None:
    free = tiny.generate(PROMPT, with_max(4))
    params = SamplingParams(temperature=0, logit_bias={EOS[1]: 100.0}, max_tokens=4)
    answer = tiny.generate(PROMPT, params)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), "stop")
    ignored = tiny.generate(PROMPT, SamplingParams(**{**params.__dict__, "ignore_eos": True}))
    assert (ignored.text, ignored.token_ids, ignored.finish_reason) == ("", (EOS[1],) * 4, "length")
    assert len(free.token_ids) == 4


def test_an_answer_ends_before_a_stop_token(tiny: Engine) -> None:
    plain = tiny.generate(PROMPT, GREEDY).token_ids
    stop = plain[9]
    answer = tiny.generate(PROMPT, replace(GREEDY, stop_token_ids=(VOCABULARY - 1, stop)))
    assert (answer.token_ids, answer.finish_reason) == (plain[: plain.index(stop)], "stop")


@pytest.mark.parametrize("least", [0, 1, 5])
def test_no_answer_ends_before_min_tokens(tiny: Engine, least: int) -> None:
    """Though it would end as soon as it may."""
    eager = replace(GREEDY, ignore_eos=False, logit_bias={EOS[0]: 1e5})
    assert tiny.generate(PROMPT, eager).token_ids == ()
    answer = tiny.generate(PROMPT, replace(eager, min_tokens=least, max_tokens=9))
    assert (len(answer.token_ids), answer.finish_reason) == (least, "stop")
    assert set(EOS).isdisjoint(answer.token_ids)


def test_eos_may_come_before_min_tokens_with_ignore_eos(tiny: Engine) -> None:
    """With ignore_eos the model's EOS tokens are tokens like others."""
    answer = tiny.generate(PROMPT, replace(GREEDY, logit_bias={EOS[0]: 1e5}, min_tokens=3, max_tokens=4))
    assert answer.token_ids == (EOS[0],) * 4


def test_text_held_back_for_a_stop_string_comes_at_the_end(tiny: Engine) -> None:
    whole = tiny.generate(PROMPT, GREEDY).text
    stop = whole[-1] + "never"
    answer = tiny.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(stop,)))
    assert (answer.text, answer.finish_reason) == (whole, "length")


def test_a_seed_repeats_an_answer(tiny: Engine) -> None:
    def draw(seed: int) -> tuple[int, ...]:
        forget(tiny)
        params = SamplingParams(
            temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed, max_tokens=20, ignore_eos=True
        )
        return tiny.generate(PROMPT, params).token_ids

    assert draw(3) == draw(3)
    assert len({draw(3), draw(4), draw(-1), draw(-1)}) == 4


def test_padding_rows_of_the_head_are_never_sampled(tiny: Engine, monkeypatch) -> None:
    monkeypatch.setattr(tiny.model.tokenizer, "vocab_size", 20)
    answer = tiny.generate([5, 6, 7], SamplingParams(temperature=100.0, top_k=0, max_tokens=50, ignore_eos=True))
    assert max(answer.token_ids) < 20
    refused(lambda: tiny.generate([5, 20]), "20", "below 20")
    refused(lambda: tiny.stream([5], SamplingParams(logit_bias={20: 1.0})), "logit_bias", "token 20")


def test_progress_grows_to_the_length_of_the_prompt(tiny: Engine, monkeypatch) -> None:
    monkeypatch.setattr(CpuOps, "prefill_rows", 7)
    for prompt in ([*PROMPT] * 5, [*PROMPT] * 8):
        chunks = list(tiny.stream(prompt, with_max(3), progress=True))
        progress = [chunk for chunk in chunks if chunk.prompt_tokens]
        done = [chunk.prefilled for chunk in progress]
        assert len(done) > 4
        assert done == sorted(done)
        assert done[-1] == len(prompt)
        assert all(
            (c.text, c.token_ids, c.finish_reason, c.prompt_tokens) == ("", (), None, len(prompt)) for c in progress
        )
        assert chunks.index(progress[-1]) == len(progress) - 1  # all before the first token
        assert done[0] >= chunks[-1].usage.cached_tokens
    assert not any(chunk.prompt_tokens for chunk in tiny.stream(PROMPT, with_max(3)))


def test_a_prompt_must_leave_room_for_a_token(tiny: Engine) -> None:
    fits = [7] * (CONTEXT - 1)
    assert tiny.generate(fits, with_max(1)).finish_reason == "length"
    for length in (CONTEXT, CONTEXT + 1):
        refused(lambda n=length: tiny.stream([7] * n), str(length), str(CONTEXT), code="context_length_exceeded")


def test_generation_ends_when_the_store_is_full(tiny: Engine) -> None:
    with blocks_left(tiny, 2):
        answer = tiny.generate(PROMPT, with_max(-1))
    assert answer.finish_reason == "length"
    assert 2 * 16 <= len(PROMPT) + len(answer.token_ids) <= 4 * 16
    assert len(tiny.generate(PROMPT, GREEDY).token_ids) == 24


A_SENTENCE_CASES = [
    ("", ["empty"]),
    ([], ["empty"]),
    ([96], ["96"]),
    ([-1], ["-1"]),
    ([5, b"x"], ["b'x'"]),
    ([5, True], ["True"]),
    ([5, {"role": "user", "content": "x"}], ["role"]),
    (None, ["NoneType"]),
    (b"bytes", ["bytes"]),
    (7, ["int"]),
    ({"role": "user", "content": "x"}, ["dict"]),
    ([{"role": "user"}], ["messages[0].content"]),
    ([{"role": "user", "content": "x"}, {"role": 3, "content": "x"}], ["messages[1].role"]),
    ([{"role": "user", "content": "x"}, "y"], ["messages[1]"]),
    ([{"role": "assistant", "content": "x", "token_ids": [96]}], ["messages[0].token_ids", "96"]),
    ([{"role": "user", "content": "x"}, {"role": "bot", "content": "x"}], ["messages[1].role is 'bot'", "user"]),
]


def test_an_invalid_prompt_is_refused_with_a_sentence(tiny: Engine) -> None:
    for prompt, words in A_SENTENCE_CASES:
        refused(lambda prompt=prompt: tiny.stream(prompt), *words)


@pytest.mark.parametrize("given", [24, {"max_tokens": 24}, PromptOptions()])
def test_what_is_no_sampling_params_is_refused(tiny: Engine, given) -> None:
    refused(lambda: tiny.stream("the end", given), "SamplingParams", repr(given))
    refused(lambda: tiny.stream("the end", GREEDY, SamplingParams()), "PromptOptions", "SamplingParams(")


@pytest.mark.parametrize(
    ("ids", "words"), [([], ["empty"]), ([5], ["2", "1"]), ([5, 96], ["96"]), ([5, True], ["True"]), ("ab", ["'a'"])]
)
def test_score_refuses_invalid_ids(tiny: Engine, ids, words) -> None:
    refused(lambda: tiny.score(ids), *words)


def test_score_takes_at_most_a_whole_context(tiny: Engine) -> None:
    tiny.generate(PROMPT, GREEDY)  # kept, and given up for it
    result = tiny.score([7] * CONTEXT, logits=True)
    assert result.logprobs.shape == (CONTEXT - 1,)
    assert result.logits.shape == (CONTEXT, 96)
    refused(lambda: tiny.score([7] * (CONTEXT + 1)), "257", "256", code="context_length_exceeded")


def test_score_holds_few_rows_of_logits_at_a_time(tiny: Engine, monkeypatch) -> None:
    whole, logits, rows = tiny.score([*range(5, 90)], logits=True), tiny._model.logits, []

    def counted(hidden):
        rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(score, "_ROWS", 3)
    monkeypatch.setattr(tiny._model, "logits", counted)
    result = tiny.score([*range(5, 90)])
    assert max(rows) == 3
    assert sum(rows) == 85
    assert result.logits.shape == (0, 96)
    np.testing.assert_allclose(result.logprobs, whole.logprobs, atol=1e-5)


def test_score_without_enough_memory_is_an_error(tiny: Engine, monkeypatch) -> None:
    def none_left(hidden):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(tiny._model, "logits", none_left)
        refused(lambda: tiny.score([7] * 20), "not enough memory", "20 tokens", code="out_of_memory")
    assert len(tiny.score([7] * 20).logprobs) == 19


def test_score_while_others_hold_the_store_is_an_error(tiny: Engine) -> None:
    with blocks_left(tiny, 0):
        refused(lambda: tiny.score([7] * 100), "in use", code="out_of_memory")


def test_detokenize_refuses_unknown_ids(tiny: Engine) -> None:
    assert tiny.detokenize([]) == ""
    refused(lambda: tiny.detokenize([5, 96]), "96")


@pytest.mark.parametrize("taken", [1, 3, 20])
def test_a_closed_stream_stops_and_keeps_what_was_computed(tiny: Engine, taken: int) -> None:
    chunks = tiny.stream(PROMPT, GREEDY)
    ids = [i for _ in range(taken) for i in next(chunks).token_ids]
    chunks.close()
    assert next(chunks, None) is None
    assert runs_nothing(tiny)
    assert tiny.generate([*PROMPT, *ids, 50], with_max(1)).usage.cached_tokens == len(PROMPT) + taken - 1


def test_dropping_a_stream_closes_it(tiny: Engine) -> None:
    chunks = tiny.stream(PROMPT, GREEDY)
    next(chunks)
    del chunks
    assert runs_nothing(tiny)
    assert tiny.cache_stats().tokens == len(PROMPT)


def test_a_prefill_can_be_cancelled_in_the_middle(tiny: Engine, monkeypatch) -> None:
    monkeypatch.setattr(CpuOps, "prefill_rows", 4)
    chunks = tiny.stream([*PROMPT] * 6, GREEDY, progress=True)
    assert next(chunks).prefilled < len(PROMPT) * 6
    chunks.close()
    assert tiny.cache_stats().tokens == 0


def test_a_stream_that_is_never_read_is_not_queued(tiny: Engine) -> None:
    chunks = tiny.stream(PROMPT, GREEDY)
    assert runs_nothing(tiny)
    chunks.close()
    del chunks
    tiny.stream(PROMPT, GREEDY)
    assert_idle(tiny)


def fail_at(monkeypatch, target: Engine, call: int, error: BaseException) -> None:
    """Make the `call`-th matrix product from now on raise, once."""
    linear, calls = target._model.ops.linear, iter(range(1, 1_000_000))

    def failing(*arguments, **options):
        if next(calls) == call:
            raise error
        return linear(*arguments, **options)

    monkeypatch.setattr(target._model.ops, "linear", failing)


PER_TOKEN = 2 * 4 + 1  # products of a forward pass: four in each layer, and the head


@pytest.fixture
def by_products(tiny_path: Path) -> Iterator[Engine]:
    """As `tiny`, but with blocks that no compiled kernel reads: a step calls an op for each product."""
    with load_tiny(tiny_path, **{**PLAIN, "block_size": 8}) as engine:
        yield engine
        assert_idle(engine)


@pytest.mark.parametrize("call", [1, PER_TOKEN, PER_TOKEN + 6, 9 * PER_TOKEN + 5])
def test_an_error_fails_only_its_own_request(by_products: Engine, monkeypatch, call: int) -> None:
    expected = by_products.generate(PROMPT, GREEDY)
    forget(by_products)
    fail_at(monkeypatch, by_products, call, ZeroDivisionError("broken"))
    with pytest.raises(ZeroDivisionError, match="broken"):
        by_products.generate(PROMPT, GREEDY)
    assert runs_nothing(by_products)
    again = by_products.generate(PROMPT, GREEDY)
    assert len(again.token_ids) == 24
    forget(by_products)
    assert by_products.generate(PROMPT, GREEDY).token_ids == expected.token_ids


def test_an_error_in_score_leaks_no_block(tiny: Engine, monkeypatch) -> None:
    fail_at(monkeypatch, tiny, PER_TOKEN + 3, ZeroDivisionError("broken"))
    with pytest.raises(ZeroDivisionError):
        tiny.score([7] * 50)
    assert_idle(tiny)


def test_a_memory_error_becomes_an_engine_error(tiny: Engine, monkeypatch) -> None:
    fail_at(monkeypatch, tiny, 3, MemoryError())
    refused(lambda: tiny.generate(PROMPT, GREEDY), "memory", code="out_of_memory")


def test_calls_of_a_closed_engine_are_errors(tiny_path: Path) -> None:
    with Engine.load(tiny_path, device="cpu") as closed:
        begun, waiting = closed.stream(PROMPT, GREEDY), closed.stream(PROMPT, GREEDY)
        assert isinstance(next(begun), Chunk)
    closed.close()
    for call in (
        lambda: closed.stream(PROMPT),
        lambda: closed.generate("the"),
        lambda: closed.chat([{"role": "user", "content": "x"}]),
        lambda: closed.score(PROMPT),
        closed.cache_stats,
        lambda: fold(begun),
        lambda: fold(waiting),
    ):
        refused(call, "closed", code="closed")
    assert "tokens fit" in closed.fit_line()


def test_a_closed_engine_frees_its_memory(tiny_path: Path, tmp_path: Path) -> None:
    closed = Engine.load(tiny_path, device="cpu", cache_disk="1M", cache_disk_folder=str(tmp_path))
    chunks = closed.stream(PROMPT, GREEDY)
    next(chunks)
    store = weakref.ref(closed._store.cache(0).full_k)
    weights = weakref.ref(closed._model.weights.embedding)
    closed.close()
    gc.collect()
    assert (store(), weights()) == (None, None)


def test_the_garbage_collector_may_close_a_stream_in_the_middle_of_a_step(tiny: Engine, monkeypatch) -> None:
    other, chunks = tiny.stream(PROMPT, GREEDY), tiny.stream([7, 8, 9], GREEDY)
    next(other)
    linear, closed = tiny._model.ops.linear, []

    def collecting(*arguments, **options):
        if not closed:
            closed.append(True)
            other.close()
        return linear(*arguments, **options)

    monkeypatch.setattr(tiny._model.ops, "linear", collecting)
    worker = threading.Thread(target=lambda: closed.append(fold(chunks)), daemon=True)
    worker.start()
    worker.join(60)
    assert not worker.is_alive()
    assert len(closed[1].token_ids) == 24
