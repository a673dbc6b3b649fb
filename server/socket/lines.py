"""Splits the bytes of a socket into lines."""

from __future__ import annotations

from collections.abc import Iterator


class Lines:
    """Splits a stream of bytes into lines of at most `limit` bytes; buffers one line at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """The lines that `data` completes, without line ends; None for a line as soon as it is too long."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            if self._outgrown(end):
                yield None
            if not self._skipping:
                yield bytes(self._held)
            self._held.clear()
            self._skipping = False
        if self._outgrown(rest):
            yield None

    def rest(self) -> bytes:
        """The last line, which has no line end."""
        return bytes(self._held)

    def _outgrown(self, piece: bytes) -> bool:
        """Append `piece` to the line; returns whether it makes the line too long."""
        if self._skipping:
            return False
        self._skipping = len(self._held) + len(piece) > self._limit
        if self._skipping:
            self._held.clear()
        else:
            self._held += piece
        return self._skipping
