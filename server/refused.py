"""Why the server does not do what a client asks, with the codes of such answers."""

from __future__ import annotations

import random


class Refused(Exception):
    """A request that the server does not serve, or not to its end. The message is a sentence for the client.

    `code` is stable: "busy" (try again after `retry_after` seconds), "closing", "timeout", "internal",
    "sessions_off" (there is no folder for them), "unknown_session".
    """

    def __init__(self, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after


def unknown_session(name: str) -> Refused:
    return Refused("unknown_session", f"There is no session called {name}")


def closing() -> Refused:
    return Refused("closing", "The server is about to end and takes no more requests")


def busy(message: str, seconds: int) -> Refused:
    """`seconds`: after which it makes sense to try again, at the earliest.

    Each client is told a different time: those that came together would else come back together, for the room of one.
    """
    return Refused("busy", f"{message}: try again a little later", seconds + random.randrange(max(5, seconds)))


TOO_MANY_CONNECTIONS = "The server has too many connections"
