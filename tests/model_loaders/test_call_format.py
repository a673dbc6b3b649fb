"""How models write calls of tools, found through their own chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from polarlm.model_loaders.chat.call_arguments import CallFields
from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.model_loaders.chat.template_polyfills import adapt_conversation
from polarlm.model_loaders.chat.templates import ChatTemplate, for_folder
from tests import call_templates
from tests.rendering import published, rendered
from tests.shared_data import shared


def template_of(name: str) -> ChatTemplate:
    """The template of a model, or a short one of `call_templates`."""
    if name == "qwen2.5":
        folder = shared("tokenizers", "qwen2_5")
        return for_folder(folder, json.loads((folder / "tokenizer_config.json").read_text()))
    if not name.isupper():
        return published(name)
    return ChatTemplate(getattr(call_templates, name), bos_token="<s>", eos_token="</s>")


def native(opening: str, middle: Sequence[str], closing: str, **more: Any) -> CallFormat:
    return CallFormat(opening=opening, middle=(*middle,), closing=closing, is_native=True, **more)


def plain(opening: str, *middle: str, **more: Any) -> CallFormat:
    """A format with nothing around calls, and nothing after the arguments."""
    return native(opening, middle, "", begin="", call_separator="", end="", shown_closing=("",), **more)


def apart(fields: CallFields, opening: str, middle: str, closing: str, **more: Any) -> CallFormat:
    """A format whose arguments are no object."""
    return native(opening, [middle], closing, fields=fields, shown_closing=(closing,), takes_any_text=False, **more)


GEMMA = native(
    "<|tool_call>call:",
    [""],
    "<tool_call|>",
    call_separator="",
    shown_closing=("<tool_call|>",),
    separators=(",", ":"),
    quote='<|"|>',
    takes_any_text=False,
    takes_results=True,
)
MISTRAL = CallFormat(
    begin="[TOOL_CALLS] [",
    opening='{"name": "',
    closing="}",
    call_separator=", ",
    end="]",
    shown_closing=(', "id": "', '"}'),
    is_native=True,
    short_ids=True,
)
LLAMA = native('{"name": "', ['", "parameters": '], "}", call_separator="", shown_closing=("}",), has_several=False)
KIMI = native(
    "<|tool_call_begin|>functions.",
    [":", "<|tool_call_argument_begin|>"],
    "<|tool_call_end|>",
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    call_separator="",
    shown_closing=("<|tool_call_end|>",),
    id_form="functions.{name}:{index}",
)
PARAMETER_TAGS = apart(
    CallFields("<parameter=", ">\n", "\n</parameter>\n", "", python=("words",)),
    "<tool_call>\n<function=",
    ">\n",
    "</function>\n</tool_call>",
)
KEY_TAGS = CallFields("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "")
KEY_TAGS_IN_A_LINE = CallFields("<arg_key>", "</arg_key><arg_value>", "</arg_value>", "")
PYTHON = apart(
    CallFields("", "=", "", ", ", "'", python=("words", "array", "object")),
    "",
    "(",
    ")",
    begin="<|tool_call_start|>[",
    call_separator=", ",
    end="]<|tool_call_end|>",
)
GPT_OSS = plain(
    " to=functions.",
    "<|channel|>commentary json<|message|>",
    has_several=False,
    content_is_reasoning=True,
    needs_descriptions=True,
)
FORMATS: dict[str, tuple[CallFormat, str]] = {  # template → its format, and the marker
    **dict.fromkeys(("HERMES", "qwen3", "qwq", "qwen2.5"), (CallFormat(is_native=True), "<tool_call>")),
    **dict.fromkeys(("NO_TOOLS", "deepseek-r1-distill"), (CallFormat(), "<tool_call>")),
    **dict.fromkeys(("GEMMA", "GEMMA_OF_APRIL"), (GEMMA, "<|tool_call>call:")),
    "MISTRAL": (MISTRAL, "[TOOL_CALLS]"),
    "MISTRAL_ARGS": (plain("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]"),
    "MISTRAL_IDS": (plain("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), "[TOOL_CALLS]"),
    "TEXT_ARGUMENTS": (plain("[TOOL_CALLS]", "[ARGS]", arguments_as_text=True), "[TOOL_CALLS]"),
    "LLAMA": (LLAMA, ""),
    "PARAMETER_TAGS": (PARAMETER_TAGS, "<tool_call>\n<function="),
    "KEY_TAGS": (apart(KEY_TAGS, "<tool_call>", "\n", "</tool_call>"), "<tool_call>"),
    "KEY_TAGS_IN_A_LINE": (apart(KEY_TAGS_IN_A_LINE, "<tool_call>", "", "</tool_call>"), "<tool_call>"),
    "PYTHON": (PYTHON, "<|tool_call_start|>"),
    "XML": (CallFormat(is_unknown=True), "<tool_call>"),
    "KIMI": (KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions."),
    "gpt-oss": (GPT_OSS, " to=functions."),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_found(name: str) -> None:
    (expected, marker), format = FORMATS[name], template_of(name).calls
    assert format == expected
    assert format.marker(("[TOOL_CALLS]", "[ARGS]")) == marker
    if format.is_native:
        messages = format.as_messages(MESSAGES)
        id = messages[1]["tool_calls"][0]["id"]
        assert format.write_calls([("f", format.rewrite('{"a": [1, "b"]}'), id)]) in rendered(
            template_of(name), messages, tools=TOOLS
        )


CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "b"]}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
MESSAGES = [
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "so"},
]


def test_a_form_that_is_not_known_is_told_where_there_are_tools() -> None:
    warnings = [
        adapt_conversation(template_of(name), messages, tools, {}).warnings
        for name, messages, tools in (
            ("XML", MESSAGES[:1], TOOLS),
            ("XML", MESSAGES[:1], ()),
            ("PYTHON", MESSAGES, TOOLS),
        )
    ]
    assert [len(told) for told in warnings] == [1, 0, 0]
    assert "a form that is not known" in warnings[0][0]


def test_an_id_that_holds_the_name_is_made_where_it_is_missing() -> None:
    """Kimi's ids count all calls of a conversation; those of other servers, which may come twice, get their place."""
    calls = [[("call_1", "f"), ("functions.g:1", "g")], [("call_1", "g")]]
    messages: list[dict[str, Any]] = []
    for turn in calls:
        made = [{"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}} for id, name in turn]
        messages.append({"role": "assistant", "content": "", "tool_calls": made})
        messages += [{"role": "tool", "tool_call_id": id, "content": "so"} for id, _ in turn]
    accepted = template_of("KIMI").calls.as_messages(messages)
    ids = [message.get("tool_call_id") or [call["id"] for call in message["tool_calls"]] for message in accepted]
    assert ids == [
        ["functions.f:0", "functions.g:1"],
        "functions.f:0",
        "functions.g:1",
        ["functions.g:2"],
        "functions.g:2",
    ]


def test_without_tools_in_the_template_calls_are_text() -> None:
    template = template_of("NO_TOOLS")

    def put(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return adapt_conversation(template, messages, tools, {}).messages

    said = put([{"role": "system", "content": "Be kind."}, *MESSAGES, MESSAGES[2]], TOOLS)
    assert [message["role"] for message in said] == ["system", "user", "assistant", "user"]
    assert said[0]["content"].startswith("Be kind.\n\n")
    assert json.dumps(TOOLS[0]["function"]) in said[0]["content"]
    assert said[2]["content"] == template.calls.write_calls([("f", '{"a": [1, "b"]}', "")])
    assert "tool_calls" not in said[2]
    assert said[3]["content"] == "<tool_response>\nso\n</tool_response>\n<tool_response>\nso\n</tool_response>"
    assert put(MESSAGES[:1], TOOLS)[0]["role"] == "system"
    assert put(MESSAGES[:1], ()) == MESSAGES[:1]
