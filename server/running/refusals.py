"""The reasons for which the server refuses a request, with their codes."""

from __future__ import annotations

import logging
import random

from polarlm.children import how_ended
from polarlm.engine import EngineError

_LOG = logging.getLogger(__name__)
_COMPILED_SECONDS = 2  # least time in which the waiting constraints may be compiled


class Refusal(Exception):
    """The server refuses a request or ends it early. The message is a sentence for the client.

    `code` is stable: "busy" and "rate_limited" (try again after `retry_after` seconds), "closing", "timeout",
    "internal", "sessions_off" (the server has no folder for sessions), "unknown_session", "model_not_found",
    "model_not_loaded", "model_ended" (its process; the next request starts it again).
    """

    def __init__(self, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after


def unknown_session(name: str) -> Refusal:
    return Refusal("unknown_session", f"There is no session called {name}")


def model_ended(name: str, code: int) -> Refusal:
    sentence = f"The process of {name} {how_ended(code)} while it answered: send the request again, which starts it"
    return Refusal("model_ended", sentence)


def server_closing() -> Refusal:
    return Refusal("closing", "The server is about to end and takes no more requests")


def busy(message: str, seconds: int) -> Refusal:
    """A refusal for `seconds` or more, by chance: clients refused together would otherwise come back together."""
    return Refusal("busy", f"{message}: try again a little later", seconds + random.randrange(max(5, seconds)))


def for_clients(error: Exception) -> Exception:
    """`error` if clients may see it; otherwise a generic refusal, and `error` goes to the log."""
    if isinstance(error, EngineError) and error.code == "busy":
        return busy(str(error), _COMPILED_SECONDS)
    if isinstance(error, (Refusal, EngineError)):
        return error
    _LOG.error("a request ended with an unexpected error", exc_info=error)
    return Refusal("internal", f"The server could not continue this request: unexpected {type(error).__name__}")


TOO_MANY_CONNECTIONS = "The server has too many connections"
