"""Lark grammars as regular expressions, which hold where their text stands in quotes, too.

Rules are written out where they are used, so a grammar must not be recursive. Regular expressions in it are those of
llguidance (https://docs.rs/regex), strings have JSON's escapes and `\\x41`.
"""

from __future__ import annotations

import json
import re

from polarlm.engine.errors import shown

_MOST_TEXT = 1 << 15  # characters of an expression
_NUMBER = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"
_EXPONENT = "[eE][+-]?[0-9]+"
_FLOAT = rf"(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:{_EXPONENT})?|[0-9]+{_EXPONENT}"
_COMMON = {  # the terminals of Lark's module "common"
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "_EXP": _EXPONENT,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?(?:{_FLOAT})",
    "NUMBER": f"{_FLOAT}|[0-9]+",
    "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|[0-9]+)",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*[^*]*\*+(?:[^/*][^*]*\*+)*/",
    "SQL_COMMENT": r"--[^\n]*",
}
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_TOKENS = re.compile(
    rf"""(?P<nothing>\s+ | (?:\#|//)[^\n]* | ->\s*\w+)
    | [!?]?(?P<head>[A-Za-z_]\w*)(?:\.-?\d+)?\s*:
    | %import\s+common(?:\.(?P<imported>\w+)(?:\s*->\s*(?P<other_name>\w+))? | \s*\((?P<import_list>[\w\s,]+)\))
    | (?P<ignored>%ignore\b)
    | (?P<range>{_STRING}\s*\.\.\s*{_STRING})
    | (?P<string>{_STRING}i?)
    | (?P<pattern>/(?:[^/\\\n]|\\.)+/[imsux]*)
    | (?P<name>[A-Za-z_]\w*)
    | (?P<count>~\s*\d+(?:\s*\.\.\s*\d+)? | \{{\d*(?:,\d*)?\}})
    | (?P<sign>[()\[\]|?*+])""",
    re.VERBOSE,
)
_SIGNS = {"(": "(?:", "[": "(?:", "]": ")?"}


def lark_to_regex(text: str) -> str | None:
    """A regular expression for whole texts of a grammar; None if it is recursive, or would be too long. Raises
    ValueError."""
    try:
        grammar = _Grammar(text)
        return grammar.expression("start") + grammar.ignored
    except (RecursionError, OverflowError):
        return None


class _Grammar:
    def __init__(self, text: str) -> None:
        self.ignored = ""  # the expression of what may stand between terminals
        self._definitions: dict[str, list[tuple[str, str]]] = {}  # name → kinds and texts of tokens
        self._expressions: dict[str, str] = {}
        self._open: set[str] = set()  # the names that are being written out
        self._read(text)
        ignored_names = [name for name in self._definitions if name.startswith("%")]
        if ignored_names:
            self.ignored = f"(?:{'|'.join(map(self.expression, ignored_names))})*"

    def _read(self, text: str) -> None:
        at, tokens = 0, None
        while at < len(text):
            match = _TOKENS.match(text, at)
            if match is None or match.lastgroup is None:
                line = text.count("\n", 0, at) + 1
                raise ValueError(f"line {line}: {shown(text[at:].splitlines()[0])} is not understood")
            at, kind, said = match.end(), match.lastgroup, match[match.lastgroup]
            if imported_names := match["imported"] or match["import_list"]:
                for name in re.findall(r"\w+", imported_names):
                    if name not in _COMMON:
                        raise ValueError(f"common.{name} is not one of {', '.join(_COMMON)}")
                    self._expressions[match["other_name"] or name] = _COMMON[name]
            elif kind in ("head", "ignored"):
                name = said if kind == "head" else f"%{len(self._definitions)}"
                if name in self._definitions:
                    raise ValueError(f"{name} is defined twice")
                tokens = self._definitions[name] = []
            elif kind != "nothing":
                if tokens is None:
                    raise ValueError(f"{shown(said)} stands before the first rule")
                tokens.append((kind, said))

    def expression(self, name: str) -> str:
        """The expression of a rule or terminal. Raises ValueError; RecursionError if it has itself in it, and
        OverflowError if it is too long."""
        if name in self._expressions:
            return self._expressions[name]
        if name in self._open:
            raise RecursionError
        if name not in self._definitions:
            raise ValueError(f"{name} is not defined")
        self._open.add(name)
        between = self.ignored if name.lstrip("_").islower() else ""
        parts, length = [], 0
        for kind, said in self._definitions[name]:
            parts.append(self._part(kind, said, between))
            length += len(parts[-1])
            if length > _MOST_TEXT:
                raise OverflowError
        self._open.remove(name)
        return self._expressions.setdefault(name, "".join(parts))

    def _part(self, kind: str, said: str, between: str) -> str:
        """A token as a part of an expression. between: what may stand before a terminal."""
        if kind == "sign":
            return _SIGNS.get(said, said)
        if kind == "count":
            return "{" + ",".join(re.findall(r"\d+", said)) + "}" if said[0] == "~" else said
        if kind == "name":
            part = f"(?:{self.expression(said)})"
            between = "" if said.lstrip("_").islower() else between
        elif kind == "pattern":
            pattern, _, flags = said[1:].rpartition("/")
            part = f"(?{flags}:{pattern})"
        elif kind == "range":
            part = "[{}-{}]".format(*map(_literal, re.findall(_STRING, said)))
        else:
            part = f"(?{'i' if said.endswith('i') else ''}:{_literal(said.removesuffix('i'))})"
        return f"(?:{between}{part})" if between else part


def _literal(quoted: str) -> str:
    """The expression of a string. Raises ValueError."""
    quoted = re.sub(r"\\(?:x(..)|.)", lambda escape: f"\\u00{escape[1]}" if escape[1] else escape[0], quoted)
    return re.sub(r"[^\w ]", lambda sign: f"\\x{{{ord(sign[0]):x}}}", json.loads(quoted))
