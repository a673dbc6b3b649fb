"""Compiled kernels in the user's cache folder, one file each.

The files of one set were compiled from the same sources, by the same LLVM, for the same level of CPU features, and are
in a folder that is named by a hash of these. Files that cannot be read, are damaged or belong to another user are
ignored. If the folder cannot be written, nothing is cached. The sets used least recently are removed, and no other
files.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from polarlm.engine.jit.compile.compiler import target_description
from polarlm.engine.jit.lang import Level
from polarlm.engine.storage import files
from polarlm.model_loaders.user_dirs import belongs_to_user, cache_folder, last_used, source_digest

_SETS = 8  # sets to keep, most recently used, of all versions and levels
_JIT = Path(__file__).resolve().parents[1]
_CHECKSUM = 32  # bytes
_NAME = re.compile("[0-9a-f]{32}")  # names of sets, and of the files in them


class ObjectCache:
    """One set of compiled kernels. folder: the set's, created by the first `write`; key: what the set depends on."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key
        self._is_tidy = False
        with suppress(OSError):
            os.utime(folder)  # marks the set as recently used

    def read(self, name: str) -> bytes | None:
        """The code of the kernel of this name; None if there is no file that can be trusted."""
        try:
            if not _is_ours(os.stat(self._folder)):
                return None
            # Opened once, so that what is checked is what is read. O_NONBLOCK: if it is a pipe, do not wait.
            flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
            with open(self._file(name), "rb", opener=lambda path, mode: os.open(path, mode | flags)) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
                    return None
                content = file.read()
        except OSError:
            return None
        code = content[_CHECKSUM:]
        return code if content[:_CHECKSUM] == self._checksum(name, code) else None

    def write(self, name: str, code: bytes) -> None:
        """Write the code of a kernel to the cache. File errors are ignored."""
        with suppress(OSError):
            if not self._folder.is_dir():
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _remove_old(self._folder)
            if not _is_ours(os.stat(self._folder)):
                return
            if not self._is_tidy:
                self._is_tidy = True
                files.remove_unfinished(self._folder)
            files.write(self._file(name), [self._checksum(name, code), code], is_durable=False)

    def _file(self, name: str) -> Path:
        return self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]

    def _checksum(self, name: str, code: bytes) -> bytes:
        return hashlib.sha256(f"{self._key}\n{name}\n".encode() + code).digest()


def object_cache(level: Level, sources: Sequence[Path] = ()) -> ObjectCache | None:
    """The set of a level and of `sources`, the folders with the code of the kernels, to which the language's own is
    added. None if the user has no cache folder or if sources cannot be read."""
    digest = source_digest([_JIT, *sources])
    try:
        folder = cache_folder() / "kernels"
    except ValueError:  # the user has no cache folder
        return None
    if digest is None:
        return None
    key = "\n".join([digest, np.__version__, level.name, target_description(level)])
    return ObjectCache(folder / hashlib.sha256(key.encode()).hexdigest()[:32], key)


def _is_ours(status: os.stat_result) -> bool:
    """Whether only this user can have written a file or folder; True on Windows, where the folder is the user's."""
    return not hasattr(os, "getuid") or (
        status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _remove_old(newest: Path) -> None:
    """Remove all sets but `newest` and the most recently used others. Other files and folders are left alone."""
    sets = []
    for folder in newest.parent.iterdir():
        with suppress(OSError):
            status = folder.lstat()
            is_set = _NAME.fullmatch(folder.name) and stat.S_ISDIR(status.st_mode) and belongs_to_user(status)
            if is_set and folder != newest:
                sets.append((last_used(status), folder))
    for _, folder in sorted(sets, reverse=True)[_SETS - 1 :]:
        with suppress(OSError):
            files.remove_unfinished(folder)
            files.remove_oldest(folder, _NAME, 0, folder)
            folder.rmdir()  # fails if something else is in it
