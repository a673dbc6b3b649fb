"""Constraints from JSON schemas, grammars and regular expressions, which llguidance (the extra `json`) compiles.

llguidance: https://github.com/guidance-ai/llguidance. Its masks are those of `engine.sampling.constraints`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from polarlm.engine.config import SamplingParams
from polarlm.engine.errors import EngineError, shown
from polarlm.engine.sampling import gbnf
from polarlm.engine.sampling.constraints import Constraint
from polarlm.model_loaders.forks import renew_in_children
from polarlm.model_loaders.limited_process import LimitedProcess, ProcessFailed

MOST_TEXT = 1 << 17  # characters of a schema, grammar or regular expression
_KEPT = 32  # compiled grammars
_SPACE = r"[ \t\r\n]{1,40}"  # between the parts of JSON: without an end to it, some models write nothing else
_KEPT_SECONDS = 2.0  # that all of these took to compile, for the memory that they take
_WORKER = Path(__file__).with_name("grammar_worker.py")


class Vocabulary(Protocol):
    """What is asked of a tokenizer: see `model_loaders.tokenizers`."""

    vocab_size: int
    eos_ids: frozenset[int]

    def tokenize(self, text: str, *, continued: bool = False) -> list[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def control_tokens(self) -> Any: ...


class Grammars:
    """Compiles the constraints of one model's requests, and keeps the last ones compiled. Threads may share it."""

    def __init__(self, tokenizer: Vocabulary, size: int) -> None:
        """size: of the vocabulary, with the rows of the embedding that are padding."""
        self._tokenizer, self._size = tokenizer, size
        self._compiled: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()  # least recently used first
        self._closed = False
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Replace the locks in a forked child: a thread of the parent may hold them."""
        self._lock = threading.Lock()  # of what is compiled
        self._compiling = threading.Lock()

    def close(self) -> None:
        """End the worker, and threads that wait to compile a constraint, these with an EngineError."""
        self._closed = True
        with self._compiling:
            if "_worker" in vars(self):
                self._worker.close()

    def constraint(self, params: SamplingParams, own: Constraint | None = None) -> Constraint | None:
        """The constraint of one request: a new one, or its own; None if it asks for none. Raises EngineError."""
        given = _given(params)
        if given is None:
            return own
        if own is not None:
            raise EngineError(f"constraint and {given[0]} both constrain the answer; leave one of them out")
        if (known := self._known(given)) is None:
            with self._compiling:
                if self._closed:
                    raise EngineError("The engine is closed", "closed")
                if (known := self._known(given)) is None:  # another thread may have compiled it
                    known = self._compile(*given)
                    self._keep(given, known)
        return _Matched(known.matcher.deep_copy())

    def _known(self, given: tuple[str, str]) -> _Compiled | None:
        with self._lock:
            if (found := self._compiled.get(given)) is not None:
                self._compiled.move_to_end(given)
            return found

    def _keep(self, given: tuple[str, str], compiled: _Compiled) -> None:
        with self._lock:
            self._compiled[given] = compiled
            while len(self._compiled) > _KEPT or sum(one.seconds for one in self._compiled.values()) > _KEPT_SECONDS:
                self._compiled.popitem(last=False)

    def _compile(self, field: str, text: str) -> _Compiled:
        """The constraint that the text of a field of SamplingParams asks for, which the worker has compiled before."""
        if len(text) > MOST_TEXT:
            raise EngineError(f"{field} has {len(text):,} characters, but at most {MOST_TEXT:,} are taken")
        _library()
        from polarlm.engine.sampling.grammar_worker import matcher

        try:
            source = _source(field, text)
            reason = self._worker.ask(source)
        except (ValueError, ProcessFailed) as error:
            raise _unusable(field, str(error)) from None
        if reason:
            raise _unusable(field, reason)
        began = time.perf_counter()
        compiled = matcher(self._library_tokenizer, source)
        if compiled.is_error():
            raise _unusable(field, compiled.get_error())
        return _Compiled(compiled, time.perf_counter() - began)

    @cached_property
    def _adapter(self) -> _Adapter:
        return _Adapter(self._tokenizer, max(self._size, self._tokenizer.vocab_size))

    @cached_property
    def _worker(self) -> LimitedProcess:
        tokens = [token.decode("latin-1") for token in self._adapter.tokens]
        special, ends = self._adapter.special_token_ids, self._adapter.ends
        return LimitedProcess(_WORKER, {"tokens": tokens, "special": special, "ends": ends})

    @cached_property
    def _library_tokenizer(self) -> Any:
        library, adapter = _library(), self._adapter
        adapter.library = library.LLTokenizer(library.TokenizerWrapper(adapter), eos_token=adapter.ends)
        return adapter.library


@dataclass(frozen=True)
class _Compiled:
    """llguidance's matcher before the first token, and how long it took to make."""

    matcher: Any
    seconds: float


class _Adapter:
    """A tokenizer as llguidance reads it: the bytes of each id, and the ids of text."""

    bos_token_id = None

    def __init__(self, tokenizer: Vocabulary, size: int) -> None:
        names = {token: name.encode() for name, token in tokenizer.control_tokens().items()}
        self._tokenizer = tokenizer
        self.tokens = [names.get(token) or tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.tokens += [b""] * (size - len(self.tokens))
        self.ends = sorted(tokenizer.eos_ids)
        if not self.ends:  # llguidance wants one: where the model has none, it is one that cannot be drawn
            self.ends = [size]
            self.tokens.append(b"<end>")
        self.special_token_ids = sorted({*names, *self.ends})
        self.eos_token_id = self.ends[0]
        self.library: Any = None  # llguidance's tokenizer, once it is made

    def __call__(self, text: bytes) -> list[int]:
        ids = self._tokenizer.tokenize(text.decode(), continued=True)
        is_exact = b"".join(map(self._tokenizer.token_bytes, ids)) == text
        # Some vocabularies normalize text, and drop spaces.
        return ids if is_exact or self.library is None else list(self.library.greedy_tokenize(text.decode()))


@dataclass
class _Matched:
    """A `Constraint` that asks llguidance's matcher."""

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
            reason = _first_line(self.matcher.get_error())
            raise EngineError(f"The answer cannot be constrained any further: {reason}")


def _given(params: SamplingParams) -> tuple[str, str] | None:
    """The field of `params` that asks for a constraint, and its text. Raises EngineError if a schema is not JSON."""
    schema = params.schema
    if schema is None:
        given = {"grammar": params.grammar, "regex": params.regex}
        return next(((field, text) for field, text in given.items() if text is not None), None)
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise _unusable("schema", str(error)) from None
    if not isinstance(schema, dict):
        raise _unusable("schema", f"it is {shown(schema)}, but must be an object; {{}} allows any JSON")
    return "schema", text


def _source(field: str, text: str) -> str:
    """The grammar as llguidance compiles it. Raises ValueError."""
    library = _library()
    if field == "schema":
        return str(library.LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": _SPACE}))
    if field == "regex":
        return str(library.LLMatcher.grammar_from_regex(text))
    return str(library.LLMatcher.grammar_from_lark(gbnf.to_lark(text) if gbnf.is_gbnf(text) else text))


def _library() -> Any:
    """llguidance. Raises EngineError if it is not installed."""
    try:
        return import_module("llguidance")
    except ImportError:
        raise EngineError("Constraints need the package llguidance: pip install 'polarlm[json]' installs it") from None


def _unusable(field: str, reason: str) -> EngineError:
    names = {"schema": "JSON schema", "grammar": "grammar", "regex": "regular expression"}
    return EngineError(f"The {names[field]} cannot be used: {_first_line(reason)}")


def _first_line(reason: str) -> str:
    """The first line of llguidance's reason; for regular expressions, the line that says what is wrong."""
    lines = reason.strip().splitlines() or ["no reason is given"]
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
