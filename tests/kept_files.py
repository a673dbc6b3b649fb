"""Folders that all checkouts share: what compilers have made of texts, kept between runs of the tests."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_TEMPORARY = Path(tempfile.gettempdir())
COMPILED = _TEMPORARY / f"polarlm-kept-{getpass.getuser()}"  # by LLVM and NVIDIA's compiler
EMULATED = _TEMPORARY / f"cuda-emulator-{getpass.getuser()}"  # by g++, for the emulated GPU

_SECONDS = 14 * 24 * 3600.0
_BYTES = 2 << 30  # in a folder; all tests together keep 0.2 GB


def used(entry: Path) -> None:
    """Mark an entry of such a folder as used now."""
    with suppress(OSError):
        os.utime(entry)


def forget(folder: Path, seconds: float = _SECONDS, most: int = _BYTES) -> None:
    """Remove the entries of a folder that were last used more than `seconds` ago, and the least recently used ones
    beyond `most` bytes."""
    entries = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError):  # another run has removed it
            files = [file for file in [entry, *(entry.rglob("*") if entry.is_dir() else ())] if file.is_file()]
            entries.append((entry.stat().st_mtime, sum(file.stat().st_size for file in files), entry))
    oldest, kept = time.time() - seconds, 0
    for moment, size, entry in sorted(entries, reverse=True):
        kept += size
        if moment < oldest or kept > most:
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with suppress(OSError):
                    entry.unlink()
