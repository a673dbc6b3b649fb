"""Clients that connect while the model is being loaded: health probes are told so, all others wait."""

from __future__ import annotations

import re
import selectors
import socket
import threading
from contextlib import suppress

from polarlm.server.running.listening import BACKLOG

_PROBE = re.compile(rb"(GET|HEAD) /((v1/)?health|ping)[ ?]")
_PEEKED = 32  # bytes, more than the start of a probe
_BODY = b'{"status": "loading"}'
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n"
) % len(_BODY)


class EarlyClients:
    """A context that accepts connections in a thread, until `hand_over`. Health probes are answered with 503 at once;
    all other connections are kept, with what their clients have sent."""

    def __init__(self, bound: socket.socket) -> None:
        self._bound, self._kept = bound, list[socket.socket]()
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="early clients", daemon=True)

    def __enter__(self) -> EarlyClients:
        self._bound.setblocking(False)
        for watched in (self._bound, self._woken):
            self._selector.register(watched, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for connected in self.hand_over():
            connected.close()

    def hand_over(self) -> list[socket.socket]:
        """Accept no more connections; return the connections that were kept. A second call returns none."""
        self._wake.close()
        self._thread.join()
        kept, self._kept = self._kept, []
        return kept

    def _run(self) -> None:
        with self._selector, self._woken:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._bound:
                        self._accept()
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        self._look_at(key.fileobj)

    def _accept(self) -> None:
        try:
            connected, _ = self._bound.accept()
        except OSError:  # the client has hung up
            return
        connected.setblocking(False)
        self._kept.append(connected)
        self._selector.register(connected, selectors.EVENT_READ)
        if len(self._kept) == BACKLOG:
            self._selector.unregister(self._bound)  # the system holds further ones

    def _look_at(self, connected: socket.socket) -> None:
        """Answer a probe. The first bytes of any other request are peeked at once, and stay in the socket's buffer."""
        self._selector.unregister(connected)
        try:
            start = connected.recv(_PEEKED, socket.MSG_PEEK)
        except OSError:
            start = b""
        if start and _PROBE.match(start) is None:
            return
        if start:
            with suppress(OSError):
                while connected.recv(1 << 16):  # unread data would reset the connection before the answer is read
                    pass
            with suppress(OSError):
                connected.sendall(_ANSWER if start.startswith(b"HEAD") else _ANSWER + _BODY)
        connected.close()
        self._kept.remove(connected)
