"""Tells its parent process whether a grammar can be compiled: JSON lines in, JSON lines out.

llguidance does not limit all of its compiler's work: a chain of 2,500 `$ref` overflows the stack, and
`{"multipleOf": 999983}` takes seconds and half a gigabyte. So grammars are compiled here first, with the parent's
vocabulary, a smaller stack, and limits of time and memory. This file imports none of the rooms.

The first line has the vocabulary. Each further line is a request, {"grammar": as llguidance compiles it, "seconds": of
processor time}; the answer is the reason why the grammar cannot be used, or "". A forked child, which inherits the
vocabulary, compiles it; if a limit ends the child, the answer is its exit code. On Windows the limit ends this process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import llguidance

from polarlm.children import OUT_OF_MEMORY, answer_lines, limit_time, say

MEMORY_BYTES = 1 << 30  # address space of this process
STACK_BYTES = 1 << 20  # the parent's threads have more
# Units of work for the compiler of regular expressions; its documentation says some 50,000 per millisecond.
FUEL = 500_000


def library_matcher(tokenizer: Any, grammar: str) -> Any:
    """llguidance's matcher before the first token; it may be in its error state."""
    limits = llguidance.LLParserLimits(initial_lexer_fuel=FUEL, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some errors appear only here
    return matcher


class _Vocabulary:
    """A vocabulary in llguidance's interface. How a text is split into tokens does not matter here."""

    bos_token_id = None

    def __init__(self, tokens: list[str], special: list[int], ends: list[int]) -> None:
        self.tokens = [token.encode("latin-1") for token in tokens]
        self.special_token_ids, self.eos_token_id = special, ends[0]
        self.library: Any = None  # llguidance's tokenizer, once it is made

    def __call__(self, text: bytes) -> list[int]:
        return [] if self.library is None else list(self.library.greedy_tokenize(text.decode()))


def _begin(first: dict[str, Any]) -> Callable[[dict[str, Any]], str | int | None]:
    vocabulary = _Vocabulary(**first)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), eos_token=first["ends"])
    vocabulary.library = tokenizer
    return partial(_answer_apart if hasattr(os, "fork") else _answer, tokenizer)


def _answer(tokenizer: Any, request: dict[str, Any]) -> str:
    matcher = library_matcher(tokenizer, request["grammar"])
    return matcher.get_error() if matcher.is_error() else ""


def _answer_apart(tokenizer: Any, request: dict[str, Any]) -> int | None:
    """Answer in a child, within the limits; or return the exit code of a child that a limit has ended."""
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        return os.waitstatus_to_exitcode(status) if status else None
    code = 1
    try:
        limit_time(request["seconds"])
        reason = _answer(tokenizer, request)
        limit_time(0)
        say(reason)
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    finally:
        os._exit(code)


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=answer_lines, args=(_begin, MEMORY_BYTES))
    thread.start()
    thread.join()
