"""Models that reason before they answer: later prompts leave the reasoning out, as the models' own templates do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.requests.prompts import prompt_ids
from polarlm.model_loaders import load
from polarlm.model_loaders.chat.reasoning import Tags, find_tags
from tests.rendering import TEMPLATES, rendered
from tests.tiny import VOCABULARY, assert_idle, forget, make_model

CONTROL = ("<s>", "</s>", "<|im_end|>", "<|im_start|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
TAGS = ("<think>", "</think>")
BLOCK = 16
QUESTION = "a question of more than one block"
AGAIN = "and now"


def tokenizer_json() -> str:
    """Letters as bytes, "th", and the tags of reasoning, which are text."""
    pieces = [*CONTROL, *TAGS, *map(chr, range(ord("A"), ord("z") + 1)), "Ġ", "Ċ", "?", "th"]
    pieces += [f"unused{i}" for i in range(VOCABULARY - len(pieces))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [("t", "h")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(CONTROL))
    library.add_tokens(list(TAGS))
    return library.to_str()


@pytest.fixture(params=["qwen3", "qwq", "deepseek-r1-distill"], scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The tiny model with the template of a model that reasons."""
    tmp_path = make_model(tmp_path_factory.mktemp("reasons"))
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    shutil.copy(TEMPLATES / f"{request.param}.jinja", tmp_path / "chat_template.jinja")
    with Engine.load(tmp_path, device="cpu", cache_type="f16", calibration=False, block_size=BLOCK) as engine:
        yield engine


@pytest.fixture
def engine(loaded: Engine) -> Engine:
    """The same, which knows no earlier prompts."""
    assert_idle(loaded)
    forget(loaded)
    return loaded


@pytest.fixture
def params(engine: Engine) -> SamplingParams:
    """24 tokens, each one letter, t or h, or the end of reasoning."""
    bias = {engine.tokenize(piece)[0]: 100.0 for piece in ("t", "h", "</think>")}
    return SamplingParams(temperature=1, seed=1, max_tokens=24, logit_bias=bias)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ids_of(engine: Engine, messages: list[dict[str, str]]) -> list[int]:
    """The messages, rendered by the template and tokenized."""
    return engine.model.tokenizer.tokenize(rendered(engine.model.template, messages), control=True)


def next_prompt(engine: Engine, answer: str) -> tuple[int, int]:
    """(tokens of the second turn's prompt, length of the prefix that it shares with the first)."""
    assert "</think>" in answer
    assert not answer.endswith("</think>")
    first, second = [user(QUESTION)], [user(QUESTION), {"role": "assistant", "content": answer}, user(AGAIN)]
    before, ids = ids_of(engine, first), ids_of(engine, second)
    assert engine.detokenize(ids).count("</think>") == 0
    return len(ids), sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, ids, strict=False)))


def assert_continues(engine: Engine, answer: str, prompt_tokens: int, cached_tokens: int) -> None:
    expected, common = next_prompt(engine, answer)
    assert prompt_tokens == expected
    assert common - BLOCK < cached_tokens <= common


def test_engine(engine: Engine, params: SamplingParams) -> None:
    answer = engine.chat([user(QUESTION)], params)
    messages = [user(QUESTION), {"role": "assistant", "content": answer.text}, user(AGAIN)]
    known = engine._answers.conversation(messages).prompt
    assert "token_ids" in known[1]
    assert prompt_ids(known, engine.model) == ids_of(engine, messages)
    usage = engine.chat(messages, params).usage
    assert_continues(engine, answer.text, usage.prompt_tokens, usage.cached_tokens)


PAIRS = [
    ("<think>\n", "\n</think>\n", Tags("<think>", "</think>")),
    ("[THINK]", "[/THINK]", Tags("[THINK]", "[/THINK]")),
    ("<think>", "\n", None),
    ("", "</think>", None),
    ("", "", None),
]


class Around:
    """A template that writes the reasoning of an answer between `before` and `after`."""

    def __init__(self, before: str, after: str):
        self.before, self.after = before, after

    def render_each(self, conversations: Sequence[Sequence[Mapping[str, Any]]], **_: object) -> list[str]:
        return ["".join(map(self._shown, messages)) for messages in conversations]

    def _shown(self, message: Mapping[str, Any]) -> str:
        reasoning = message.get("reasoning_content")
        return message["content"] if reasoning is None else f"{self.before}{reasoning}{self.after}{message['content']}"


def test_tags_come_in_pairs() -> None:
    for before, after, tags in PAIRS:
        assert find_tags(Around(before, after).render_each) == tags


CHANNEL = Tags("<|channel>thought", "<channel|>")
REMOVES = (  # what past answers thought, and opens the channel only where it is closed at once
    "{% for m in messages %}{{ '<|turn>' + m.role + '\\n' }}{% for part in m.content.split('<channel|>') %}"
    "{{ part.split('<|channel>')[0] }}{% endfor %}{{ '<turn|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n' }}"
    "{% if not enable_thinking %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}{% endif %}"
)


def test_tags_that_a_template_only_removes_are_known(tmp_path: Path) -> None:
    make_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(REMOVES, encoding="utf-8")
    template = load(str(tmp_path)).template
    assert template.tags == CHANNEL
    assert template.place_of_answer({}) == "after"
    assert template.place_of_answer({"enable_thinking": True}) == "before"


def test_an_answer_that_shows_no_reasoning_is_found_again(engine: Engine, params: SamplingParams) -> None:
    letters = dict(list(params.logit_bias.items())[:2])
    params = SamplingParams(temperature=1, seed=1, max_tokens=24, logit_bias=letters)
    answer = engine.chat([user(QUESTION)], params)
    usage = engine.chat([user(QUESTION), {"role": "assistant", "content": answer.text}, user(AGAIN)], params).usage
    assert usage.cached_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
