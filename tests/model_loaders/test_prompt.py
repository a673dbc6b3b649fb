"""From conversations to ids: messages stay text, and a conversation's ids only grow."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.model_loaders.chat.prompt import chat_ids
from polarlm.model_loaders.chat.templates import ChatTemplate, for_folder, for_gguf
from polarlm.model_loaders.files.gguf_file import GgufFile
from polarlm.model_loaders.tokenizers import Tokenizer, load_for_gguf
from tests.model_loaders import vocabularies as vocab
from tests.rendering import published
from tests.shared_data import shared

# As Llama 2's: past answers stand between spaces that the model was not asked with.
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# As reasoning models': what is opened for a new answer is left out of past ones.
THINKING = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n<think>\n' }}{% endif %}"
)
# As Mistral's: what is said first moves to the last question.
MOVING = (
    "{% for m in messages[1:] %}{{ '<s>' }}{% if loop.last %}{{ messages[0].content + '\n' }}{% endif %}"
    "{{ m.content + '</s>' }}{% endfor %}"
)
# Says how long an answer was, which frames around it change.
COUNTING = "{% for m in messages %}{{ '<s>' + m.content + ' (' + m.content|length|string + ')</s>' }}{% endfor %}"
OPENERS = {"qwen3": "", "qwq": "<think>\n", "deepseek-r1-distill": "<think>\n"}  # what a prompt opens for its answer
MODELS = ("smollm2", "qwen2.5", "llama2", "thinking")
TEXTS = st.text(max_size=20)


@cache
def _demo(path: Path) -> tuple[Tokenizer, ChatTemplate]:
    gguf = GgufFile(path)
    return load_for_gguf(gguf), for_gguf(gguf)


@cache
def _from_data(name: str) -> tuple[Tokenizer, ChatTemplate]:
    folder = {"llama3": "llama3", "qwen2.5": "qwen2_5"}.get(name)
    if folder is None:
        sources = {"llama2": LLAMA2, "thinking": THINKING}
        template = ChatTemplate(sources.get(name, ""), bos_token="<s>", eos_token="</s>")
        return vocab.real("llama2-model"), template if name in sources else for_folder(Path("/nonexistent"), {})
    config = json.loads(shared("tokenizers", folder, "tokenizer_config.json").read_text())
    return vocab.real(f"{name}-json"), for_folder(shared("tokenizers", folder), config)


@pytest.fixture(params=MODELS, scope="module")
def model(request: pytest.FixtureRequest) -> tuple[Tokenizer, ChatTemplate]:
    if request.param == "smollm2":
        return _demo(request.getfixturevalue("demo_path"))
    return _from_data(request.param)


def tiny(source: str, **metadata: object) -> tuple[Tokenizer, ChatTemplate]:
    control = (("<s>", vocab.CONTROL), ("</s>", vocab.CONTROL))
    ids = {"tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.eos_token_id": 258}
    gguf = vocab.tiny_bpe(*control, **ids, **metadata)
    return load_for_gguf(gguf), ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def user(content: str) -> dict[str, object]:
    return {"role": "user", "content": content}


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def control_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [i for i in ids if i in tokenizer.control_tokens().values()]


@settings(max_examples=20)
@given(data=st.data())
def test_text_of_messages_adds_no_control_token(model, data: st.DataObject) -> None:
    tokenizer, template = model
    control = sorted(tokenizer.control_tokens())
    span = st.tuples(st.sampled_from(control), st.integers(0, 30), st.integers(0, 30))
    cut = span.map(lambda drawn: drawn[0][drawn[1] : drawn[2]])
    pieces = st.one_of(st.sampled_from(control), cut, st.text(max_size=5), st.sampled_from("<>| \ufdd0\ufdd1\n"))
    contents = data.draw(st.lists(st.lists(pieces, max_size=6).map("".join), min_size=1, max_size=4))

    def ids(texts: list[str]) -> list[int]:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        return chat_ids(messages, template, tokenizer)

    harmless = ["x" if content else "" for content in contents]
    assert control_ids(tokenizer, ids(contents)) == control_ids(tokenizer, ids(harmless))


def said(content: str, *ids: int) -> dict[str, object]:
    return {"role": "assistant", "content": content, "token_ids": list(ids)}


EOS_AFTER = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
ABC = [user("a"), said("b", 256), user("c")]
# A template, messages, and what becomes of them, as ids (256 is "he", 257 <s>, 258 </s>) or as their text.
RENDERED: list[tuple[str, list[dict[str, object]], list[int] | str]] = [
    ("{{ '<' + messages[0].content + '>' }}", [user("s")], "<s>"),  # a template cannot complete a control string
    ("{{ messages[0].content + 's>' }}", [user("</")], "</s>"),
    ("{{ messages[0].role }}", [{"role": "user</s>", "content": ""}], "user</s>"),
    ("h{{ messages[0].content }}", [user("e")], [256]),  # text merges across the border of a message
    ("{{ '<s>' + messages[0].content | trim + '</s>' }}", [user(" \n</s> ")], [257, *map(ord, "</s>"), 258]),
    (EOS_AFTER, [said("he", 256, 258), user("h")], [256, 258, ord("h"), 258]),  # a final EOS is the template's
    (THINKING, [user("h"), said("he", 256), user("h")], "user\nhassistant\n<think>\nheuser\nhassistant\n<think>\n"),
    (MOVING, [user("first"), user("a"), said("!", 256), user("b")], "ahefirst\nb"),
    # An answer that the template changes has the template's text.
    ("{{ messages[-1].content }}", ABC, "c"),
    ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", ABC, "aabbcc"),
    ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", ABC, "chea"),
    ("{% for m in messages %}{{ m.content | replace('\ufdd1', '') }}{% endfor %}", ABC, "ahec"),
    # One that says how long an answer was, which frames change, has its own text.
    (COUNTING, [user("hi"), said("then he", 256), user("and?")], "hi (2)then he (7)and? (4)"),
]


def test_what_templates_make_of_messages() -> None:
    for source, messages, expected in RENDERED:
        tokenizer, template = tiny(source)
        ids = chat_ids(messages, template, tokenizer)
        assert (text_of(tokenizer, ids) if isinstance(expected, str) else ids) == expected, source


class TestConversationsOnlyGrow:
    @settings(max_examples=20)
    @given(data=st.data())
    def test_a_turn_begins_with_all_ids_of_the_one_before(self, model, data: st.DataObject) -> None:
        tokenizer, template = model
        text_ids = st.integers(0, tokenizer.vocab_size - 1).filter(lambda i: i not in tokenizer.eos_ids)
        end = st.sampled_from([[], *([i] for i in sorted(tokenizer.eos_ids))])
        messages: list[dict[str, object]] = []
        known: list[int] = []
        for question in data.draw(st.lists(TEXTS, min_size=2, max_size=4)):
            messages.append(user(question))
            prompt = chat_ids(messages, template, tokenizer)
            assert prompt[: len(known)] == known
            said = data.draw(st.one_of(TEXTS.map(tokenizer.tokenize), st.lists(text_ids, max_size=8)))
            known = prompt + said
            answer = {"role": "assistant", "content": text_of(tokenizer, said), "token_ids": said + data.draw(end)}
            messages.append(answer)

    @pytest.mark.parametrize("name", ["qwen2.5", "llama2"])
    def test_ids_that_are_the_texts_own_change_nothing(self, name: str) -> None:
        tokenizer, template = _from_data(name)
        said = tokenizer.tokenize("The capital is Paris.", continued=name != "llama2")
        answer = {"role": "assistant", "content": "The capital is Paris."}
        spoken = [user("Capital of France?"), answer, user("Thanks")]
        generated = [spoken[0], {**answer, "token_ids": said}, spoken[2]]
        as_text, as_ids = (chat_ids(messages, template, tokenizer) for messages in (spoken, generated))
        if name == "llama2":  # the template's space after an answer is a token of its own, or merges with nothing
            assert text_of(tokenizer, as_text) == text_of(tokenizer, as_ids)
        else:
            assert as_text == as_ids


def reasoning_model(name: str) -> tuple[Tokenizer, ChatTemplate]:
    """The template of a model that reasons, and a vocabulary with its control tokens."""
    control = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
    tokenizer = load_for_gguf(vocab.tiny_bpe(*((token, vocab.CONTROL) for token in control)))
    return tokenizer, published(name)


def with_ids(tokenizer: Tokenizer, text: str) -> dict[str, object]:
    """An answer whose ids are one per byte, where the tokenizer would take "he" as one."""
    ids = [i for byte in text for i in tokenizer.tokenize(byte)]
    return {"role": "assistant", "content": text, "token_ids": ids}


@pytest.mark.parametrize("name", OPENERS)
class TestReasoningStaysBehind:
    def test_the_text_before_an_answer_is_the_same_in_later_prompts(self, name: str) -> None:
        tokenizer, template = reasoning_model(name)
        messages = [user("hi")]
        for _ in range(3):
            asked = chat_ids(messages, template, tokenizer)
            messages += [with_ids(tokenizer, "the reason</think>\n\nhe"), user("and?")]
            again = chat_ids(messages, template, tokenizer)
            opener = tokenizer.tokenize(OPENERS[name])
            stays = asked[: len(asked) - len(opener)]
            assert asked == stays + opener
            assert again[: len(stays)] == stays

    def test_the_templates_process_is_asked_once_for_a_conversation(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer, template = reasoning_model(name)
        ask, asked = template._process.ask, []
        monkeypatch.setattr(template._process, "ask", lambda each: asked.append(len(each)) or ask(each))

        def renderings_of(turns: int, text: str) -> list[int]:
            asked.clear()
            answers = [with_ids(tokenizer, f"{text} {turn}") for turn in range(turns)]
            chat_ids([m for answer in answers for m in (user("hi"), answer)] + [user("so?")], template, tokenizer)
            return list(asked)

        for turns in (0, 2):
            renderings_of(turns, "he")  # what the template takes is looked at once
        assert renderings_of(0, "") == [1]
        for text in ("he", "the reason</think>he"):
            assert renderings_of(20, text) == renderings_of(2, text) == [3]


def test_bos_is_added_once_where_the_model_wants_it() -> None:
    for source, adds, ids in (("{{ bos_token }}he", True, [257, 256]), ("he", True, [257, 256]), ("he", False, [256])):
        tokenizer, template = tiny(source, **{"tokenizer.ggml.add_bos_token": adds})
        assert chat_ids([user("")], template, tokenizer) == ids


MALFORMED: list[tuple[Any, str]] = [
    ([], "at least one message"),
    ("hello", "must be a list"),
    (["hello"], r"messages\[0\] must be an object"),
    ([user("a"), {"content": "b"}], r"messages\[1\]\.role must be a string"),
    ([{"role": "user"}], r"messages\[0\]\.content must be a string"),
    ([{"role": "user", "content": ["a"]}], r"messages\[0\]\.content must be a string"),
    ([{"role": "assistant", "content": "", "token_ids": "ab"}], r"messages\[0\]\.token_ids must be a list"),
    ([{"role": "assistant", "content": "", "token_ids": [999]}], r"messages\[0\]\.token_ids has 999"),
]


def test_malformed_messages_are_named() -> None:
    tokenizer, template = tiny("{{ messages[0].content }}")
    for messages, complaint in MALFORMED:
        with pytest.raises(ValueError, match=complaint):
            chat_ids(messages, template, tokenizer)
