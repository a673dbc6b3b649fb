"""A schema means the same in plain JSON and in every form of calls, whatever library has written it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from polarlm.engine.errors import ConstraintError
from polarlm.engine.parsing.answer_parser import AnswerParser
from polarlm.engine.schemas.preparation import prepare_for_text
from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.server.answers.call_grammar import Grammar, functions_of
from tests.pairs import mostly_slow
from tests.server.answers.test_call_arguments import FORMS, QUOTED, bytes_as_tokens, taken, template_of

# As zod, Pydantic 1 and 2, OpenAPI 3.0 and MCP's libraries write them, with a value of each.
CASES = json.loads((Path(__file__).parents[2] / "fixtures" / "schemas_of_libraries.json").read_text(encoding="utf-8"))
CALLS = {**{name: template_of(name).calls for name in (*FORMS, "GEMMA", "HERMES")}, "QUOTED": QUOTED}
WRITTEN = ("a", "x", "7", "0", '"', ", ", ": ", "}", "]", "true", "null", "'")  # what a walk through a grammar tries


def grammar(format: CallFormat, schema: Any, told: list[str], strict: bool = False) -> str:
    functions = functions_of([{"function": {"name": "f", "parameters": schema, "strict": strict}}])
    return Grammar(format, functions, {}, calls="must", several=False, warn=told.append).text()


def walk(rules: str, endings: tuple[str, ...], seed: int) -> str | None:
    """A text of a grammar, by chance; None if it found no end."""
    chance = random.Random(seed)
    matcher = pytest.importorskip("llguidance").LLMatcher(bytes_as_tokens(), rules)
    assert not matcher.is_error(), matcher.get_error()
    text = b""
    for _ in range(400):
        if matcher.is_stopped() or (matcher.is_accepting() and chance.random() < 0.5):
            return text.decode(errors="replace")
        pieces = [bytes(matcher.compute_ff_tokens())]
        if not pieces[0]:
            pieces = [piece.encode() for piece in chance.sample((*endings, *WRITTEN), len(endings) + len(WRITTEN))]
            mask = matcher.compute_bitmask()
            pieces += [bytes([byte]) for byte in range(32, 127) if mask[byte // 8] >> byte % 8 & 1][:9]
        for piece in pieces:
            length = matcher.try_consume_tokens(list(piece))
            if length == len(piece):
                text += piece
                break
            matcher.rollback(length)
        else:
            return None
    return None


def arguments(format: CallFormat, schema: Any, text: str) -> Any:
    parser = AnswerParser(format, {"f": schema})
    pieces = parser.push(text) + parser.finish()
    return json.loads("".join(piece.arguments or "" for piece in pieces))


NAMES = [case["name"] for case in CASES]


@mostly_slow("case", CASES, CASES[::6], ids=NAMES)
def test_a_schema_means_the_same_in_every_form(case: Any) -> None:
    """A grammar has the value; what it has is of the schema, or a warning tells, which is an error of strict ones."""
    schema, value = case["schema"], case["value"]
    jsonschema.validate(value, schema)
    rules = pytest.importorskip("llguidance").LLMatcher.grammar_from_json_schema(json.dumps(prepare_for_text(schema)))
    assert taken(rules, json.dumps(value))
    for seed in range(3):
        if (text := walk(rules, ('"}', "}"), seed)) is not None:
            jsonschema.validate(json.loads(text), schema)
    for form, format in CALLS.items():
        told = list[str]()
        rules = grammar(format, schema, told)
        assert taken(rules, format.write_calls([("f", format.write(value), "")])), form
        if "wrong" in case:
            assert not taken(rules, format.write_calls([("f", format.write(case["wrong"]), "")])), form
        if told:
            with pytest.raises(ConstraintError, match="function f"):
                grammar(format, schema, [], strict=True)
            continue
        fields = format.fields
        endings = (format.quote,) if format.quote else (fields.suffix, fields.quote) if fields else ('"}', "}")
        for seed in range(3):
            if (text := walk(rules, tuple(filter(None, endings)), seed)) is None:
                continue
            found = arguments(format, schema, text)
            if fields and text.count(fields.suffix) > len(found):
                continue  # a string in JSON holds what ends the argument
            jsonschema.validate(found, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/$defs/n"}]}}, "required": ["a"],
         "$defs": {"n": {"type": "array", "items": {"$ref": "#/properties/a/anyOf/0"}, "minItems": 1}}},
        {"$ref": "#n", "$defs": {"n": {"$anchor": "n", "type": "array", "items": {"$ref": "#n"}, "minItems": 1}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}},
        {"type": "object", "anyOf": [{"properties": {name: {"$ref": "#"}}, "required": [name]} for name in "lr"]},
    ],
)  # fmt: skip
def test_what_would_hold_itself_without_end_is_refused_in_every_form(schema: Any) -> None:
    with pytest.raises(ValueError, match="nothing fulfils it"):
        prepare_for_text(schema)
    for format in CALLS.values():
        with pytest.raises(ConstraintError, match=r"function f .*nothing fulfils it"):
            grammar(format, schema, [])
