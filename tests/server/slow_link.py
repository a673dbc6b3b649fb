"""A proxy between two machines: so many bytes a second, so late, and cut after so many bytes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PIECE = 1 << 16


class Link:
    """rate: bytes a second, in each direction. delay: seconds that a byte takes. cut: bytes of answers after which it
    breaks; None for never. flip: the byte of answers that is changed; None for none."""

    def __init__(self, target: str, rate: float = 1e12, delay: float = 0.0) -> None:
        host, port = target.removeprefix("http://").split(":")
        self._target, self.rate, self.delay = (host, int(port)), rate, delay
        self.cut: int | None = None
        self.flip: int | None = None
        self.carried = 0  # bytes of answers
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._socket.accept()
                self.carried = 0
                far = socket.create_connection(self._target)
                for source, sink, answers in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._carry, args=(source, sink, answers), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        """Pass bytes on; a byte arrives `delay` after it was sent, if the link is free."""
        free_at = 0.0
        with suppress(OSError):
            while piece := bytearray(source.recv(_PIECE)):
                arrived = time.monotonic()
                free_at = max(free_at, arrived) + len(piece) / self.rate
                time.sleep(max(0.0, free_at + self.delay - time.monotonic()))
                if answers:
                    before, self.carried = self.carried, self.carried + len(piece)
                    if self.flip is not None and before <= self.flip < self.carried:
                        piece[self.flip - before] ^= 0x10
                    if self.cut is not None and self.carried > self.cut:
                        sink.sendall(piece[: max(0, self.cut - before)])
                        break
                sink.sendall(piece)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def link_to(target: str, rate: float = 1e12, delay: float = 0.0) -> Iterator[Link]:
    link = Link(target, rate, delay)
    try:
        yield link
    finally:
        link.close()
