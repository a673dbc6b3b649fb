"""Constraints from schemas, grammars and regular expressions: what is drawn under them is what they ask for."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, SamplingParams
from polarlm.engine.sampling import grammars
from polarlm.engine.sampling.constraints import allowed_bits
from polarlm.engine.sampling.grammars import MOST_TEXT, Grammars
from polarlm.model_loaders.tokenizers import Tokenizer, load_for_gguf
from tests.model_loaders import vocabularies as vocab
from tests.tiny import assert_idle

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PADDING = 30  # rows of the embedding beyond the vocabulary
TINY: dict[str, Callable[..., Any]] = {"byte-level": vocab.tiny_bpe, "SentencePiece": vocab.tiny_spm}


def drawn(grammars: Grammars, tokenizer: Tokenizer, params: SamplingParams, seed: int) -> str:
    """Text of tokens drawn at random from those that are allowed."""
    rng, size = np.random.default_rng(seed), tokenizer.vocab_size + PADDING
    constraint = grammars.constraint(params)
    text = b""
    while not constraint.finished:
        mask = constraint.allowed()
        assert mask is not None
        allowed = np.flatnonzero(allowed_bits(mask, size))
        assert allowed.max() < tokenizer.vocab_size  # the rest is padding
        ends = tokenizer.eos_ids & set(allowed.tolist())
        if ends and rng.random() < 0.2:
            break
        token = int(rng.choice([token for token in allowed if token not in tokenizer.eos_ids]))
        text += tokenizer.token_bytes(token)
        constraint.accept(token)
    return text.decode()


@pytest.fixture(params=[*TINY, "llama3-tiktoken", "qwen2.5-json", "llama2-model"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    name = request.param
    return load_for_gguf(TINY[name]()) if name in TINY else vocab.real(name)


@pytest.mark.slow
def test_every_vocabulary_can_be_constrained(tokenizer: Tokenizer) -> None:
    """A library needs seconds for a large vocabulary."""
    grammars = Grammars(tokenizer, tokenizer.vocab_size + PADDING)
    patterns = {
        "[0-9]{3}, (yes|no)": {"regex": "[0-9]{3}, (yes|no)"},
        "(<[a-c]+>){2,4}": {"grammar": 'root ::= item{2,4}\nitem ::= "<" [a-c]+ ">"'},
        "[a-z]{1,9} [a-z]{1,9}": {"grammar": 'start: WORD " " WORD\nWORD: /[a-z]{1,9}/'},
    }
    for seed in range(3):
        jsonschema.validate(json.loads(drawn(grammars, tokenizer, SamplingParams(schema=PERSON), seed)), PERSON)
        for pattern, params in patterns.items():
            assert re.fullmatch(pattern, drawn(grammars, tokenizer, SamplingParams(**params), seed))


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    with Engine.load(tiny_path, device="cpu", cache_type="f16", block_size=16, parallel=4) as engine:
        yield engine
        assert_idle(engine)


def test_the_white_space_of_json_ends(engine: Engine) -> None:
    """Some models would write nothing else. The vocabulary lacks braces, so this is JSON of numbers."""
    space = [token for token in range(96) if engine.model.tokenizer.token_bytes(token).isspace()]
    bias = dict.fromkeys(space, 1e6)
    params = SamplingParams(schema={"type": "integer"}, logit_bias=bias, max_tokens=60, seed=1, temperature=1)
    assert json.loads(engine.generate("a", params).text) is not None


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"schema": "{"}, r"The JSON schema cannot be used: Expecting property name .* line 1 column 2"),
        ({"schema": "[1]"}, r"The JSON schema cannot be used: it is \[1\], but must be an object; {} allows any JSON"),
        (
            {"schema": {"type": "integer", "minimum": 3, "maximum": 1}},
            r"The JSON schema cannot be used: Unsatisfiable schema: minimum \(3\) is greater than maximum \(1\)",
        ),
        ({"schema": {"$ref": "#/nowhere"}}, "The JSON schema cannot be used: .*nowhere"),
        ({"grammar": "start: word"}, 'The grammar cannot be used: .*unknown name: "word"'),
        ({"regex": "(a"}, "The regular expression cannot be used: unclosed group"),
        ({"regex": "a" * (MOST_TEXT + 1)}, "regex has 131,073 characters, but at most 131,072 are taken"),
    ],
)
def test_what_cannot_be_a_constraint_is_refused_with_the_reason(
    engine: Engine, params: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EngineError, match=reason) as caught:
        engine.generate("a", SamplingParams(**params))
    assert caught.value.code == "invalid_request"
    assert "\n" not in str(caught.value)


def test_one_constraint_at_a_time(engine: Engine) -> None:
    with pytest.raises(EngineError, match="schema and regex both constrain the answer; leave one of them out"):
        SamplingParams(schema={}, regex="a")
    other = Grammars(engine.model.tokenizer, 96).constraint(SamplingParams(regex="b"))
    with pytest.raises(EngineError, match="both constrain the answer"):
        next(engine.stream("a", SamplingParams(regex="a"), constraint=other))


@pytest.mark.parametrize("settings", [{"logprobs": 3}, {"temperature": 0, "stop": ("x",), "top_k": 3}])
def test_requests_are_constrained_whatever_else_they_ask_for(engine: Engine, settings: dict[str, Any]) -> None:
    for seed in range(5):
        params = SamplingParams(**{"temperature": 1, "seed": seed, "regex": "[a-f]{4,9}", **settings})
        answer = engine.generate("The", params)
        assert re.fullmatch("[a-f]{4,9}", answer.text)
        assert answer.finish_reason == "stop"


def test_the_newest_constraint_is_kept_however_long_it_took(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_KEPT_SECONDS", 1e-9)
    before = engine.grammars.counts().outcomes["compiled"]
    for regex in ("newest a{2}", "newest a{2}", "newest b{2}", "newest a{2}"):
        engine.generate("The", SamplingParams(regex=regex, max_tokens=1))
    assert engine.grammars.counts().outcomes["compiled"] == before + 3


def test_without_the_library_a_sentence_says_what_to_install(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(EngineError, match=r"Constraints need the package llguidance: pip install 'polarlm\[json\]'"):
        engine.generate("a", SamplingParams(regex="a"))
