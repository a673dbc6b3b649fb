"""An answer that comes back as text is found in the store as the tokens it was generated as."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import Completion, Engine, SamplingParams
from engine.requests.answers import _ENTRY, Answers, _keys
from tests.tiny import EOS, PLAIN, load_tiny

USER = {"role": "user", "content": "the end"}
AGAIN = {"role": "user", "content": "and then"}


@pytest.fixture
def letters(tiny: Engine) -> SamplingParams:
    """40 tokens that are one letter each, t or h: the tokenizer would take "th" as one."""
    bias = {tiny.tokenize(letter)[0]: 100.0 for letter in "th"}
    return SamplingParams(temperature=1, seed=0, max_tokens=40, logit_bias=bias)


def said(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def next_turn(engine: Engine, answer: dict) -> Completion:
    return engine.chat([USER, answer, AGAIN], SamplingParams(temperature=0, max_tokens=8))


def test_an_answer_handed_back_as_text_is_not_prefilled_again(tiny: Engine, letters: SamplingParams) -> None:
    answer = tiny.chat([USER], letters)
    assert tiny.tokenize(answer.text) != list(answer.token_ids)
    second = next_turn(tiny, said(answer.text))
    stored = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1  # nobody computed what follows the last
    assert second.usage.cached_tokens == stored
    assert (
        second.usage.prompt_tokens == next_turn(tiny, said(answer.text, token_ids=answer.token_ids)).usage.prompt_tokens
    )


def test_a_whole_conversation_is_found_turn_by_turn(tiny: Engine, letters: SamplingParams) -> None:
    messages, stored = [], 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"turn {turn}"})
        answer = tiny.chat(messages, letters)
        assert answer.usage.cached_tokens == stored
        messages.append(said(answer.text))
        stored = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1


def test_ids_that_come_with_a_message_stand(tiny: Engine, letters: SamplingParams) -> None:
    answer = tiny.chat([USER], letters)
    ids = tiny.tokenize(answer.text)
    assert next_turn(tiny, said(answer.text, token_ids=ids)).usage.cached_tokens < len(ids)


def test_an_answer_stands_in_for_no_other(tiny: Engine, letters: SamplingParams) -> None:
    """The same text behind another question, or from somebody else's mouth, is cut as the tokenizer cuts it."""
    answer = tiny.chat([USER], letters)
    with_ids = tiny._answers.with_ids
    for messages in ([AGAIN, said(answer.text)], [USER, {"role": "user", "content": answer.text}]):
        assert with_ids(messages) == messages
    assert with_ids([USER, said(answer.text + ".")])[1] == said(answer.text + ".")
    assert with_ids([USER, said(answer.text)])[1] == said(answer.text, token_ids=answer.token_ids)


def test_messages_that_change_afterwards_change_nothing(tiny: Engine, letters: SamplingParams) -> None:
    messages = [dict(USER)]
    chunks = tiny.stream(messages, letters)
    text = next(chunks).text
    messages[0]["content"] = "something else"
    text += "".join(chunk.text for chunk in chunks)
    assert "token_ids" in tiny._answers.with_ids([USER, said(text)])[1]


def test_what_is_not_the_text_alone_is_not_kept(tiny: Engine, letters: SamplingParams) -> None:
    """Cut off at a stop string, or with control tokens, which have no text: the ids say more than the text."""
    stop = SamplingParams(**{**vars(letters), "stop": ("th",)})
    cut = tiny.chat([USER], stop)
    assert cut.finish_reason == "stop"
    control = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={EOS[0]: 100.0})
    ended = tiny.chat([USER], control)
    assert ended.token_ids == (EOS[0],) * 4
    for answer in (cut, ended):
        messages = [USER, said(answer.text)]
        assert tiny._answers.with_ids(messages) == messages


def test_an_engine_that_keeps_nothing_remembers_no_answers(tiny_path, letters: SamplingParams) -> None:
    with Engine.load(tiny_path, device="cpu", cache_type="f16", kept_sequences=0) as engine:
        messages = [USER, said(engine.chat([USER], letters).text)]
        assert engine._answers.with_ids(messages) == messages


@pytest.mark.parametrize("messages", [[USER, 7], [USER, {"role": "user"}], [USER, said("x") | {"content": None}]])
def test_malformed_messages_are_left_to_who_refuses_them(tiny: Engine, messages) -> None:
    assert tiny._answers.with_ids(messages) is messages


def test_the_oldest_go_first(tiny: Engine, monkeypatch) -> None:
    monkeypatch.setattr("engine.requests.answers._CAPACITY", 2 * (_ENTRY + 1))
    answers = Answers(tiny.model, enabled=True)
    questions = [[{"role": "user", "content": str(i)}] for i in range(3)]

    def known() -> list[bool]:
        return ["token_ids" in answers.with_ids([*question, said("a")])[1] for question in questions]

    def answer(question: list[dict]) -> None:
        answers.keep(answers.question(question), tiny.tokenize("a"))

    answer(questions[0])
    answer(questions[1])
    assert known() == [True, True, False]
    answer(questions[1])  # once more: it takes no more room
    assert known() == [True, True, False]
    answers.with_ids([*questions[0], said("a")])  # asked for again: it is question 1's turn to go
    answer(questions[2])
    assert known() == [True, False, True]


# -- sessions --------------------------------------------------------------------------------------------------------


def test_a_saved_conversation_is_found_by_its_text_after_a_restart(
    tiny: Engine, tiny_path: Path, letters: SamplingParams, tmp_path: Path
) -> None:
    answer = tiny.chat([USER], letters)
    messages = [USER, said(answer.text), AGAIN]
    count = tiny.save_session(tmp_path / "talk", prompt=messages[:2])
    assert count == answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
    with load_tiny(tiny_path, **PLAIN) as restarted:
        assert "token_ids" not in restarted._answers.with_ids(messages)[1]
        session = restarted.load_session(tmp_path / "talk")
        assert len(session.token_ids) == count
        after = next_turn(restarted, said(answer.text))
        assert after.usage.cached_tokens == count
    assert after.token_ids == next_turn(tiny, said(answer.text)).token_ids


def test_a_session_brings_no_control_tokens_and_no_unknown_ones(tiny: Engine) -> None:
    _, key = _keys([USER, said("x")])
    for ids in ((EOS[0],), (tiny.model.tokenizer.vocab_size,), (-1,)):
        tiny._answers.restore([(key.hex(), ids)])
        assert tiny._answers.with_ids([USER, said("x")]) == [USER, said("x")]
