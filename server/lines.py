"""What arrives on a socket, line by line."""

from __future__ import annotations

from collections.abc import Iterator


class Lines:
    """Cuts what arrives into lines of at most `limit` bytes, and never holds more than one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """The lines that `data` completes, without their ends; None as soon as one is too long."""
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
        """A last line that nothing ended."""
        return bytes(self._held)

    def _outgrown(self, piece: bytes) -> bool:
        """Take `piece` in; whether it is what makes the line too long."""
        if self._skipping:
            return False
        self._skipping = len(self._held) + len(piece) > self._limit
        if self._skipping:
            self._held.clear()
        else:
            self._held += piece
        return self._skipping
