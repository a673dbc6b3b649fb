"""Runs one chat template for its parent process: JSON lines in, JSON lines out.

A template is a program that comes with a model. Jinja's sandbox keeps it from files and from Python's internals,
but bounds neither its time nor its memory. Rendered in the engine's own process, with the limits below on text and on
products, two nested loops over 100,000 numbers or a macro that calls itself twice do not end, and
`'%1000000000d' % 1` takes all the memory there is (tests/model_loaders/test_templates.py has these attacks and more).
Only the operating system can stop them, hence a process. This file imports none of the rooms, so that it starts in a
tenth of a second.

The first line is the template's source. Each further line is a list of renderings, each an object of variables; the
answer is a list of `{"text": ...}` or `{"error": ...}`. If a limit ends the process, the pipe closes instead, and the
exit code or signal says which limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from polarlm.children import answer_lines

MEMORY_BYTES = 512 << 20  # address space of this process; an idle one takes about a twentieth of it
CPU_SECONDS = 2.0  # for one line
TEXT_CHARACTERS = 8 << 20  # in one rendering
_FACTOR_LIMIT = 1 << 24  # characters, elements or bits that one multiplication may produce


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it; products are bounded for systems that do not limit memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = _size(left) * (_size(right) if operator == "*" else abs(right) if isinstance(right, int) else 1)
        if isinstance(left, int) and isinstance(right, int) and operator == "*":
            size = left.bit_length() + right.bit_length()
        if size > _FACTOR_LIMIT:
            raise MemoryError
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    """The contribution of a factor to the size of a product: its length, or an integer's absolute value."""
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, str | list | tuple) else 1


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; it renders its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def compile_template(source: str) -> jinja2.Template:
    """The template with the functions that model authors rely on."""
    extensions = ["jinja2.ext.loopcontrols", _GenerationBlock]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(source)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(value: object, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    parts: list[str] = []
    length = 0
    for part in template.generate(variables):
        parts.append(part)
        length += len(part)
        if length > TEXT_CHARACTERS:
            raise MemoryError
    return "".join(parts)


def _answer(source: str, variables: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": _render(compile_template(source), variables)}
    except MemoryError:
        return {"error": "it makes more text than a conversation can need"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except Exception as error:  # whatever an expression of the template raises
        return {"error": str(error) or type(error).__name__}


def _begin(source: str) -> Callable[[list[dict[str, Any]]], list[dict[str, str]]]:
    return lambda renderings: [_answer(source, variables) for variables in renderings]


if __name__ == "__main__":
    answer_lines(_begin, MEMORY_BYTES, CPU_SECONDS)
