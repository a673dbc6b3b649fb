"""Grammars in Lark as regular expressions: texts of the grammar are those of the expression, inside JSON, too."""

from __future__ import annotations

import json

import pytest

from polarlm.engine.sampling.lark import lark_to_regex
from tests.pairs import in_turn
from tests.server.answers.test_call_arguments import taken

SUM = """
start: sum            // a comment
?sum: product (SP "+" SP product)* -> add
    | product
!product: INT | "x"i  # another
SP: " "
%import common.INT
"""
IGNORED = """
start: "let" NAME "=" _value ("," _value)~0..2 [";"]
NAME.2: "a".."z" LETTER* | "\\x41\\"\\\\/"
_value: /[0-9]+\\/?|é/ | "("i _other{2} ")"
_other: "∞"
%import common (LETTER, WS_INLINE)
%import common.LF -> END
%ignore WS_INLINE
%ignore END
"""
COMMON = """
%import common.SIGNED_NUMBER -> N
%import common.ESCAPED_STRING -> S
%import common.C_COMMENT -> C
"""


@in_turn(
    "grammar fits others",
    [
        (SUM, ["1", "X", "12 + x + 3"], ["", "1+2", "1 + ", "xx"]),
        (IGNORED,
         ["let a=1", ' let\nbC =  2/, é,(∞ ∞); \n', 'letA"\\/=3'],
         ["let =1", "let a=1,2,3,4", "let a=(∞)", "let a"]),
        ("start: /a.b/s? /C+/i", ["a\nbc", "CcC"], ["ab", "a\nb"]),
        ('start: "." | ', [".", ""], ["a"]),
        (f"start: N | S | C{COMMON}", ["1", "-1.5e+3", '"a\\"b"', "/* a * b */"], ["-", '"a', "/* "]),
    ],
)  # fmt: skip
def test_an_expression_has_the_texts_of_its_grammar(grammar: str, fits: list[str], others: list[str]) -> None:
    expression = lark_to_regex(grammar)
    rule = f"%llguidance {{}}\nstart: %json {json.dumps({'type': 'string', 'pattern': f'^(?:{expression})$'})}"
    for text in (*fits, *others):
        assert taken(rule, json.dumps(text, ensure_ascii=False)) is (text in fits), text


def test_no_expression_of_a_grammar_that_is_recursive_or_long() -> None:
    assert lark_to_regex('start: "(" inner ")"\ninner: start | "x"') is None
    doubled = "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(20))
    assert lark_to_regex(f'start: r0\n{doubled}\nr20: "x"') is None


@in_turn(
    "grammar sentence",
    [
        ('start: "a"\nstart: "b"', "start is defined twice"),
        ("start: a", "a is not defined"),
        ('other: "x"', "start is not defined"),
        ('"x"', "'\"x\"' stands before the first rule"),
        ('start: "x"\n%declare Y', "line 2: '%declare Y' is not understood"),
        ("%import common.NONE\nstart: NONE", "common.NONE is not one of DIGIT, HEXDIGIT"),
        ('start: "\\q"', "Invalid .escape"),
    ],
)
def test_what_is_no_lark_is_said(grammar: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        lark_to_regex(grammar)
