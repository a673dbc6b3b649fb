"""The errors of the engine: sentences for the user, with a code that programs can read."""

from __future__ import annotations

from typing import Any

_MOST_SHOWN = 80  # characters of a value in a sentence


class EngineError(Exception):
    """Something the user asked for cannot be done. The message says what, where, and what to do.

    `code` is stable: "context_length_exceeded", "invalid_request", "device_unavailable", "out_of_memory", "closed",
    "forked" (of an engine of the parent process), "model_unavailable" (its files are missing or cannot be used),
    "model_damaged", "session" (of a session file), "storage" (of the place for one). `numbers` are what the sentence
    counts, for programs: with "context_length_exceeded" the context, "n_ctx", and the prompt's tokens,
    "n_prompt_tokens", or the least of them.
    """

    def __init__(
        self, message: str, code: str = "invalid_request", settings: tuple[str, ...] = (), **numbers: int
    ) -> None:
        """`settings`: the fields of EngineConfig that the message names, for which a command line has flags."""
        super().__init__(message)
        self.code = code
        self.settings = settings
        self.numbers = numbers


def shown(value: Any) -> str:
    """A value that somebody has given, in a sentence: as Python writes it, cut where it is long.

    >>> shown("no"), shown([7] * 100)
    ("'no'", '[7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,…')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits, or deeper, than Python writes
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1].rstrip() + "…"
