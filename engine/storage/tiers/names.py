"""Names of objects: digests of everything that determines them, every byte of the model's weights included.

Each weights file is hashed once: a small file in the cache folder has its digest, which is valid as long as the size
and the times of the weights file are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from polarlm.engine.storage import files
from polarlm.engine.storage.objects import NAME_BYTES

_VERSION = b"2"  # the version of the meaning of all objects


class ObjectNames:
    """The names of a model's objects. root: the root of its prefix cache. weights: a digest of its weights files."""

    def __init__(self, root: bytes, weights: bytes):
        self._key = hashlib.blake2b(_VERSION + root + weights, digest_size=32).digest()

    def block(self, key: bytes) -> bytes:
        """Return the name of the complete block with this hash in the prefix cache."""
        return self._name(key, b"block")

    def state(self, key: bytes) -> bytes:
        """Return the name of the snapshot at the end of the block with this hash, of sparse groups of layers."""
        return self._name(key, b"state")

    def tail(self, parent: bytes) -> bytes:
        """Return the name of the newest block with fewer than N tokens after the block with this hash."""
        return self._name(parent, b"tail")

    def answer(self, key: bytes) -> bytes:
        """Return the name of the ids of an answer, given the digest of its conversation."""
        return self._name(key, b"answer")

    def _name(self, key: bytes, kind: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._key, person=kind, digest_size=NAME_BYTES).digest()


def stored_digest(weights: Sequence[Path], folder: Path | None) -> bytes | None:
    """Return the digest of weights files that were all hashed before and are unchanged; None for others."""
    digests = [_read_note(file, folder) for file in weights]
    return None if None in digests else _combine([digest for digest in digests if digest is not None])


def digest(weights: Sequence[Path], folder: Path | None) -> bytes:
    """Return the digest of weights files, and remember the digest of each in `folder` if possible. Raises OSError, also
    for a file that changes while it is read."""
    return _combine([_read_note(file, folder) or _hash(file, folder) for file in weights])


def _combine(digests: Sequence[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(sorted(digests)), digest_size=32).digest()


def _note(file: Path, folder: Path) -> Path:
    return folder / f"weights-{hashlib.blake2b(os.fsencode(os.path.realpath(file)), digest_size=16).hexdigest()}.json"


def _read_note(file: Path, folder: Path | None) -> bytes | None:
    if folder is None:
        return None
    try:
        state, digest = json.loads(_note(file, folder).read_bytes())
        return bytes.fromhex(digest) if state == files.file_state(file) else None
    except (OSError, ValueError, TypeError):
        return None


def _hash(file: Path, folder: Path | None) -> bytes:
    state, digest = files.file_state(file), files.sha256(file)
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            files.write(_note(file, folder), [json.dumps([state, digest]).encode()])
    return bytes.fromhex(digest)
