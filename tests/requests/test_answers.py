"""An answer that a client sends back as text becomes the ids that it was generated as."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarlm.engine import Completion, Engine, SamplingParams
from polarlm.engine.requests.answers import _ENTRY, Answers, _keys
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


def test_each_turn_of_a_conversation_hits_all_stored_tokens(tiny: Engine, letters: SamplingParams) -> None:
    messages, stored = [], 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"turn {turn}"})
        answer = tiny.chat(messages, letters)
        assert tiny.tokenize(answer.text) != list(answer.token_ids)
        assert answer.usage.cached_tokens == stored
        messages.append(said(answer.text))
        stored = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1


def test_token_ids_in_a_message_are_not_replaced(tiny: Engine, letters: SamplingParams) -> None:
    answer = tiny.chat([USER], letters)
    ids = tiny.tokenize(answer.text)
    assert next_turn(tiny, said(answer.text, token_ids=ids)).usage.cached_tokens < len(ids)


def test_ids_are_used_only_in_their_own_conversation(tiny: Engine, letters: SamplingParams) -> None:
    """The same text after another question, or in another role, is tokenized."""
    answer = tiny.chat([USER], letters)
    known = tiny._answers.conversation
    for messages in ([AGAIN, said(answer.text)], [USER, {"role": "user", "content": answer.text}]):
        assert known(messages).prompt == messages
    assert known([USER, said(answer.text + ".")]).prompt[1] == said(answer.text + ".")
    assert known([USER, said(answer.text)]).prompt[1] == said(answer.text, token_ids=answer.token_ids)


def test_changing_messages_after_the_request_has_no_effect(tiny: Engine, letters: SamplingParams) -> None:
    messages = [dict(USER)]
    chunks = tiny.stream(messages, letters)
    text = next(chunks).text
    messages[0]["content"] = "something else"
    text += "".join(chunk.text for chunk in chunks)
    assert "token_ids" in tiny._answers.conversation([USER, said(text)]).prompt[1]


def test_answers_whose_ids_say_more_than_their_text_are_not_kept(tiny: Engine, letters: SamplingParams) -> None:
    """Those cut at a stop string, and those with control tokens, which have no text."""
    stop = SamplingParams(**{**vars(letters), "stop": ("th",)})
    cut = tiny.chat([USER], stop)
    assert cut.finish_reason == "stop"
    control = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={EOS[0]: 100.0})
    ended = tiny.chat([USER], control)
    assert ended.token_ids == (EOS[0],) * 4
    for answer in (cut, ended):
        messages = [USER, said(answer.text)]
        assert tiny._answers.conversation(messages).prompt == messages


def test_an_engine_without_kept_sequences_keeps_no_answers(tiny_path, letters: SamplingParams) -> None:
    with Engine.load(tiny_path, device="cpu", cache_type="f16", kept_sequences=0) as engine:
        messages = [USER, said(engine.chat([USER], letters).text)]
        assert engine._answers.conversation(messages).prompt == messages


def test_the_least_recently_used_answer_is_dropped_first(tiny: Engine, monkeypatch) -> None:
    monkeypatch.setattr("polarlm.engine.requests.answers._CAPACITY", 2 * (_ENTRY + 1))
    ours = Answers(tiny.model, tiny.context, enabled=True)
    questions = [[{"role": "user", "content": str(i)}] for i in range(3)]

    def known() -> list[bool]:
        return ["token_ids" in ours.conversation([*question, said("a")]).prompt[1] for question in questions]

    def answer(question: list[dict]) -> None:
        ours.conversation(question).keep(tiny.tokenize("a"))

    answer(questions[0])
    answer(questions[1])
    assert known() == [True, True, False]
    answer(questions[1])  # again: it replaces its entry
    assert known() == [True, True, False]
    ours.conversation([*questions[0], said("a")])  # used again: question 1 is the oldest now
    answer(questions[2])
    assert known() == [True, False, True]


# -- sessions --------------------------------------------------------------------------------------------------------


def test_a_loaded_session_restores_the_ids_of_its_answers(
    tiny: Engine, tiny_path: Path, letters: SamplingParams, tmp_path: Path
) -> None:
    answer = tiny.chat([USER], letters)
    messages = [USER, said(answer.text), AGAIN]
    count = tiny.save_session(tmp_path / "talk", prompt=messages[:2])
    assert count == answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
    with load_tiny(tiny_path, **PLAIN) as restarted:
        assert "token_ids" not in restarted._answers.conversation(messages).prompt[1]
        session = restarted.load_session(tmp_path / "talk")
        assert len(session.token_ids) == count
        after = next_turn(restarted, said(answer.text))
        assert after.usage.cached_tokens == count
    assert after.token_ids == next_turn(tiny, said(answer.text)).token_ids


def test_restore_drops_answers_with_control_tokens_or_unknown_ids(tiny: Engine) -> None:
    _, key = _keys([USER, said("x")])
    for ids in ((EOS[0],), (tiny.model.tokenizer.vocab_size,), (-1,)):
        tiny._answers.restore([(key.hex(), ids)])
        assert tiny._answers.conversation([USER, said("x")]).prompt == [USER, said("x")]
