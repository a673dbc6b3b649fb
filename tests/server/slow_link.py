"""A proxy between two machines: so many bytes a second, so late, and cut after so many bytes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Queue

_PIECE = 1 << 16
_MOST_ON_THE_WAY = 256  # pieces


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
        sent: Queue[tuple[float, bytearray]] = Queue(_MOST_ON_THE_WAY)
        threading.Thread(target=self._deliver, args=(sent, source, sink, answers), daemon=True).start()
        free_at, piece = 0.0, bytearray(1)
        while piece:
            piece = bytearray()
            with suppress(OSError):
                piece = bytearray(source.recv(_PIECE))
            free_at = max(free_at, time.monotonic()) + len(piece) / self.rate
            sent.put((free_at + self.delay, piece))

    def _deliver(
        self, sent: Queue[tuple[float, bytearray]], source: socket.socket, sink: socket.socket, answers: bool
    ) -> None:
        with suppress(OSError):
            while True:
                due, piece = sent.get()
                time.sleep(max(0.0, due - time.monotonic()))
                before = self.carried
                if answers:
                    self.carried += len(piece)
                    if self.flip is not None and before <= self.flip < self.carried:
                        piece[self.flip - before] ^= 0x10
                    if self.cut is not None and self.carried > self.cut:
                        sink.sendall(piece[: max(0, self.cut - before)])
                        break
                if not piece:
                    break
                sink.sendall(piece)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        while piece:  # the thread that reads ends, too
            _, piece = sent.get()


@contextmanager
def link_to(target: str, rate: float = 1e12, delay: float = 0.0) -> Iterator[Link]:
    link = Link(target, rate, delay)
    try:
        yield link
    finally:
        link.close()
