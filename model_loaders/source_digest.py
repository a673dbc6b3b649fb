"""A digest of this program's code, for files that depend on it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path


def source_digest(folders: Sequence[Path]) -> str | None:
    """A digest of the Python files of these folders; None if a folder has none or one cannot be read."""
    digest = hashlib.sha256()
    try:
        for folder in folders:
            files = sorted(folder.rglob("*.py"))
            if not files:
                return None
            for file in files:
                digest.update(f"{file.relative_to(folder.parent).as_posix()}\n".encode() + file.read_bytes())
    except OSError:
        return None
    return digest.hexdigest()
