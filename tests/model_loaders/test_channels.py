"""Answers of messages in channels: how gpt-oss's template writes them, and how conversations with them continue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from polarlm.model_loaders.chat.channels import Channels
from polarlm.model_loaders.chat.prompt import chat_ids
from polarlm.model_loaders.chat.reasoning import Tags
from polarlm.model_loaders.tokenizers import known_names
from tests.rendering import published
from tests.tool_model import tool_engine

USER = {"role": "user", "content": "why"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "so"}


def test_channels_of_gpt_oss() -> None:
    gpt_oss = published("gpt-oss")
    expected = Channels("<|start|>", "assistant", "<|channel|>", "<|message|>", "<|end|>", "analysis", "final")
    assert gpt_oss.channels == expected
    assert gpt_oss.tags == Tags("<|channel|>analysis<|message|>", "<|end|>")
    assert gpt_oss.place_of_answer({}) == "before"


def test_the_end_of_a_message_does_not_end_an_answer() -> None:
    names = {"<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|endoftext|>"}
    assert known_names.ends(names) == {"<|return|>", "<|call|>", "<|endoftext|>"}
    assert known_names.ends({"<|end|>", "<|calls|>", "<|flush|>"}) == {"<|calls|>", "<|flush|>"}
    assert known_names.ends({"<|end|>", "<|endoftext|>"}) == {"<|end|>", "<|endoftext|>"}


def prompt(messages: list[dict[str, Any]], model: Any, **more: Any) -> str:
    ids = chat_ids(messages, model.template, model.tokenizer, tools=TOOLS, **more)
    names = {number: name for name, number in model.tokenizer.control_tokens().items()}
    return "".join(names.get(id) or model.tokenizer.token_bytes(id).decode() for id in ids)


@pytest.fixture(scope="class")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tool_engine(tmp_path_factory.mktemp("model"), published("gpt-oss").source) as engine:
        yield engine.model


class TestCalls:
    def test_reasoning_before_a_call_is_shown_until_an_answer_follows(self, model: Any) -> None:
        called = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}
        end = (
            "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
            '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
            '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"so"<|end|><|start|>assistant'
        )
        assert prompt([USER, called, RESULT], model).endswith(end)
        answered = [USER, called, RESULT, {"role": "assistant", "content": "ok"}, USER]
        assert "hm" not in prompt(answered, model)

    def test_text_before_a_call_becomes_reasoning(self, model: Any) -> None:
        called = {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [CALL]}
        assert "analysis<|message|>hm\n\nI look.<|end|>" in prompt([USER, called, RESULT], model)

    @pytest.mark.parametrize("content", ["", "I look."])
    def test_a_call_is_replaced_by_the_ids_that_it_was_generated_as(self, model: Any, content: str) -> None:
        written = (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a":1}'
        )
        ids = model.tokenizer.tokenize(f"{written}<|call|>", control=True)
        called = {"role": "assistant", "content": content, "tool_calls": [CALL], "token_ids": ids, "reasoned": True}
        assert f"<|start|>assistant{written}<|call|><|start|>functions.f to" in prompt([USER, called, RESULT], model)
