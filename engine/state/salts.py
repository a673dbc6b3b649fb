"""Salts of the prefix cache: K/V of equal tokens are shared only under equal salts.

A salt is the one that a request gives (`cache_salt`), joined with the adapter that computes its K/V, if there is one.
"""

from __future__ import annotations

_MARK = "\0"  # begins a salt with an adapter


def joined(cache_salt: str, adapter: str) -> str:
    """Return the salt for a request's `cache_salt` and an adapter, which is text without NUL; each may be empty.

    Different pairs have different salts. Without an adapter it is the `cache_salt`, unless that begins with NUL.
    """
    if not adapter and not cache_salt.startswith(_MARK):
        return cache_salt
    return f"{_MARK}{adapter}{_MARK}{cache_salt}"


def adapter_of(salt: str) -> str:
    """Return the adapter in a salt that `joined` made; empty for none."""
    return salt[1:].partition(_MARK)[0] if salt.startswith(_MARK) else ""
