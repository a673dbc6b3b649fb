"""The errors of the engine: sentences for the user, with a code that programs can read."""

from __future__ import annotations

from typing import Any

_MOST_SHOWN = 80  # characters of a value in a sentence


class EngineError(Exception):
    """A request or a setting cannot be served. The message is for the user: what is wrong, where, and what to do.

    `code` is stable: "context_length_exceeded", "invalid_request", "device_unavailable", "out_of_memory", "closed",
    "forked" (the engine cannot be used in a child process), "busy" (too many constraints wait to be compiled),
    "cancelled" (nobody waits any more for the request, whose constraint is not compiled yet), "model_unavailable" (its
    files are missing or cannot be used), "model_damaged", "model_not_found" (its adapter was unloaded), "session" (a
    session file is wrong), "storage" (a file cannot be read or written).
    `numbers` are for programs: with "context_length_exceeded", "n_ctx" is the context and "n_prompt_tokens" the number
    of prompt tokens, or a lower bound; where weights do not fit into memory, "lacking" is the number of missing bytes.
    """

    def __init__(
        self, message: str, code: str = "invalid_request", settings: tuple[str, ...] = (), **numbers: int
    ) -> None:
        """`settings`: the fields of EngineConfig that the message names, for which a command line has flags."""
        super().__init__(message)
        self.code = code
        self.settings = settings
        self.numbers = numbers


class DeviceLost(EngineError):
    """The device has stopped with an error that every later call gets, too: only a new process can use it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "device_unavailable")


class KernelError(EngineError):
    """A kernel for this CPU cannot be compiled or loaded. The message is a sentence without a full stop."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "device_unavailable")


class ConstraintError(EngineError):
    """A schema, a grammar or a regular expression cannot constrain an answer."""

    field: str | None = None  # the field of the request that asked for it, where a server knows it
    line: int | None = None  # of a grammar's text, from 1 on, where the compiler names it
    reason: str = ""  # what is wrong, without saying of what


def shown(value: Any) -> str:
    """A value as text for an error message: its repr, shortened to 80 characters.

    >>> shown("no"), shown([7] * 100)
    ("'no'", '[7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,…')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of too many digits, or nested too deeply
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1].rstrip() + "…"


def counted(count: int, noun: str) -> str:
    """A count and its noun: "1 token", "2 tokens"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def no_answers(model: str, *, scores_pairs: bool) -> EngineError:
    """The error of a request for what an encoder does not give. scores_pairs: whether it is for ranking documents."""
    if scores_pairs:
        return EngineError(
            f"{model} ranks documents for a query (Engine.rerank, /v1/rerank) and does nothing else: for vectors or "
            "answers, load an embedding model or a generative one"
        )
    return EngineError(
        f"{model} is an embedding model: it gives texts a vector (Engine.embed, /v1/embeddings) and cannot continue or "
        "answer them; for that, load a generative model"
    )
