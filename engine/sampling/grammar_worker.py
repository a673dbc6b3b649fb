"""Tells its parent process whether a grammar can be compiled: JSON lines in, JSON lines out.

llguidance does not limit all of its compiler's work: a chain of 2,500 `$ref` overflows the stack, and
`{"multipleOf": 999983}` takes seconds and half a gigabyte. So grammars are compiled here first, with the parent's
vocabulary, a smaller stack, and limits of time and memory. This file imports nothing of the package.

The first line has the vocabulary. Each further line is a request, {"grammar": as llguidance compiles it, "seconds": of
processor time}; the answer is the reason why the grammar cannot be used, or "". A forked child, which inherits the
vocabulary, compiles it; if a limit ends the child, the answer is its exit code. On Windows the limit ends this process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

import llguidance

MEMORY_BYTES = 1 << 30  # address space of this process
STACK_BYTES = 1 << 20  # the parent's threads have more
OUT_OF_MEMORY = 3  # exit code
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


def _limit_memory() -> None:
    if sys.platform == "win32":
        return
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ValueError, OSError):  # macOS has the limit but may refuse to set it
        return


def _limit_time(seconds: float) -> None:
    """Have the system end this process after `seconds` of processor time from now; 0 removes the limit."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(tokenizer: Any, grammar: str) -> None:
    matcher = library_matcher(tokenizer, grammar)
    reason = matcher.get_error() if matcher.is_error() else ""
    _limit_time(0)
    _write(reason)


def _write(answer: str | int) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _answer_apart(tokenizer: Any, grammar: str, seconds: float) -> None:
    """Answer in a child, within the limits."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            _write(os.waitstatus_to_exitcode(status))
        return
    code = 1
    try:
        _limit_time(seconds)
        _answer(tokenizer, grammar)
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    finally:
        os._exit(code)


def main() -> None:
    """Answers requests until the parent closes the pipe."""
    _limit_memory()
    first = json.loads(sys.stdin.buffer.readline() or "null")
    if first is None:
        return
    vocabulary = _Vocabulary(**first)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), eos_token=first["ends"])
    vocabulary.library = tokenizer
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if hasattr(os, "fork"):
            _answer_apart(tokenizer, request["grammar"], request["seconds"])
        else:
            _answer(tokenizer, request["grammar"])


def _serve() -> None:
    try:
        main()
    except MemoryError:  # too little is left for an answer
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
