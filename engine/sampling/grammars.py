"""Constraints from JSON schemas, grammars and regular expressions, which llguidance (the extra `json`) compiles.

llguidance: https://github.com/guidance-ai/llguidance. Its masks have the layout of `engine.sampling.constraints`.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.engine.errors import ConstraintError, EngineError, shown
from polarlm.engine.outputs import CompilationCounts
from polarlm.engine.params import SamplingParams
from polarlm.engine.sampling import gbnf
from polarlm.engine.sampling.compilations import TURNS, Compilations, Key, NeedsLonger
from polarlm.engine.sampling.constraints import Constraint
from polarlm.engine.schemas.preparation import prepare_for_text
from polarlm.model_loaders.forks import cached_property
from polarlm.model_loaders.limited_process import TOO_LONG, LimitedProcess, ProcessFailed, wanted_until, why_ended
from polarlm.model_loaders.recent import Recent
from polarlm.model_loaders.tokenizers import Tokenizer

MOST_TEXT = 1 << 17  # characters of a schema, grammar or regular expression
_MOST_KEPT = 32  # compiled grammars
_KEPT_REFUSED = 512  # reasons
_MOST_REASON = 300  # characters
# Patterns of llguidance's messages, which speak of its settings and internals → what users read.
_WORDS = {
    r"^Unimplemented keys: \[(.*)\]": r"these keywords are not supported: \1",
    "^oneOf constraints are not supported.*": "oneOf is supported only where its alternatives cannot overlap",
    "^oneOf not fully supported.*": "oneOf is taken as anyOf, since its alternatives may overlap",
    "^NoExtension.*": "nothing fulfils it",
    "Regex is empty:.*": "no string fulfils it",
    "^lexer precomputation failed.*": "it is too complex",
    "; try avoiding .*": "",
}
_PLACE = re.compile(r"at (\d+)\(\d+\): ")  # line and column that begin a reason
_SCHEMA_AT = r"^at \d+\(\d+\): failed to compile JSON schema: "
_KEPT_SECONDS = 2.0  # that the kept grammars took to compile, if there are several: a measure of their memory
_WHO_ENDS = "ignore_eos does not hold: the constraint, or the grammar of calls, decides where the answer ends"
_WORKER = Path(__file__).with_name("grammar_worker.py")


class Grammars:
    """Compiles the constraints of one model's requests, and keeps recent ones. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """size: the size of the vocabulary, including rows of the embedding that are padding."""
        self._tokenizer, self._size = tokenizer, size
        self._cache: Recent[Key, _CompiledConstraint] = Recent(
            1.0, lambda one: max(1 / _MOST_KEPT, one.seconds / _KEPT_SECONDS)
        )
        self._refusals: Recent[bytes, tuple[str, int | None]] = Recent(_KEPT_REFUSED)  # hash of the key → reason, line
        self._compilations: Compilations[_CompiledConstraint] = Compilations(self._find_known, self._compile)

    def close(self) -> None:
        """End the workers, and fail requests that wait for a constraint with an EngineError."""
        self._compilations.close()
        for worker in vars(self).get("_workers", {}).values():
            worker.close()

    def counts(self) -> CompilationCounts:
        return self._compilations.counts()

    def constraint(
        self,
        params: SamplingParams,
        other: Constraint | None = None,
        gone: Callable[[], bool] | None = None,
        close_tag: str = "",
        warn: Callable[[str], None] = lambda sentence: None,
    ) -> Constraint | None:
        """A new constraint as `params` ask for, else `other`, which may be None. Raises EngineError.

        gone: returns True once nobody waits for the request; then nothing is compiled for it. close_tag: the tag that
        closes the reasoning with which the answer begins; the constraint begins after it. Empty for none. warn: called
        with a sentence for each part of the constraint that does not hold.
        """
        key = _key(params, close_tag)
        if key is None:
            return other
        if other is not None:
            raise EngineError(f"constraint and {key[0]} both constrain the answer; leave one of them out")
        compiled_constraint = self._find_known(key) or self._compilations.result(key, gone or (lambda: False))
        for why in compiled_constraint.unheld:
            warn(f"the constraint holds in part: {why}")
        if params.ignore_eos:
            warn(_WHO_ENDS)
        return _MatcherConstraint(compiled_constraint.matcher.deep_copy())

    def _find_known(self, key: Key) -> _CompiledConstraint | None:
        """The kept constraint of a key, if there is one. Raises EngineError if the key was refused recently."""
        if (refusal := self._refusals.get(_hash(key))) is not None:
            raise _unusable(key[0], *refusal)
        return self._cache.get(key)

    def _refuse(self, key: Key, reason: str) -> EngineError:
        place = _PLACE.match(reason)
        refusal = _in_words(reason), int(place[1]) if place else None
        self._refusals.put(_hash(key), refusal)
        return _unusable(key[0], *refusal)

    def _compile(self, key: Key, seconds: float, gone: Callable[[], bool]) -> _CompiledConstraint:
        """Compile a constraint, after a worker process has compiled it within the limits. Raises NeedsLonger, or
        EngineError."""
        from polarlm.engine.sampling.grammar_worker import library_matcher

        try:
            field, text, close_tag = key
            unheld = dict[str, None]()
            source = _source(field, text, lambda why: unheld.update({why: None}))
            source = _after_reasoning(close_tag, source, self._tokenizer.control_tokens()) if close_tag else source
            with wanted_until(gone):
                answer = self._workers[seconds].ask({"grammar": source, "seconds": seconds})
        except ValueError as error:
            raise self._refuse(key, str(error)) from None
        except ProcessFailed as error:  # not remembered: the same grammar may succeed another time
            raise _unusable(key[0], str(error)) from None
        if answer == TOO_LONG and seconds != TURNS[-1]:
            raise NeedsLonger
        if answer:
            raise self._refuse(key, why_ended(answer) if isinstance(answer, int) else answer)
        began = time.perf_counter()
        matcher = library_matcher(self._library_tokenizer, source)
        if matcher.is_error():
            raise self._refuse(key, matcher.get_error())
        unheld |= dict.fromkeys(map(_in_words, matcher.get_grammar_warnings()))
        constraint = _CompiledConstraint(matcher, time.perf_counter() - began, tuple(unheld))
        self._cache.put(key, constraint)
        return constraint

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        return _Vocabulary(self._tokenizer, max(self._size, self._tokenizer.vocab_size))

    @cached_property
    def _workers(self) -> dict[float, LimitedProcess]:
        """A worker process for each length of turns."""
        tokens = [token.decode("latin-1") for token in self._vocabulary.tokens]
        special, ends = self._vocabulary.special_token_ids, self._vocabulary.ends
        first = {"tokens": tokens, "special": special, "ends": ends}
        return {seconds: LimitedProcess(_WORKER, first) for seconds in TURNS}

    @cached_property
    def _library_tokenizer(self) -> Any:
        library, vocabulary = _library(), self._vocabulary
        vocabulary.library = library.LLTokenizer(library.TokenizerWrapper(vocabulary), eos_token=vocabulary.ends)
        return vocabulary.library


@dataclass(frozen=True)
class _CompiledConstraint:
    """llguidance's matcher before the first token."""

    matcher: Any
    seconds: float  # that it took to make
    unheld: tuple[str, ...]  # what of it does not hold


class _Vocabulary:
    """A tokenizer in llguidance's interface: the bytes of each id, and the ids of a text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        names = {token: name.encode() for name, token in tokenizer.control_tokens().items()}
        self._tokenizer = tokenizer
        self.tokens = [names.get(token) or tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.tokens += [b""] * (size - len(self.tokens))
        self.ends = sorted(tokenizer.eos_ids)
        if not self.ends:  # llguidance requires an end token: a model without one gets an id that is never drawn
            self.ends = [size]
            self.tokens.append(b"<end>")
        self.special_token_ids = sorted({*names, *self.ends})
        self.eos_token_id = self.ends[0]
        self.library: Any = None  # llguidance's tokenizer, once it is made

    def __call__(self, text: bytes) -> list[int]:
        ids = self._tokenizer.tokenize(text.decode(), continued=True)
        is_exact = b"".join(map(self._tokenizer.token_bytes, ids)) == text
        # Some vocabularies normalize text or drop spaces.
        return ids if is_exact or self.library is None else list(self.library.greedy_tokenize(text.decode()))


@dataclass
class _MatcherConstraint:
    """A `Constraint` over llguidance's matcher."""

    matcher: Any

    def allowed(self) -> np.ndarray:
        mask = np.frombuffer(self.matcher.compute_bitmask(), "<u4")
        self._check()
        return mask

    def accept(self, token: int) -> None:
        self.matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        return bool(self.matcher.is_stopped())

    def _check(self) -> None:
        if self.matcher.is_error():
            reason = _in_words(self.matcher.get_error())
            raise EngineError(f"The answer cannot be constrained any further: {reason}")


def _hash(key: Key) -> bytes:
    return hashlib.sha256("\0".join(key).encode("utf-8", "surrogatepass")).digest()


def _key(params: SamplingParams, close_tag: str) -> Key | None:
    """The field of `params` that sets a constraint, and its text; None if none does. Raises EngineError if a schema is
    not JSON, or the text is too long."""
    texts = {"schema": _schema_text(params.schema), "grammar": params.grammar, "regex": params.regex}
    field, text = next(((field, text) for field, text in texts.items() if text is not None), ("", ""))
    if not field:
        return None
    text = text.removeprefix("\ufeff")
    if len(text) > MOST_TEXT:
        raise ConstraintError(f"{field} has {len(text):,} characters, but at most {MOST_TEXT:,} are taken")
    _library()
    return field, text, close_tag


def _schema_text(schema: dict[str, Any] | str | None) -> str | None:
    if schema is None:
        return None
    try:
        schema = json.loads(schema.removeprefix("\ufeff")) if isinstance(schema, str) else schema
        text = json.dumps(schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise _unusable("schema", str(error)) from None
    if not isinstance(schema, dict):
        raise _unusable("schema", f"it is {shown(schema)}, but must be an object; {{}} allows any JSON")
    return text


def _source(field: str, text: str, warn: Callable[[str], None]) -> str:
    """The grammar as llguidance compiles it. warn: called with what does not hold. Raises ValueError."""
    library = _library()
    if field == "schema":
        schema = prepare_for_text(json.loads(text), warn)
        return str(library.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    if field == "regex":
        return str(library.LLMatcher.grammar_from_regex(text))
    return str(library.LLMatcher.grammar_from_lark(gbnf.to_lark(text) if gbnf.is_gbnf(text) else text))


def _after_reasoning(tag: str, source: str, control: Mapping[str, int]) -> str:
    """The grammar of reasoning up to `tag`, and then a text of the grammar `source`."""
    whole = json.loads(source) if source.startswith("{") else {"grammars": [{"lark_grammar": source}]}
    first, *others = whole["grammars"]
    reasoning_rule = f"thought[lazy]: /(?s:.*)/ {json.dumps(tag)}"
    if tag in control:
        reasoning_rule = f"thought: THOUGHT <[{control[tag]}]>\nTHOUGHT: /(?s:.*)/"
    lark = f"%llguidance {{}}\nstart: thought SPACE? @answer\n{reasoning_rule}\nSPACE: /[ \\t\\r\\n]{{1,8}}/\n"
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**first, "name": "answer"}, *others]})


def _library() -> Any:
    """llguidance. Raises EngineError if it is not installed."""
    try:
        return import_module("llguidance")
    except ImportError:
        raise EngineError("Constraints need the package llguidance: pip install 'polarlm[json]' installs it") from None


def _unusable(field: str, reason: str, line: int | None = None) -> EngineError:
    names, reason = {"schema": "JSON schema", "grammar": "grammar", "regex": "regular expression"}, _in_words(reason)
    refusal = ConstraintError(f"The {names[field]} cannot be used: {reason}")
    refusal.line, refusal.reason = line, re.sub(_SCHEMA_AT, "", reason)
    return refusal


def _in_words(reason: str) -> str:
    """llguidance's reason as one line in our words; for a regular expression, the line that names the error."""
    lines = reason.strip().splitlines() or ["no reason is given"]
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    for theirs, ours in _WORDS.items():
        line = re.sub(theirs, ours, line)
    line = re.sub(r"\d{20,}", lambda digits: f"{float(digits[0]):g}", line)
    return line if len(line) <= _MOST_REASON else line[: _MOST_REASON - 1] + "…"
