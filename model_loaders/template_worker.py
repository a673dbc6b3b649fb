"""Runs one chat template for its parent process: JSON lines in, JSON lines out.

A template is a program that came with somebody's model. Jinja's sandbox keeps it away from files and from Python's
insides, but neither from memory nor from time; those limits are the operating system's, hence a process. This file is
run by itself and imports nothing of the package, so that it starts in a tenth of a second.

The first line is the template's source; each further one holds the variables of one rendering. Every line is answered
by `{"text": ...}` or `{"error": ...}`. Where a limit ends the process, the pipe closes instead, and the exit code or
signal says which.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_BYTES = 512 << 20  # address space of this process; an idle one has about a twentieth of it
CPU_SECONDS = 2.0  # of one rendering
TEXT_CHARACTERS = 8 << 20  # of one rendering
OUT_OF_MEMORY = 3  # exit code
_FACTOR_LIMIT = 1 << 24  # characters, elements or bits that one multiplication may make


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
    """How much a factor contributes to the size of a product: its length, or for an integer itself."""
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, str | list | tuple) else 1


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training: here it is nothing but its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compiled(source: str) -> jinja2.Template:
    """The template with the functions that model authors rely on."""
    extensions = ["jinja2.ext.loopcontrols", _GenerationBlock]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(value: object, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _rendered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    parts: list[str] = []
    length = 0
    for part in template.generate(variables):
        parts.append(part)
        length += len(part)
        if length > TEXT_CHARACTERS:
            raise MemoryError
    return "".join(parts)


def _limit_memory() -> None:
    if sys.platform == "win32":
        return
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    except (ValueError, OSError):  # macOS has the limit but may refuse to set it
        return


def _limit_time(seconds: float) -> None:
    """The system ends this process when it has computed for `seconds`; 0 takes the limit away."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(line: bytes, template: jinja2.Template | None) -> tuple[dict[str, str], jinja2.Template | None]:
    try:
        request = json.loads(line)
        if template is None:
            return {"text": ""}, compiled(request)
        return {"text": _rendered(template, request)}, template
    except MemoryError:
        return {"error": "it makes more text than a conversation can need"}, template
    except RecursionError:
        return {"error": "it calls itself without end"}, template
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}, template
    except Exception as error:  # whatever an expression of the template raises
        return {"error": str(error) or type(error).__name__}, template


def main() -> None:
    """Serves until the parent closes the pipe."""
    _limit_memory()
    template = None
    for line in sys.stdin.buffer:
        _limit_time(CPU_SECONDS)
        answer, template = _answer(line, template)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        _limit_time(0)


if __name__ == "__main__":
    try:
        main()
    except MemoryError:  # so little is left that there is no answer
        os._exit(OUT_OF_MEMORY)
