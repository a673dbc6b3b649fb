"""Calls in the forms of whole families of models: a template writes what our description says; that is read, streamed
and in the grammar."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from polarlm.server.answers.call_grammar import Grammar, functions_of
from tests.server.answers.test_call_arguments import FORMS, TOOLS, parsed, some_arguments, taken, template_of

OBJECTS = (  # forms whose arguments are an object, mostly JSON
    *("HERMES", "MISTRAL", "MISTRAL_ARGS", "MISTRAL_IDS", "LLAMA", "TEXT_ARGUMENTS", "GEMMA", "GEMMA_OF_APRIL"),
    *("DEEPSEEK", "DEEPSEEK_SHORT", "KIMI", "GRANITE", "PHI", "NEMOTRON", "JAMBA", "XLAM", "FIREFUNCTION"),
    *("INTERNLM", "APERTUS", "HUNYUAN", "FUNCTION_TAGS", "MINIMAX", "COMMAND_R", "FALCON", "LONGCAT", "EXAONE"),
    *("GIGACHAT", "SOLAR", "COMMAND", "TYPED_CALLS"),
)
CALLS_ALONE = ("HERMES", "MISTRAL", "LLAMA", "GEMMA", "GEMMA_OF_APRIL")  # templates that write no text before calls


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*FORMS, *OBJECTS])
def test_what_a_template_writes_is_described_read_and_in_the_grammar(name: str, count: int) -> None:
    """Conversations by a seed, with texts that look like tags, quotes and brackets."""
    template, chance = template_of(name), random.Random(name)
    format = template.calls
    assert format.is_native
    for part in (format.begin, format.closing, format.call_separator, format.end):  # control tokens are whole
        assert part.count("<") == part.count(">"), part
    has_text = format.marker(()) and name not in CALLS_ALONE
    conversations, contents = [], []
    for _ in range(count):
        called = [("write", some_arguments(chance, format)), ("now", {}), ("now", {})][:: chance.choice([1, -1])]
        calls = [
            {
                "id": f"abcdefgh{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(value, ensure_ascii=False)},
            }
            for number, (name, value) in enumerate(called[: chance.choice([2, 3]) if format.has_several else 1])
        ]
        contents.append(chance.choice(["", "I look."]) if has_text else "")
        said = {"role": "assistant", "content": contents[-1], "tool_calls": calls}
        conversations.append(format.as_messages([{"role": "user", "content": "Hi"}, said]))
    rules = [Grammar(format, functions_of(TOOLS), {}, calls, several=True).text() for calls in ("must", "may")]
    texts = template.render_each(conversations, tools=TOOLS)
    for text, content, (_, said) in zip(texts, contents, conversations, strict=True):
        calls, expected = [], [content]
        for call in said["tool_calls"]:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            expected.append((name, json.loads(arguments) if format.arguments_as_text else arguments))
            calls.append((name, arguments if format.arguments_as_text else format.write(arguments), call["id"]))
        shown = format.write_calls(calls)
        assert isinstance(text, str)
        assert text.count(shown) == 1
        head = text.partition(shown)[0]
        answer = content + head.rpartition(content)[2] if content else ""
        model = replace(format, shown_closing=(format.closing,))  # which does not write ids behind arguments
        written = model.write_calls(calls)
        answer += written
        places = sorted({0, len(answer), *(chance.randrange(len(answer)) for _ in range(8))})
        for pieces in ([answer], [answer[a:b] for a, b in pairwise(places)], answer):
            assert parsed(format, *pieces) == expected
        assert taken(rules[0], written)
        assert taken(rules[1], answer)
