"""llama.cpp's grammars, and which texts they take; what is not taken is refused by name."""

from __future__ import annotations

import pytest

from polarlm.engine import EngineError, SamplingParams
from polarlm.engine.sampling.gbnf import MOST_DEPTH, GbnfError, is_gbnf, to_lark
from polarlm.engine.sampling.grammars import Grammars


def takes(grammars: Grammars, grammar: str, text: str) -> bool:
    """Whether `text` can be a whole answer."""
    matcher = grammars.constraint(SamplingParams(grammar=grammar)).matcher  # type: ignore[attr-defined]
    ids = grammars._tokenizer.tokenize(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


JSON = r"""
root   ::= value
value  ::= object | array | string | number | "true" | "null"   # not all of JSON
object ::= "{" ws ( member ("," ws member)* )? "}"
member ::= string ws ":" ws value
array  ::= "[" ws (value ("," ws value)*)? "]"
string ::= "\"" ( [^"\\\x00-\x1F] | "\\" (["\\bn] | "u" [0-9a-fA-F]{4}) )* "\""
number ::= "-"? [0-9]{1,9} ("." [0-9]+)?
ws     ::= [ \t\n]{0,20}
"""
SUMS = 'root ::= (sum "=" sum "\\n")+\nsum ::= item ([-+*/] item)*\nitem ::= num | "(" sum ")"\nnum ::= [0-9]+'
LIST = r"root ::= item+" + "\n\n# no ends of lines\n" + r'item ::= "- " [^\r\n\x0b\x85\u2028\U00002029]+ "\n"'


A_GRAMMAR_CASES = [
    (
        JSON,
        ['{"a": [1, -2.5, true], "b\\n" : "x\\u00e9"}', "[]", "{ }"],
        ['{"a": }', '"\x01"', "[1,]", "1234567890"],
    ),
    (SUMS, ["1+2=3\n", "1+(2*3)=3\n4=4\n"], ["1+=3\n", "(1=1\n"]),
    (LIST, ["- a b\n- c\n"], ["- a\u2028b\n", "- a\x85b\n", "- a\u2029b\n", "- a"]),
    (r'root ::= "\u0041\x42\U00000043"', ["ABC"], ["AB"]),
    (r"root ::= [\u0041-\x43]+", ["ABC"], ["D"]),
    ('root ::= "a" . "b"', ["axb", "a\nb", "a€b"], ["ab"]),
    ("root ::= [^a]+", ["b\nc"], ["ba"]),
    ("root ::= [a-]+ [-b] [&&~[/]", ["a--&", "a-b["], ["a"]),
    (r'root ::= "/" [/] "\\" [\]\[] "\""', ['//\\]"'], ["//"]),
    ('root ::= "\t" [ \t]', ["\t\t", "\t "], [" "]),
    ('root ::= "😀" [😀-😂]', ["😀😁"], ["😀"]),
    ('root ::= word "x"\nword ::= [a-z]+', ["abx"], ["ab", "x"]),
    ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ab"]),
    ('root ::= [a-z]* "end"', ["end", "sendend"], ["ends"]),
    ("root ::= ", [""], ["a"]),
    ('root ::= "a" |', ["", "a"], ["b"]),
    ('root ::= ( |"a") "b"', ["b", "ab"], ["a"]),
    ('root ::= a-b a_b fooBar\na-b ::= "1"\na_b ::= "2"\nfooBar ::= start\nstart ::= "3"', ["123"], ["1"]),
    ('root ::= "a"{2} ("b" | "c"){1,} "d"{0,2} "e"? "f"*', ["aab", "aabcdde", "aacff"], ["aa", "aabddd"]),
    ('root ::= ("a" # of letters\n | "b")\r\n\r\n', ["a", "b"], ["c"]),
    ('root ::= "a" |\n "b"', ["a", "b"], []),
    ('root ::= "a"\r\n # | "d"\n\n | b\n| "c"\nb ::= "b"\n  | "bb"\n', ["a", "b", "bb", "c"], ["ab", "d"]),
    ('x ::= "b"\nroot ::= x x', ["bb"], ["b"]),
    ('root ::= list\nlist ::= list "a" | "a"', ["aaa"], ["", "b"]),
    ('root ::= "(" root ")" | ""', ["", "(())"], ["(()"]),
]


def test_texts_of_a_grammar(grammars: Grammars) -> None:
    for grammar, yes, no in A_GRAMMAR_CASES:
        assert is_gbnf(grammar)
        assert [text for text in yes if not takes(grammars, grammar, text)] == []
        assert [text for text in no if takes(grammars, grammar, text)] == []


THE_PLACE_CASES = [
    ("", "it has no rule named root"),
    ('a ::= "b"', "it has no rule named root"),
    ("root ::= word", "the rule root refers to word, which is not defined"),
    ('root ::= "a" root', "no text of it ends"),
    ('root ::= "a" b | b\nb ::= "c" root', "no text of it ends"),
    ("root ::= b{2}\nb ::= b+", "no text of it ends"),
    ('root ::= "a"\nroot ::= "b"', "it has two rules named root"),
    (
        "root ::= <think>",
        "tokens in angle brackets are not supported: write their text, or a grammar in Lark, in line 1",
    ),
    ('root ::= !<[5]> "a"', "tokens in angle brackets are not supported"),
    ('root ::= "a"\n ("b")', "a rule's name should be here, in line 2 at "),
    ("root : a", "::= should follow a rule's name, in line 1 at "),
    ('root ::= "a', '" is missing'),
    ("root ::= [a", "] is missing"),
    ("root ::= []", "the character class before this is empty"),
    ("root ::= [b-a]", "the range before this is reversed"),
    ('root ::= ("a"', r"\) is missing"),
    ('root ::= "a")', r"this belongs to no rule, in line 1 at \"\)\""),
    (r'root ::= "\q"', "there is no such escape"),
    (r'root ::= "\x4"', "there is no such escape"),
    (r'root ::= "\uD800"', "there is no character with this number"),
    ('root ::= "a"{1', "this should be"),
    ('root ::= "a"{3,2}', "repeats 0 to 2000 times"),
    ('root ::= "a"{2001}', "repeats 0 to 2000 times"),
    ("root ::= " + "(" * 60_000, f"nested deeper than {MOST_DEPTH}"),
]


def test_what_is_no_grammar_is_refused_with_the_place(grammars: Grammars) -> None:
    for grammar, reason in THE_PLACE_CASES:
        with pytest.raises(GbnfError, match=reason):
            to_lark(grammar)
        with pytest.raises(EngineError, match=f"The grammar cannot be used: .*{reason}"):
            grammars.constraint(SamplingParams(grammar=grammar))


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "a" root | "b"', 'root ::= "a" root?', 'root ::= "a" (root | "b")', 'root ::= b{0,2}\nb ::= "a" b'],
)
def test_rules_that_refer_to_themselves_may_end(grammar: str) -> None:
    assert to_lark(grammar).startswith("start: ")


@pytest.mark.parametrize(
    "lark", ["start: A\nA: /a/", "%llguidance {}\nstart: /a/", '  ?start : "a"', 'start[capture]: "a"']
)
def test_lark_stays_as_it_is(lark: str) -> None:
    assert not is_gbnf(lark)


def test_a_long_grammar_is_translated_in_one_pass() -> None:
    """Each rule becomes a terminal only when the next one has: a pass over all for each of them would take minutes."""
    count = 6000
    rules = [f"r{number} ::= r{number + 1}" for number in range(count)]
    lark = to_lark("\n".join(["root ::= r0", *rules, f'r{count} ::= "a"']))
    assert lark.count("\nT") == count + 2
    assert len(to_lark("root ::= " + '"a" ' * 30_000)) < 10 * 30_000


@pytest.mark.parametrize("text", ["\n" * 500_000, " \n" * 500_000, "start[\n" * 100_000, "start" + " " * 500_000])
def test_which_kind_a_long_grammar_is_is_seen_in_one_pass(text: str) -> None:
    """A pass from each line to the end would take hours."""
    assert is_gbnf(text)
    assert not is_gbnf(f"{text}\nstart: /a/")


def test_a_long_class_is_translated_in_one_pass() -> None:
    assert len(to_lark(f"root ::= [{'a' * 200_000}]")) > 200_000
    with pytest.raises(GbnfError, match="] is missing"):
        to_lark(f"root ::= [{'a' * 200_000}")
