"""Spelling of SentencePiece vocabularies: "▁" is a space, "<0x0A>" a byte."""

from __future__ import annotations

import re

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_of(piece: str) -> bytes | None:
    """The byte that a byte token such as "<0x0A>" stands for; None for any other spelling."""
    match = _BYTE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else None


def text_of(piece: str) -> bytes:
    """The UTF-8 text of an ordinary piece.

    >>> text_of("▁the")
    b' the'
    """
    return piece.replace("▁", " ").encode()
