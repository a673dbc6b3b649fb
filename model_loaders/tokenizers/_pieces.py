"""How vocabularies spell bytes: SentencePiece's, where "▁" is a space and "<0x0A>" a byte, and GPT-2's alphabet."""

from __future__ import annotations

import re

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# In GPT-2's alphabet, bytes that are printable in Latin-1 stand for themselves; the others follow, in order, from
# U+0100.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
SPELLING = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)}
"""Byte → its character in GPT-2's alphabet."""
_BYTE_OF = {character: byte for byte, character in SPELLING.items()}


def byte_of(piece: str) -> bytes | None:
    """The byte that a byte token such as "<0x0A>" stands for; None for any other spelling."""
    match = _BYTE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else None


def text_of(piece: str) -> bytes:
    """The UTF-8 text of a piece of SentencePiece, or the byte that it stands for.

    >>> text_of("▁the"), text_of("<0x0A>")
    (b' the', b'\\n')
    """
    byte = byte_of(piece)
    return piece.replace("▁", " ").encode() if byte is None else byte


def spelt_bytes(piece: str) -> bytes:
    """The bytes that a piece in GPT-2's alphabet stands for.

    >>> spelt_bytes("Ġcafé"), spelt_bytes("Ċ")
    (b' caf\\xe9', b'\\n')
    """
    try:
        return bytes(_BYTE_OF[character] for character in piece)
    except KeyError:  # an added token is spelt literally
        return piece.encode()
