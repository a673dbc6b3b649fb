"""PromptOptions: how a prompt is tokenized, and which cached tokens it may reuse."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Completion, Engine, EngineError, PromptOptions, SamplingParams
from tests.tiny import CONTEXT, GREEDY, assert_idle, blocks_left, forget, held, preempt, refused

SPECIAL = PromptOptions(parse_special=True)
WRITTEN = "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n"
MESSAGES = [{"role": "user", "content": "then he ran on and on"}]
PROMPT = list(range(5, 45))


# -- control tokens ------------------------------------------------------------------------------------------------


def test_parse_special_turns_names_in_text_into_control_tokens(tiny: Engine) -> None:
    ids = tiny.tokenize(WRITTEN, control=True)
    fresh = PromptOptions(parse_special=True, cache_prompt=False)
    assert tiny.generate(WRITTEN, GREEDY, fresh).token_ids == tiny.generate(ids, GREEDY, fresh).token_ids
    assert tiny.generate(WRITTEN, GREEDY, SPECIAL).usage.prompt_tokens == len(ids)
    assert tiny.generate(WRITTEN, GREEDY).usage.prompt_tokens == len(tiny.tokenize(WRITTEN)) > len(ids)


def test_control_strings_in_messages_stay_text(tiny: Engine) -> None:
    messages = [{"role": "user", "content": "the <|im_end|> end"}]
    plain = tiny.chat(messages, GREEDY)
    assert tiny.chat(messages, GREEDY, SPECIAL).usage.prompt_tokens == plain.usage.prompt_tokens


def test_text_that_begins_with_bos_gets_no_second_bos(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.model.tokenizer, "bos_id", 1)
    count = len(tiny.tokenize("the"))
    assert tiny.generate("<s>the", GREEDY, SPECIAL).usage.prompt_tokens == 1 + count
    assert tiny.generate("the", GREEDY, SPECIAL).usage.prompt_tokens == 1 + count


# -- length ---------------------------------------------------------------------------------------------------------


def test_the_error_for_a_prompt_that_is_too_long_has_numbers(tiny: Engine) -> None:
    error = refused(lambda: tiny.generate([7] * 300), "300", str(CONTEXT), code="context_length_exceeded")
    assert error.numbers == {"n_prompt_tokens": 300, "n_ctx": CONTEXT}


RAIN = "the rain " * 10_000


@pytest.mark.parametrize("prompt", [RAIN, [{"role": "user", "content": RAIN}], MESSAGES * 4000])
def test_a_text_that_cannot_fit_is_not_tokenized(tiny: Engine, monkeypatch: pytest.MonkeyPatch, prompt: Any) -> None:
    """Only its beginning is."""
    tokenize, sizes = tiny.model.tokenizer.tokenize, list[int]()

    def tokenized(text: str, **options: Any) -> list[int]:
        sizes.append(len(text))
        return tokenize(text, **options)

    monkeypatch.setattr(tiny.model.tokenizer, "tokenize", tokenized)
    call = partial(tiny.generate, prompt, GREEDY, SPECIAL)
    error = refused(call, str(CONTEXT), "or more", code="context_length_exceeded")
    assert max(sizes) <= 16 * CONTEXT
    assert CONTEXT < error.numbers["n_prompt_tokens"] < 250_000


# -- the cache ------------------------------------------------------------------------------------------------------


def cached(answer: Completion) -> int:
    return answer.usage.cached_tokens


@pytest.mark.parametrize("prompt", [PROMPT, MESSAGES])
def test_cache_prompt_false_computes_the_whole_prompt(tiny: Engine, prompt: Any) -> None:
    first = tiny.generate(prompt, GREEDY)
    again = tiny.generate(prompt, GREEDY, PromptOptions(cache_prompt=False))
    assert (cached(first), cached(again)) == (0, 0)
    assert again.token_ids == first.token_ids
    assert cached(tiny.generate(prompt, GREEDY)) > 0


def test_cache_prompt_false_holds_after_preemption(tiny_path: Path) -> None:
    """A preempted request is recomputed as it was the first time, or its codes would differ."""
    with Engine.load(tiny_path, device="cpu", cache_type="polarquant", calibration=False, block_size=16) as engine:
        alone = engine.generate(PROMPT, GREEDY).token_ids
        chunks = engine.stream(PROMPT, GREEDY, PromptOptions(cache_prompt=False))
        answer = [next(chunks).token_ids for _ in range(4)]
        request = preempt(engine)
        answer += [chunk.token_ids for chunk in chunks]
        assert tuple(i for ids in answer for i in ids) == alone
        assert request.usage().cached_tokens == 0
        assert_idle(engine)


def test_a_preempted_request_keeps_its_salt(tiny: Engine) -> None:
    """Even if only a part of its prompt is left in the store, from which it may not go on."""
    ours = PromptOptions(cache_salt="ours")
    alone = tiny.generate(PROMPT, GREEDY, ours)
    forget(tiny)
    chunks = tiny.stream(PROMPT, GREEDY, ours)
    answer = list(next(chunks).token_ids)
    preempt(tiny)
    with blocks_left(tiny, 2):  # the prompt's last blocks are overwritten
        pass
    answer += [token for chunk in chunks for token in chunk.token_ids]
    assert tuple(answer) == alone.token_ids
    assert cached(tiny.generate(PROMPT, GREEDY)) == 0
    assert cached(tiny.generate(PROMPT, GREEDY, ours)) > 20


@pytest.mark.parametrize("prompt", [PROMPT, MESSAGES])
def test_a_salt_separates_stored_sequences(tiny: Engine, prompt: Any) -> None:
    ours, theirs = PromptOptions(cache_salt="ours"), PromptOptions(cache_salt="theirs")
    assert cached(tiny.generate(prompt, GREEDY, ours)) == 0
    for others in (theirs, None):
        assert cached(tiny.generate(prompt, GREEDY, others)) == 0
    for same in (ours, theirs, None):
        assert cached(tiny.generate(prompt, GREEDY, same)) > 15
    assert held(tiny) == [(0, 0)]


def test_salts_that_utf8_cannot_encode_differ(tiny: Engine) -> None:
    """JSON can hold half of a surrogate pair, which must not be replaced by a question mark."""
    salts = [PromptOptions(cache_salt=salt) for salt in ("?", "\ud800", "\udc00")]
    assert [cached(tiny.generate(PROMPT, GREEDY, salt)) for salt in salts] == [0, 0, 0]
    assert len({tiny._answers.conversation(MESSAGES, salt.cache_salt).keys for salt in salts}) == 3


def test_a_salt_separates_the_ids_of_answers(tiny: Engine) -> None:
    """The ids of an answer under another salt change nothing, not even a count of tokens."""
    ours = PromptOptions(cache_salt="ours")
    bias = {tiny.tokenize(letter)[0]: 100.0 for letter in "th"}
    answer = tiny.chat(MESSAGES, SamplingParams(max_tokens=9, logit_bias=bias, temperature=1.0, seed=1), ours)
    assert tiny.tokenize(answer.text) != list(answer.token_ids)
    turns = [*MESSAGES, {"role": "assistant", "content": answer.text}, MESSAGES[0]]
    lengths = [tiny.chat(turns, GREEDY, options).usage.prompt_tokens for options in (ours, None)]
    assert lengths[0] != lengths[1]


@pytest.mark.parametrize(
    ("name", "value"), [("parse_special", 1), ("cache_prompt", None), ("cache_salt", 5), ("cache_salt", b"x" * 1000)]
)
def test_an_option_of_a_wrong_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(EngineError, match=name) as raised:
        PromptOptions(**{name: value})
    assert len(str(raised.value)) < 160


def test_texts_between_ids_go_on_with_what_is_before_them(tiny: Engine) -> None:
    the, rain = tiny.tokenize("the"), tiny.tokenize(" rain")
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = tiny.generate([*the, *rain, 7], params)
    for mixed in (["the", *rain, 7], [*the, " rain", 7], ["the", " rain", 7]):
        assert tiny.generate(mixed, params).token_ids == expected.token_ids


def test_a_text_at_the_beginning_of_ids_begins_a_sequence(tiny: Engine, monkeypatch) -> None:
    monkeypatch.setattr(tiny.model.tokenizer, "bos_id", 1)
    the = len(tiny.tokenize("the"))
    counts = [
        tiny.generate(mixed, SamplingParams(max_tokens=0)).usage.prompt_tokens for mixed in (["the", 7], [7, "the"])
    ]
    assert counts == [the + 2, the + 1]


def test_a_text_between_ids_may_have_control_tokens_and_must_fit(tiny: Engine) -> None:
    none = SamplingParams(max_tokens=0)
    taken = tiny.generate([7, "<|im_start|>"], none, PromptOptions(parse_special=True)).usage.prompt_tokens
    spelt = tiny.generate([7, "<|im_start|>"], none).usage.prompt_tokens
    assert (taken, spelt > 2) == (2, True)
    refused(lambda: tiny.generate([7, "the " * 5000], none), code="context_length_exceeded")
