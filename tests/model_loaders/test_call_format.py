"""How models write calls of tools, found through their own chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.model_loaders.chat.otherwise import put_otherwise
from polarlm.model_loaders.chat.templates import ChatTemplate, for_folder
from tests import call_templates
from tests.rendering import rendered
from tests.shared_data import shared

TEMPLATES = Path(__file__).resolve().parents[1] / "fixtures" / "templates"
GENERAL = CallFormat()
TAGGED = CallFormat(native=True)
GEMMA = CallFormat(
    opening="<|tool_call>call:",
    middle=("",),
    closing="<tool_call|>",
    between="",
    shown_closing=("<tool_call|>",),
    separators=(",", ":"),
    quote='<|"|>',
    native=True,
    takes_any_text=False,
    takes_results=True,
)


def own(name: str) -> ChatTemplate:
    return ChatTemplate(getattr(call_templates, name), bos_token="<s>", eos_token="</s>")


SHORT: list[tuple[str, CallFormat, str]] = [
    ("HERMES", TAGGED, "<tool_call>"),
    (
        "MISTRAL",
        CallFormat(
            begin="[TOOL_CALLS] [",
            opening='{"name": "',
            closing="}",
            between=", ",
            end="]",
            shown_closing=(', "id": "', '"}'),
            native=True,
            short_ids=True,
        ),
        "[TOOL_CALLS]",
    ),
    (
        "MISTRAL_ARGS",
        CallFormat("", "[TOOL_CALLS]", ("[ARGS]",), "", "", "", ("",), native=True),
        "[TOOL_CALLS]",
    ),
    (
        "MISTRAL_IDS",
        CallFormat("", "[TOOL_CALLS]", ("[CALL_ID]", "[ARGS]"), "", "", "", ("",), native=True),
        "[TOOL_CALLS]",
    ),
    (
        "LLAMA",
        CallFormat(
            opening='{"name": "',
            middle=('", "parameters": ',),
            closing="}",
            between="",
            shown_closing=("}",),
            several=False,
            native=True,
        ),
        "",
    ),
    (
        "TEXT_ARGUMENTS",
        CallFormat("", "[TOOL_CALLS]", ("[ARGS]",), "", "", "", ("",), native=True, arguments_as_text=True),
        "[TOOL_CALLS]",
    ),
    ("GEMMA", GEMMA, "<|tool_call>call:"),
    ("GEMMA_OF_APRIL", GEMMA, "<|tool_call>call:"),
    ("NO_TOOLS", GENERAL, "<tool_call>"),
    ("XML", GENERAL, "<tool_call>"),
]


def test_short_templates() -> None:
    for name, expected, marker in SHORT:
        format = own(name).calls
        assert format == expected, name
        assert format.marker(("[TOOL_CALLS]", "[ARGS]")) == marker
        if format.native and not format.quote:
            text = rendered(own(name), format.as_messages(MESSAGES), tools=TOOLS)
            assert format.shown([("f", '{"a": [1, "b"]}', "abcdefgh1")]) in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", TAGGED),
        ("qwq", TAGGED),
        ("deepseek-r1-distill", GENERAL),
        ("qwen2.5", TAGGED),
        (
            "gpt-oss",
            CallFormat(
                opening=" to=functions.",
                middle=("<|channel|>commentary json<|message|>",),
                closing="",
                between="",
                shown_closing=("",),
                several=False,
                native=True,
                content_is_reasoning=True,
                needs_descriptions=True,
            ),
        ),
    ],
)
def test_templates_of_models(name: str, expected: CallFormat) -> None:
    if name == "qwen2.5":
        folder = shared("tokenizers", "qwen2_5")
        template = for_folder(folder, json.loads((folder / "tokenizer_config.json").read_text()))
    else:
        source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert template.calls == expected


CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "b"]}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
MESSAGES = [
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "so"},
]


def test_without_tools_in_the_template_calls_are_text() -> None:
    template = own("NO_TOOLS")

    def put(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return put_otherwise(template, messages, tools, {}).messages

    said = put([{"role": "system", "content": "Be kind."}, *MESSAGES, MESSAGES[2]], TOOLS)
    assert [message["role"] for message in said] == ["system", "user", "assistant", "user"]
    assert said[0]["content"].startswith("Be kind.\n\n")
    assert json.dumps(TOOLS[0]["function"]) in said[0]["content"]
    assert said[2]["content"] == template.calls.shown([("f", '{"a": [1, "b"]}', "")])
    assert "tool_calls" not in said[2]
    assert said[3]["content"] == "<tool_response>\nso\n</tool_response>\n<tool_response>\nso\n</tool_response>"
    assert put(MESSAGES[:1], TOOLS)[0]["role"] == "system"
    assert put(MESSAGES[:1], ()) == MESSAGES[:1]
