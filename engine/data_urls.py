"""Files in data URLs (RFC 2397) and in base64, in all spellings that programs have for them."""

from __future__ import annotations

import base64
from urllib.parse import unquote, unquote_to_bytes

_LONGEST_HEAD = 1000  # characters up to the data, whose parameters may be a file's name
_URL_SAFE = str.maketrans("-_", "+/")


def is_data_url(text: str) -> bool:
    return text[:_LONGEST_HEAD].lstrip()[:5].lower() == "data:"


def file_in(text: str) -> bytes:
    """The file in a data URL, or in base64 alone. White space, percent signs, the alphabet of URLs, and padding that is
    missing make no difference. Raises ValueError."""
    if not is_data_url(text):
        return _decode(text)
    mark = text[:_LONGEST_HEAD].lower().find(";base64")
    comma = text.find(",", max(mark, 0))  # before the mark, a name in quotes may have one
    if comma < 0:
        raise ValueError("a data URL has a comma before its data")
    data = text[comma + 1 :]
    try:
        return _decode(data)
    except ValueError:
        if mark >= 0:
            raise
        return unquote_to_bytes(data)


def _decode(text: str) -> bytes:
    plain = "".join((unquote(text) if "%" in text else text).split()).translate(_URL_SAFE).rstrip("=")
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
