"""Conversations as agents send them, for chat templates that refuse some of their messages or leave texts out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine, EngineError, SamplingParams
from polarlm.model_loaders.chat.template_polyfills import adapt_conversation
from polarlm.model_loaders.chat.templates import ChatTemplate
from tests import call_templates
from tests.pairs import mostly_slow
from tests.rendering import TEMPLATES, rendered
from tests.tool_model import tool_engine

_HEADED = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
FIRST_ALONE = (  # as Qwen 3.5 does
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + _HEADED + "{% endfor %}" + _PROMPT
)
TURNS = (
    "{% set off = 1 if messages[0].role == 'system' else 0 %}{% if off %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages[off:] %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + _HEADED + "{% endfor %}" + _PROMPT
)
SHORT = {
    "the first alone": FIRST_ALONE,
    "turns": TURNS,
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TURNS,
    "others in silence": "{% for m in messages %}{% if m.role in ('user', 'assistant') %}" + _HEADED + "{% endif %}"
    "{% endfor %}" + _PROMPT,
    "nothing empty": "{% for m in messages %}{% if m.content == '' %}{{ raise_exception('empty') }}{% endif %}"
    "{% endfor %}" + TURNS,
    "parts alone": "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text + '\\n' }}"
    "{% endif %}{% endfor %}{% endfor %}",
    "the last system alone": "{% set n = namespace(s='') %}{% for m in messages if m.role == 'system' %}"
    "{% set n.s = m.content %}{% endfor %}{{ n.s }}{% for m in messages if m.role != 'system' %}"
    + _HEADED
    + "{% endfor %}"
    + _PROMPT,
    "text beside calls in silence": call_templates.HERMES,
    **{
        name: getattr(call_templates, name)
        for name in ("MISTRAL", "MISTRAL_IDS", "LLAMA", "NO_TOOLS", "XML", "GEMMA", "GEMMA_OF_APRIL")
    },
}
REAL = {path.stem: path.read_text(encoding="utf-8") for path in TEMPLATES.glob("*.jinja")}

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
TALK = [{"role": "user", "content": "why"}]
_TEXTS = iter(range(10**6))


def said(roles: str) -> list[dict[str, Any]]:
    """A conversation: s, d, u, a for the roles; c for a call, b for one beside a text, p for two, t for a result.

    Capitals have no text.
    """
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    messages: list[dict[str, Any]] = []
    waiting: list[str] = []  # ids of calls without results
    for letter in roles:
        text = f"word{next(_TEXTS)}end" if letter.islower() and letter not in "cp" else ""
        message: dict[str, Any] = {"role": names.get(letter.lower(), "assistant"), "content": text}
        if letter in "cbp":
            ids = [f"call{next(_TEXTS):05}" for _ in range(1 + (letter == "p"))]
            function = {"name": "read", "arguments": '{"path": "x"}'}
            message["tool_calls"] = [{"id": id, "type": "function", "function": function} for id in ids]
            waiting = ids
        if letter == "t":
            message |= {"name": "read", "tool_call_id": waiting.pop(0) if waiting else "call00000"}
        messages.append(message)
    return messages


CONVERSATIONS = {
    "a question": "u",
    "a conversation": "suauau",
    "Codex: instructions and a developer": "sdu",
    "Codex: the surroundings as the user's": "sduuctau",
    "Codex: a developer in the middle": "suadu",
    "Codex: a developer behind a result": "suctdctau",
    "Codex: two calls at a time": "suptta",
    "Claude Code: a reminder behind the question": "sus",
    "Claude Code: reminders at every turn": "susasuasua",
    "Claude Code: a reminder behind a result": "subtsbtau",
    "Claude Code: two messages of the user": "suuauu",
    "Claude Code: stopped in a tool": "suctu",
    "Claude Code: stopped before the result": "sucu",
    "opencode: a title": "ssu",
    "opencode: two of the system, and tools": "ssubtbtau",
    "Cline: results as the user's": "suauuauuau",
    "Aider: examples, then a reminder": "suauas",
    "Aider: the reminder before the question": "suasuasu",
    "LangGraph: the assistant begins": "au",
    "LangGraph: the assistant begins behind the system": "sau",
    "LangGraph: agents in a row": "suaaau",
    "LangGraph: a supervisor's instructions": "suasas",
    "LangGraph: a result without its call": "utu",
    "the answer goes on": "sua",
    "the system alone": "s",
    "the assistant alone": "a",
    "an empty question": "sUau",
    "an empty answer": "suAu",
    "an empty system text": "Suau",
    "an empty reminder": "suaSu",
    "many rounds of tools": "su" + 20 * "bt" + "dauasu",
    "many rounds of several calls": "s" + 9 * ("u" + 5 * "ptt" + "a") + "u",
}


@mostly_slow("name", [*SHORT, *REAL], ["the first alone", "turns", "MISTRAL"])
def test_no_conversation_is_refused_and_no_text_is_lost(name: str) -> None:
    template = ChatTemplate({**SHORT, **REAL}[name], bos_token="<s>", eos_token="</s>")
    for tools in ((), TOOLS):
        for label, roles in CONVERSATIONS.items():
            messages = said(roles)
            put = adapt_conversation(template, messages, tools, {})
            text = rendered(template, put.messages, **put.variables)
            beside = "b" not in roles or template.channels is None  # a template of channels takes it for reasoning
            texts = [m["content"] for m in messages if m["content"] and (beside or "tool_calls" not in m)]
            assert [part for part in texts if part not in text] == [], label
            if not tools and not {"c", "b", "p", "t"} & set(roles):
                (as_it_is,) = template.render_each([messages])
                if isinstance(as_it_is, str) and all(part in as_it_is for part in texts):
                    assert text == as_it_is, label
                    assert put.warnings == []


BECOMES = [
    ("the first alone", "ssuasu", ["system 0 1", "user 2", "assistant 3", "user 4", "user 5"]),
    ("turns", "sdusuasu", ["system 0 1", "user 2 3 4", "assistant 5", "user 6 7"]),
    ("turns", "suaau", ["system 0", "user 1", "assistant 2 3", "user 4"]),
    ("turns", "sau", ["system 0", "user", "assistant 1", "user 2"]),
    ("no system", "suasu", ["user 0 1", "assistant 2", "user 3 4"]),
    ("no system", "sau", ["user 0", "assistant 1", "user 2"]),
    ("others in silence", "suasu", ["user 0 1", "assistant 2", "user 3", "user 4"]),
    ("MISTRAL", "uctu", ["user 0", "assistant", "tool 2", "assistant", "user 3"]),
    ("LLAMA", "uptta", ["user 0", "assistant", "tool 2", "assistant", "tool 3", "assistant 4"]),
]


def test_what_becomes_of_messages() -> None:
    for name, roles, expected in BECOMES:
        messages = said(roles)
        put = adapt_conversation(ChatTemplate(SHORT[name], bos_token="<s>", eos_token="</s>"), messages, (), {})
        places = {message["content"]: str(at) for at, message in enumerate(messages)}
        shown = [
            " ".join([shown["role"], *(places[text] for text in shown["content"].split())]) for shown in put.messages
        ]
        assert shown == expected
        assert len(put.warnings) == len(set(put.warnings)) > 0


@pytest.mark.parametrize("name", ["turns", "no system"])
def test_an_answer_in_a_conversation_that_was_adapted_is_found_again(name: str, tmp_path: Path) -> None:
    with tool_engine(tmp_path, SHORT[name]) as engine:
        assert_reuses(engine)


def assert_reuses(engine: Engine) -> None:
    letters = {engine.tokenize(piece)[0]: 100.0 for piece in ("t", "h", "e")}
    params = SamplingParams(temperature=1, seed=1, max_tokens=8, logit_bias=letters)
    messages = said("sdusuas")
    for _ in range(3):
        answer = engine.chat(messages, params)
        known = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
        messages += [{"role": "assistant", "content": answer.text}, *said("su")]
        again = engine.chat(messages, params)
        assert again.usage.cached_tokens == known
        messages += [{"role": "assistant", "content": again.text}, *said("uds")]


def test_parts_and_developers_are_taken_from_python(tmp_path: Path) -> None:
    with tool_engine(tmp_path, FIRST_ALONE) as engine:
        parts = [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]
        in_parts, same = ([{"role": "developer", "content": content}, *TALK] for content in (parts, "be kind"))
        assert engine.prompt_ids(in_parts) == engine.prompt_ids(same)
        assert engine.prompt_ids(same) != engine.prompt_ids(TALK)
        with pytest.raises(EngineError, match=r"messages\[0\]\.content\[0\]: .* takes text alone"):
            engine.prompt_ids([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])


def test_a_template_that_fails_in_every_way_says_so() -> None:
    template = ChatTemplate("{{ raise_exception('never') }}")
    put = adapt_conversation(template, said("suas"), (), {})
    assert [one["role"] for one in put.messages] == ["system", "user", "assistant", "system"]
    assert put.warnings == []
