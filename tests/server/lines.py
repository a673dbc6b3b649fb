"""A client of the socket, and waiting for what comes to be true by itself."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

PATIENCE = 180.0  # seconds until a test fails: the machine may be busy
_PAUSE = threading.Event()


def eventually(holds: Callable[[], Any]) -> None:
    """Returns once `holds()` is true, and fails if that takes too long."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never came to be true"
        _PAUSE.wait(0.01)


def until_closed(connection: socket.socket) -> bytes:
    """What arrives until the server hangs up."""
    received = b""
    with connection, suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            received += data
    return received


class Client:
    """Speaks JSON lines; blocks until there is an answer. `address` is a host and a port, or a path."""

    def __init__(self, address: tuple[str, int] | str, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(address)
        self._lines = self.socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def send_raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send(self, **message: Any) -> None:
        self.send_raw(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """The next message. Raises EOFError where the server has hung up."""
        line = self._lines.readline()
        if not line:
            raise EOFError
        return json.loads(line)

    def rest(self) -> Iterator[dict[str, Any]]:
        """All messages until the server hangs up."""
        return map(json.loads, self._lines)

    def rest_of(self, request_id: Any) -> tuple[str, dict[str, Any]]:
        """The text of an answer from here on, and its last message; messages with other ids are passed over."""
        text = ""
        while True:
            message = self.receive()
            if message["id"] != request_id:
                continue
            if "delta" not in message:
                return text, message
            text += message["delta"]

    def ask(self, **message: Any) -> tuple[str, dict[str, Any]]:
        """The answer to a request, and its last message."""
        self.send(**message)
        return self.rest_of(message.get("id"))

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._lines.close()
        self.socket.close()
