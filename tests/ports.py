"""A free port for a program that binds it later."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)  # ports that no system gives to a connection, or to who asks for any


def free_port() -> int:
    """Return a port of this machine that nothing listens at."""
    while True:
        port = random.SystemRandom().choice(_BELOW_EPHEMERAL)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
