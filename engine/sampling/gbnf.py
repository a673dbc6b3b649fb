"""Translates llama.cpp's grammars (GBNF) into Lark grammars for llguidance.

GBNF: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md. A rule that reaches no recursive rule is a
regular expression and becomes a terminal; the others become rules. Answers always match the grammar, but a recursive
grammar may have texts that cannot be generated: llguidance's lexer takes the longest match of a terminal, so that
`[a-z]+` in a recursive rule takes all letters that follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MOST_DEPTH = 64  # levels of nested parentheses
MOST_REPEATS = 2000  # as in llama.cpp
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX = set("0123456789ABCDEFabcdef")
_DIGITS = {"x": 2, "u": 4, "U": 8}
# Within a line, and a short option: otherwise the time of a search grows with the square of a grammar's length.
_LARK = re.compile(r"(?m)^[ \t]*(%llguidance\b|[?!]?start[ \t]*(\[[^\]\n]{0,200}\][ \t]*)?:(?!:=))")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_REPEATS = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")


class GbnfError(ValueError):
    """A grammar is not valid GBNF. The message says what is wrong, and where."""


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is in GBNF: it has no rule `start` in Lark's form."""
    return _LARK.search(grammar) is None


def to_lark(grammar: str) -> str:
    """`grammar`, which is in GBNF, as a Lark grammar. Raises GbnfError."""
    return _Reader(grammar).lark()


class _Name(str):
    """The name of a rule; other parts of a rule's right side are Lark's text."""


@dataclass
class _Rule:
    """The right side of a rule: Lark's text, split at names of rules."""

    parts: list[str] = field(default_factory=list)
    needs: list[set[str]] = field(default_factory=list)  # the rules that each alternative requires

    @property
    def names(self) -> set[str]:
        return {part for part in self.parts if isinstance(part, _Name)}


def _derive(clauses: Iterable[tuple[str, set[str]]]) -> set[str]:
    """The names that are true (Horn clauses): a name is true once all names in one of its clauses are. Visits each
    clause once."""
    users: dict[str, list[list[Any]]] = {}
    ready, holding = [], set()
    for name, needs in clauses:
        clause: list[Any] = [name, len(needs)]  # how many names of the clause are not known to be true
        for other in needs:
            users.setdefault(other, []).append(clause)
        ready += [] if needs else [name]
    while ready:
        if (name := ready.pop()) in holding:
            continue
        holding.add(name)
        for clause in users.get(name, ()):
            clause[1] -= 1
            if not clause[1]:
                ready.append(clause[0])
    return holding


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._rules: dict[str, _Rule] = {}
        self._rule = _Rule()

    def lark(self) -> str:
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            self._read_rule()
        if "root" not in self._rules:
            raise GbnfError("it has no rule named root")
        for name, rule in self._rules.items():
            for other in rule.names - self._rules.keys():
                raise GbnfError(f"the rule {name} refers to {other}, which is not defined")
        if "root" not in _derive((name, needs) for name, rule in self._rules.items() for needs in rule.needs):
            raise GbnfError("no text of it ends: each alternative of root leads back to the rule that it is part of")
        # Rules that reach no recursive rule, so that they are regular expressions.
        terminals = _derive((name, rule.names) for name, rule in self._rules.items())
        names = {name: f"{'T' if name in terminals else 'r'}{i}" for i, name in enumerate(self._rules)}
        lines = [f"start: {names['root']}"]
        for name, rule in self._rules.items():
            right = "".join(names[part] if isinstance(part, _Name) else part for part in rule.parts)
            lines.append(f"{names[name]}: {right}")
        return "\n".join(lines) + "\n"

    # -- reading -----------------------------------------------------------------------------------------------

    def _read_rule(self) -> None:
        name = self._name()
        self._skip(_SPACE)
        if not self._take("::="):
            raise self._error("::= should follow a rule's name")
        if name in self._rules:
            raise GbnfError(f"it has two rules named {name}")
        self._skip(_SPACE_AND_LINES)
        self._rule = self._rules[name] = _Rule()
        self._alternatives(0)
        if self._at < len(self._text) and self._text[self._at] not in "\r\n":
            raise self._error("this belongs to no rule")
        self._skip(_SPACE_AND_LINES)

    def _alternatives(self, depth: int) -> None:
        """Read alternatives up to a line end that no | follows, or to the end of the parentheses."""
        if depth > MOST_DEPTH:
            raise GbnfError(f"its parentheses are nested deeper than {MOST_DEPTH} times")
        space = _SPACE_AND_LINES if depth else _SPACE
        self._write("(")
        self._sequence(depth, space)
        while self._take_bar():
            self._skip(_SPACE_AND_LINES)
            self._write(" | ")
            self._sequence(depth, space)
        self._write(")")

    def _take_bar(self) -> bool:
        """Whether | is next, here or at the beginning of a line; if so, it is skipped."""
        start = self._at
        self._skip(_SPACE_AND_LINES)
        if self._take("|"):
            return True
        self._at = start
        return False

    def _sequence(self, depth: int, space: re.Pattern[str]) -> None:
        self._write('""')
        if not depth:
            self._rule.needs.append(set())
        while self._at < len(self._text) and self._text[self._at] not in "|)\r\n":
            self._write(" ")
            self._item(depth)
            item = self._rule.parts[-1]
            self._skip(space)
            if self._repeat() and not depth and isinstance(item, _Name):
                self._rule.needs[-1].add(item)
            self._skip(space)

    def _item(self, depth: int) -> None:
        if self._take('"'):
            text = "".join(iter(lambda: self._character('"'), ""))
            self._write(json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f"))
        elif self._take("["):
            self._write(f"/{self._class()}/")
        elif self._take("("):
            self._skip(_SPACE_AND_LINES)
            self._alternatives(depth + 1)
            if not self._take(")"):
                raise self._error(") is missing")
        elif self._take("."):
            self._write(r"/[\x{0}-\x{10FFFF}]/")
        elif self._text[self._at] in "<!":
            raise self._error("tokens in angle brackets are not supported: write their text, or a grammar in Lark")
        else:
            self._rule.parts.append(_Name(self._name()))

    def _class(self) -> str:
        """The rest of a character class, as a regular expression."""
        expression = ["[^" if self._take("^") else "["]
        for low in iter(lambda: self._character("]"), ""):
            high = low
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._character("]")
            if high < low:
                raise self._error("the range before this is reversed")
            expression.append(f"\\x{{{ord(low):X}}}-\\x{{{ord(high):X}}}")
        if len(expression) == 1:
            raise self._error("the character class before this is empty")
        return "".join(expression) + "]"

    def _character(self, end: str) -> str:
        """The next character, which may be escaped; empty for `end`."""
        if self._at >= len(self._text):
            raise self._error(f"{end} is missing")
        character = self._text[self._at]
        self._at += 1
        if character == end:
            return ""
        if character != "\\":
            return character
        kind = self._text[self._at : self._at + 1]
        digits = self._text[self._at + 1 : self._at + 1 + _DIGITS.get(kind, 0)]
        if kind in _DIGITS and len(digits) == _DIGITS[kind] and set(digits) <= _HEX:
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self._error("there is no character with this number")
            self._at += 1 + len(digits)
            return chr(code)
        if kind not in _ESCAPES:
            raise self._error("there is no such escape")
        self._at += 1
        return _ESCAPES[kind]

    def _repeat(self) -> bool:
        """Read the quantifier of the last item, if it has one, and return whether the item is required."""
        for sign in "*+?":
            if self._take(sign):
                self._write(sign)
                return sign == "+"
        if self._text[self._at : self._at + 1] != "{":
            return True
        match = _REPEATS.match(self._text, self._at)
        if match is None:
            raise self._error("this should be of the form {2}, {2,} or {2,3}")
        least, comma, most = match.groups()
        most = most if comma else least
        if int(least) > MOST_REPEATS or (most is not None and not int(least) <= int(most) <= MOST_REPEATS):
            raise self._error(f"an item repeats 0 to {MOST_REPEATS} times, the smaller number first")
        self._at = match.end()
        self._write(f"{{{least},{most or ''}}}")
        return int(least) > 0

    def _name(self) -> str:
        match = _NAME.match(self._text, self._at)
        if match is None:
            raise self._error("a rule's name should be here")
        self._at = match.end()
        return match[0]

    # -- text --------------------------------------------------------------------------------------------------

    def _write(self, lark: str) -> None:
        self._rule.parts.append(lark)

    def _take(self, text: str) -> bool:
        """Whether `text` is next; if so, it is skipped."""
        is_next = self._text.startswith(text, self._at)
        self._at += len(text) * is_next
        return is_next

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _error(self, problem: str) -> GbnfError:
        line = self._text.count("\n", 0, self._at) + 1
        rest = self._text[self._at : self._at + 20]
        return GbnfError(f"{problem}, in line {line} at {json.dumps(rest, ensure_ascii=False)}")
