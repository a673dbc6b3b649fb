"""Grammars of answers that may call tools: free text up to the marker of a call, and only calls after it.

They are in llguidance's form of Lark, in which control tokens are ids, `<[7]>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from polarlm.engine.errors import ConstraintError
from polarlm.engine.parsing.channel_parser import CONSTRAIN
from polarlm.engine.schemas.preparation import OPTIONS, prepare
from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.model_loaders.chat.channels import Channels
from polarlm.model_loaders.chat.reasoning import Tags
from polarlm.server.answers.quoted_grammar import FieldRules, QuotedRules, escape, shared_field_rules, shared_rules
from polarlm.server.reading.parts import list_kinds
from polarlm.server.reading.tools import Tools

_ARGUMENTS = re.compile(r"(?i:arguments)(\d+)(?:_\w+)?: ")  # begins the rules of a function's arguments
_TEXTS = ("text: %json", "json: %json")  # begin the rule of a text that has a schema
ID, INDEX = "[a-zA-Z0-9]{9}", "[0-9]{1,4}"  # what the model may write as the id of a call


@dataclass(frozen=True)
class Function:
    name: str
    schema: Mapping[str, Any]
    strict: bool = False  # whether every keyword of the schema must be known


@dataclass(frozen=True)
class Grammar:
    """The grammar of an answer that may, must or must not call functions."""

    format: CallFormat
    functions: Sequence[Function]
    control: Mapping[str, int]  # name → id of control tokens
    calls: Literal["may", "must", "none"]
    several: bool  # whether there may be more than one call, if the format has several
    tags: Tags | None = None  # the tags around reasoning that may begin the answer
    schema: Mapping[str, Any] | None = None  # for the text of an answer without calls, prepared for %json
    warn: Callable[[str], None] = lambda sentence: None  # called with what does not hold

    def text(self) -> str:
        return "\n".join(["%llguidance {}", *self._start_rules(), *self._text_rules(), *self._call_rules()]) + "\n"

    @property
    def _marker(self) -> str:
        return self.format.marker(self.control)

    @property
    def _begins_with_name(self) -> bool:
        """Whether only the names of functions tell that an answer begins with a call."""
        return not self._marker and self.format.fields is not None

    def _start_rules(self) -> list[str]:
        rest = {"may": "text | called", "must": "calls", "none": "text"}[self.calls]
        if self.tags is None:
            return [f"start: {rest}"]
        tail = {"must": "SPACE? calls"}.get(self.calls, f"({rest})")
        close, pattern = self._literal(self.tags.close), "(?s:.*)"
        opening, end = f"SPACE? {self._literal(self.tags.open)} ", f"/ {close}"
        if self.tags.close in self.control:
            thought_rules = [f"thought: THOUGHT {close}", "THOUGHT: /(?s:.*)/", "unclosed: THOUGHT"]
        else:
            if self.tags.open not in self.control:
                opening, end, pattern = "", f"{escape(self.tags.close)}/", f"\\s*{escape(self.tags.open)}(?s:.*)"
            unclosed = f"unclosed: UNCLOSED\nUNCLOSED: /{pattern}/ & ~/{_anywhere(self.tags.close)}/"
            thought_rules = [f"thought[lazy]: /{pattern}{end}", unclosed]
        unclosed = "" if self.calls == "must" else f" | {opening}unclosed"
        start = f"start: {rest} | {opening}thought {tail}{unclosed}"
        return [
            start,
            *(line for line in thought_rules if unclosed or not line.startswith("unclosed")),
            "SPACE: /\\s{1,8}/",
        ]

    def _text_rules(self) -> list[str]:
        """The rules of text without a call, and of text up to the marker of a call."""
        if self.calls == "must":
            return []
        if self.schema is not None:
            return [f"text: %json {json.dumps(self.schema)}", "called: calls"]
        call_start = f"\\s*{escape(self.format.begin + self.format.opening)}(?s:.*)"  # as calls without a marker do
        if self._begins_with_name:
            names = "|".join(escape(function.name) for function in self.functions)
            call_start = call_start.replace("(?s:", f"({names}){escape(self.format.middle[0])}(?s:")
        forbidden_patterns = [_anywhere(self._marker) if self._marker else call_start]
        thinks = self.tags is not None and self.tags.open not in self.control
        first = f"\\s*{escape(self.tags.open)}(?s:.*)" if self.tags is not None and thinks else ""
        if first:
            forbidden_patterns.append(first)
        lines = ["text: TEXT", "TEXT: /(?s:.*)/ " + " ".join(f"& ~/{pattern}/" for pattern in forbidden_patterns)]
        if self.calls == "none":
            return lines
        if not self._marker:
            return [*lines, "called: SPACES? calls", "SPACES: /\\s{1,8}/"]
        if self._marker in self.control:
            return [*lines, "called: TEXT calls"]
        not_thinking = f" & ~/{first}/" if first else ""
        up_to = f"UP_TO: /(?s:.*){escape(self._marker)}/{not_thinking}"
        return [*lines, "called: up_to begun", "up_to[lazy]: UP_TO", up_to]

    def _call_rules(self) -> list[str]:
        if self.calls == "none":
            return []
        first = self.format.begin + self.format.opening
        several = self.several and self.format.has_several
        more = " (more)*" if several else ""
        end = self._literal(self.format.end)
        first_call = "call_first" if self._begins_with_name else f"{self._literal(first)} call"
        lines = [f"calls: {first_call}{more} {end}"]
        if self.calls == "may" and self.schema is None and self._marker and self._marker not in self.control:
            lines.append(f"begun: {self._literal(first.removeprefix(self._marker))} call{more} {end}")
        if several:
            following = self._literal(self.format.call_separator + self.format.opening)
            if self.format.is_numbered:
                parts = map(self._literal, (self.format.call_separator[:-1], self.format.opening))
                following = f" /{INDEX}/ ".join(parts)
            lines.append(f"more: {following} call")
        middle = self.format.middle
        pattern = INDEX if self.format.id_form else ID
        id = f" /{pattern}/ {self._literal(middle[1])}" if self.format.has_id else ""
        closing = self._literal(self.format.closing)
        for number, function in enumerate(self.functions):
            name = self._literal(function.name + middle[0])
            lines.append(f"call{number}: {name}{id} arguments{number} {closing}")
            lines += self._arguments(f"arguments{number}", function)
            if self._begins_with_name:  # in one lexeme, which no text begins with
                name = self._literal(first + function.name + middle[0])
                lines.append(f"call_first{number}: {name}{id} arguments{number} {closing}")
        if self.format.quote:
            quote, is_control = self.format.quote, self.format.quote in self.control
            lines += shared_rules(quote, self._literal, is_control=is_control)
        if self.format.fields is not None:
            lines += shared_field_rules(self.format.fields, self._literal, self.control)
        for rule in ("call", "call_first") if self._begins_with_name else ("call",):
            lines.append(f"{rule}: " + " | ".join(f"{rule}{number}" for number in range(len(self.functions))))
        return lines

    def _arguments(self, name: str, function: Function) -> list[str]:
        schema = schema_of(function, self.format.separators, self.warn)
        warn, quote, fields = partial(_warn_about, function, self.warn), self.format.quote, self.format.fields
        with _naming_function(function):
            if fields is not None:
                return FieldRules(name, fields, self._literal, warn, strict=function.strict).lines(schema)
            if quote:
                return QuotedRules(name, quote, self._literal, warn, strict=function.strict).lines(schema)
        return [f"{name}: %json {json.dumps(schema)}"]

    def _literal(self, text: str) -> str:
        return literal(text, self.control)


def schema_of(function: Function, separators: tuple[str, str], warn: Callable[[str], None]) -> dict[str, Any]:
    """The schema of a function's arguments, for %json; `separators` of items and of keys. warn: called with a sentence
    for what does not hold. Raises ConstraintError."""
    item, key = separators
    options = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    with _naming_function(function):
        schema = {"type": "object", **function.schema, OPTIONS: {"lenient": not function.strict}}
        return prepare(schema, options, partial(_warn_about, function, warn))


def _warn_about(function: Function, warn: Callable[[str], None], why: str) -> None:
    warn(f"the parameters of the function {function.name} hold in part: {why}")


@contextmanager
def _naming_function(function: Function) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise _refusal(f"the function {function.name}", str(error)) from None


def _refusal(subject: str, reason: str, part: str = "parameters") -> ConstraintError:
    refusal = ConstraintError(f"The {part} of {subject} cannot be used: {reason}")
    refusal.field = "tools"
    return refusal


def refusal_of_calls(error: ConstraintError, grammar: str, tools: Tools) -> ConstraintError:
    """What is said of an error in the grammar of calls of `tools`: the function whose arguments it is about, by name.
    It has no field if it is about the schema of the text."""
    names, reason = [tool["function"]["name"] for tool in tools.callable], error.reason or str(error)
    line = "".join(grammar.splitlines()[error.line - 1 : error.line]) if error.line else ""
    if line.startswith(_TEXTS):
        return ConstraintError(f"The JSON schema cannot be used: {reason}")
    rule = _ARGUMENTS.match(line)
    if rule or len(names) == 1:
        name = names[int(rule[1]) if rule else 0]
        if name in tools.custom:
            return _refusal(f"the tool {name}", reason, "grammar")
        return _refusal(f"the function {name}", reason)
    return _refusal(f"one of the functions {list_kinds(names)}", reason)


def literal(text: str, control: Mapping[str, int]) -> str:
    """`text` as part of a rule: strings, and ids of control tokens."""
    names = sorted(control, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join(f"<[{control[part]}]>" if part in control else json.dumps(part) for part in parts if part)


def _anywhere(text: str) -> str:
    return f"(?s:.*){escape(text)}(?s:.*)"


def functions_of(tools: Sequence[Mapping[str, Any]]) -> list[Function]:
    """The functions of validated tools. A function that lists no parameters has none."""
    return [_function(tool["function"]) for tool in tools]


def _function(tool: Mapping[str, Any]) -> Function:
    schema = dict(tool.get("parameters") or {})
    schema.setdefault("type", "object")
    if not any(name in schema for name in ("$ref", "anyOf", "oneOf", "allOf", "additionalProperties")):
        schema.setdefault("properties", {})  # the function has no use for names that the schema does not list
    return Function(tool["name"], schema, bool(tool.get("strict")))


def channel_grammar(
    channels: Channels,
    format: CallFormat,
    functions: Sequence[Function],
    control: Mapping[str, int],
    *,
    calls: Literal["may", "must", "none"],
    schema: Mapping[str, Any] | None = None,
    warn: Callable[[str], None] = lambda sentence: None,
) -> str:
    """The grammar of an answer: any messages, then a call or text. control: name → id of control tokens. schema: of the
    text, prepared for %json. warn: as of `Grammar`. Models name the function before the channel, as their template
    does, or after it."""
    channel = format.middle[0].removeprefix(channels.channel).split(maxsplit=1)[0]  # the channel of calls
    last = {"may": "(call | said)", "must": "call", "none": "said"}[calls]
    headers = [literal(channels.header(name), control) for name in (channels.reasoning, channel, channels.final)]
    lines = [
        "%llguidance {}",
        f"start: (message {literal(channels.message_separator, control)})* {last}",
        f"message: ({' | '.join(headers[:2])}) TEXT",
        f"said: {headers[2]} {'TEXT' if schema is None else 'json'}",
        *([] if schema is None else [f"json: %json {json.dumps(schema)}"]),
        "TEXT: /(?s:.*)/",
    ]
    if calls == "none":
        return "\n".join(lines) + "\n"
    kinds = [f"{CONSTRAIN}json", "json"] if CONSTRAIN in control else ["json"]
    kind = " | ".join(literal(f" {kind}{channels.message}", control) for kind in kinds)
    channel_name, recipient = literal(f"{channels.channel}{channel}", control), literal(format.opening, control)
    lines += [f"kind: {kind}", "call: " + " | ".join(f"call{number}" for number in range(len(functions)))]
    for number, function in enumerate(functions):
        name = f"{recipient} {literal(function.name, control)}"
        lines.append(f"call{number}: ({name} {channel_name} | {channel_name} {name}) kind arguments{number}")
        lines.append(f"arguments{number}: %json {json.dumps(schema_of(function, format.separators, warn))}")
    return "\n".join(lines) + "\n"
