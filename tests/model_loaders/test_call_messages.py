"""Conversations with tools as ids: texts of tools and calls stay text, and an answer's ids stand for all of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polarlm.model_loaders.chat.prompt import chat_ids
from polarlm.model_loaders.chat.template_polyfills import adapt_conversation
from polarlm.model_loaders.chat.templates import ChatTemplate, for_gguf
from polarlm.model_loaders.files.gguf_file import GgufFile
from polarlm.model_loaders.tokenizers import Tokenizer, load_for_gguf
from tests import call_templates
from tests.tool_model import tool_model

NAMES = (
    *("LLAMA", "MISTRAL", "MISTRAL_IDS", "NO_TOOLS", "GEMMA", "PARAMETER_TAGS", "KEY_TAGS", "PYTHON"),
    *("INVOKE_TAGS", "TYPED_TAGS", "DEEPSEEK", "DEEPSEEK_SHORT", "KIMI"),
)
FAMILIES = {"qwen3": call_templates.QWEN3, **{name: getattr(call_templates, name) for name in NAMES}}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, ChatTemplate]:
    gguf = GgufFile(tool_model(tmp_path_factory.mktemp("model"), FAMILIES[request.param]))
    return load_for_gguf(gguf), for_gguf(gguf)


def conversation(word: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools that have a word wherever a client can put one."""
    arguments = json.dumps({word: [word]}, ensure_ascii=False)
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    schema = {"type": "object", "properties": {word: {"type": "string", "description": word}}}
    messages = [
        {"role": "user", "content": word},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": word},
        {"role": "tool", "tool_call_id": "abcdefgh1", "name": "f", "content": word},
    ]
    return messages, [{"type": "function", "function": {"name": "f", "description": word, "parameters": schema}}]


def test_control_strings_of_clients_stay_text(family: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, template = family
    control = set(tokenizer.control_tokens().values())

    def counted(word: str) -> list[int]:
        messages, tools = conversation(word)
        return [i for i in chat_ids(messages, template, tokenizer, tools=tools) if i in control]

    harmless = counted("harmless")
    for name in tokenizer.control_tokens():
        assert counted(name) == harmless
        assert counted(f"a{name}b") == harmless


def test_the_ids_of_an_answer_stand_for_its_text_and_its_calls(family: tuple[Tokenizer, ChatTemplate]) -> None:
    """Whatever the template makes of the arguments, the next prompt begins with what is in the cache."""
    tokenizer, template = family
    messages, tools = conversation("word")
    del messages[1]["reasoning_content"]
    asked = chat_ids(messages[:1], template, tokenizer, tools=tools)
    ids = [*tokenizer.tokenize("any ids at all"), tokenizer.control_tokens()["[TOOL_CALLS]"]]
    messages[1]["token_ids"] = ids
    answered = chat_ids(messages, template, tokenizer, tools=tools)
    assert answered[: len(asked) + len(ids)] == asked + ids
    result = tokenizer.tokenize("word", continued=True)
    assert any(answered[at : at + len(result)] == result for at in range(len(asked) + len(ids), len(answered)))


CUT_OFF = '{"city": "Ro'


def test_a_call_that_was_cut_off_is_shown_as_its_text(family: tuple[Tokenizer, ChatTemplate]) -> None:
    """A template that takes objects alone shows an empty one."""
    _, template = family
    messages, tools = conversation("word")
    messages[1]["tool_calls"][0]["function"]["arguments"] = CUT_OFF
    (text,) = template.render_each([adapt_conversation(template, messages, tools, {}).messages])
    shown = (CUT_OFF, json.dumps(CUT_OFF), template.calls.write_calls([("f", template.calls.write({}), "")]))
    assert any(one in text for one in (shown[:2] if template.calls.takes_any_text else shown[2:]))
