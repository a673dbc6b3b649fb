"""Constraints from schemas, grammars and regular expressions: what is drawn under them is what they ask for."""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.outputs import Chunk, fold
from polarlm.engine.sampling import grammars
from polarlm.engine.sampling.constraints import allowed_bits
from polarlm.engine.sampling.grammars import MOST_TEXT, Grammars
from polarlm.model_loaders.tokenizers import Tokenizer, load_for_gguf
from tests.model_loaders import vocabularies as vocab
from tests.tiny import assert_idle, blocks_left, by_count, preemptions

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


@pytest.fixture(params=[*TINY, *vocab.REAL])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    name = request.param
    return load_for_gguf(TINY[name]()) if name in TINY else vocab.real(name)


@pytest.mark.slow
def test_every_vocabulary_can_be_constrained(tokenizer: Tokenizer) -> None:
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
    with Engine.load(tiny_path, device="cpu", cache_type="f16", block_size=8, parallel=4) as engine:
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
        ({"regex": "(a|b)?" * 9000, "min_tokens": 30}, "The answer cannot be constrained any further: .*too many"),
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


@pytest.mark.slow
def test_requests_of_a_batch_are_constrained_each_by_its_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks for fewer requests than there are, so that some are preempted."""
    by_count(engine, monkeypatch)
    preempted = preemptions(engine, monkeypatch)
    patterns = ["[a-c]{30}", "[d-f]{40}", "(xy){9}", "[0-9]{33}"]
    outboxes: list[deque[Chunk | Exception]] = [deque() for _ in patterns]
    with blocks_left(engine, 5):
        for number, (pattern, outbox) in enumerate(zip(patterns, outboxes, strict=True)):
            engine.submit("The end", SamplingParams(regex=pattern, temperature=1, seed=number), into=outbox)
        while engine.work():
            pass
    assert any(preempted)
    for pattern, outbox in zip(patterns, outboxes, strict=True):
        assert re.fullmatch(pattern, fold(outbox).text)


def test_requests_with_and_without_a_constraint_share_steps_and_prefixes(engine: Engine) -> None:
    """Each has the answer that it has alone, and the constrained one finds the prompt when it comes again."""
    prompt = "The end of the rain in the end"
    asked = [SamplingParams(regex="[a-c]{20}", seed=1), SamplingParams(seed=2, max_tokens=20, ignore_eos=True)]
    alone = [engine.generate(prompt, params, PromptOptions(cache_salt=str(n))) for n, params in enumerate(asked)]
    outboxes: list[deque[Chunk | Exception]] = [deque() for _ in asked]
    for number, (params, outbox) in enumerate(zip(asked, outboxes, strict=True)):
        engine.submit(prompt, params, PromptOptions(cache_salt=f"{number + 2}"), into=outbox)
    while engine.work():
        pass
    assert [fold(outbox).token_ids for outbox in outboxes] == [answer.token_ids for answer in alone]
    again = engine.generate(prompt, asked[0], PromptOptions(cache_salt="2"))
    assert again.usage.cached_tokens >= 16
    assert again.token_ids == alone[0].token_ids


def test_an_answer_is_found_in_the_next_turn(engine: Engine) -> None:
    """Also where its last tokens came without a step: what has no K/V yet is computed with the question."""
    messages = [{"role": "user", "content": "the rain"}]
    params = SamplingParams(regex="[a-f]{9}, then on and on in the end", seed=1)
    answer = engine.chat(messages, params)
    assert answer.text.endswith("in the end")
    turn = [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "on"}]
    second = engine.chat(turn, SamplingParams(max_tokens=4))
    known = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert second.usage.cached_tokens > answer.usage.prompt_tokens
    assert second.usage.cached_tokens <= known


def test_the_newest_constraint_is_kept_however_long_it_took(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_KEPT_SECONDS", 0.0)
    before = engine.grammars.counts().outcomes["compiled"]
    for regex in ("newest a{2}", "newest a{2}", "newest b{2}", "newest a{2}"):
        engine.generate("The", SamplingParams(regex=regex, max_tokens=1))
    assert engine.grammars.counts().outcomes["compiled"] == before + 3


@pytest.mark.parametrize("stop", ["d, t", "then"])
def test_stop_strings_end_constrained_answers(engine: Engine, stop: str) -> None:
    """Also where they end among tokens that came without a step."""
    answer = engine.generate("The", SamplingParams(regex="[a-c]{3}d, then on", stop=(stop,), seed=3))
    assert re.fullmatch("[a-c]{3}" + {"d, t": "", "then": "d, "}[stop], answer.text)
    assert answer.finish_reason == "stop"


def test_without_the_library_a_sentence_says_what_to_install(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(EngineError, match=r"Constraints need the package llguidance: pip install 'polarlm\[json\]'"):
        engine.generate("a", SamplingParams(regex="a"))
