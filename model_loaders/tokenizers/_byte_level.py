"""The byte alphabet of GPT-2's BPE: each byte is spelt as one printable character."""

from __future__ import annotations

# Bytes that are printable in Latin-1 stand for themselves; the others follow, in order, from U+0100.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(0x100 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}
_SPELLING = {byte: character for character, byte in _BYTE_OF.items()}


def spelling(byte: int) -> str:
    """The character that stands for a byte."""
    return _SPELLING[byte]


def spelt_bytes(piece: str) -> bytes:
    """The bytes that a byte-level piece stands for.

    >>> spelt_bytes("Ġcafé"), spelt_bytes("Ċ")
    (b' caf\\xe9', b'\\n')
    """
    try:
        return bytes(_BYTE_OF[character] for character in piece)
    except KeyError:  # an added token is spelt literally
        return piece.encode()
