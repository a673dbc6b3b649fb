"""Where objects are kept: in memory, or in a folder that several processes may share.

A place knows names and bytes, and nothing about their meaning. What was used last stays longest. Reading one that
another process removes, or writing one that it writes as well, does no harm: a file appears as a whole, or not at all.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np

from polarlm.model_loaders.forks import renew_in_children

_UNFINISHED = ".unfinished-"  # prefix of temporary names
_ABANDONED = 3600.0  # seconds after which an unfinished file is one of a killed process
_ALIGNED = 64  # bytes, of the memory that an object is read to
_SHRUNK = 0.9  # of its size is left of a full folder, so that the next files need no look at all of them


class Place(Protocol):
    """Keeps objects by name. All methods may raise OSError; any thread may call them."""

    label: str
    """For users: "ram", "disk" or "remote"."""

    def has(self, name: bytes) -> bool:
        """Whether there is an object of this name."""

    def read(self, name: bytes) -> bytes | bytearray | memoryview | None:
        """The object of this name; None if there is none."""

    def write(self, name: bytes, header: bytes, payload: memoryview) -> None:
        """Keep an object, in place of any other of this name."""

    def remove(self, name: bytes) -> None:
        """Forget the object of this name, if there is one."""

    def used(self, names: Sequence[bytes]) -> None:
        """Note that these objects were used, of which the first shall stay longest."""


class Memory:
    """Objects in at most `size` bytes of memory."""

    label = "ram"

    def __init__(self, size: int):
        self._size, self._held = size, 0
        self._objects: OrderedDict[bytes, bytes] = OrderedDict()  # used last at the end
        self._lock = Lock()
        renew_in_children(self)

    def renew(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may hold it."""
        self._lock = Lock()

    def has(self, name: bytes) -> bool:
        return name in self._objects

    def read(self, name: bytes) -> bytes | None:
        return self._objects.get(name)

    def write(self, name: bytes, header: bytes, payload: memoryview) -> None:
        if len(header) + len(payload) > self._size:
            return
        self.remove(name)
        content = b"".join((header, payload))
        with self._lock:
            self._objects[name] = content
            self._held += len(content)
            while self._held > self._size:
                _, oldest = self._objects.popitem(last=False)
                self._held -= len(oldest)

    def remove(self, name: bytes) -> None:
        with self._lock:
            if (removed := self._objects.pop(name, None)) is not None:
                self._held -= len(removed)

    def used(self, names: Sequence[bytes]) -> None:
        with self._lock:
            for name in reversed(names):
                if name in self._objects:
                    self._objects.move_to_end(name)


class _Pieces:
    """Memory for what is read, cut from pieces that are large enough for large pages: new small pages take longer than
    reading."""

    _SIZE = 8 << 20

    def __init__(self) -> None:
        self._left = memoryview(b"")
        self._lock = Lock()
        renew_in_children(self)

    def renew(self) -> None:
        """Replace the lock in a forked child."""
        self._lock = Lock()

    def take(self, size: int) -> memoryview:
        """`size` bytes, writable and not initialised. A piece is freed when all that was cut from it is."""
        with self._lock:
            if len(self._left) < size:
                self._left = np.empty(max(size, self._SIZE), np.uint8).data
            taken, self._left = self._left[:size], self._left[-(-size // _ALIGNED) * _ALIGNED :]
            return taken


class Folder:
    """Objects as files of a folder, readable by their owner only, in about `size` bytes; None: without a limit.

    Processes that share a folder see each other's files when it gets full, and not before: together they may exceed the
    size by a tenth of it each. Files that were used last, which their time of modification says, stay.
    """

    def __init__(self, folder: Path, size: int | None, label: str = "disk"):
        """Raises OSError if the folder cannot be created, or no file can be written there."""
        self.label = label
        self._folder, self._size = folder, size
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.unlink(self._unfinished(b""))
        self._memory = _Pieces()
        self._room: int | None = None  # bytes that can be written before the next look at all files; None: unknown

    def _file(self, name: bytes) -> str:
        return os.path.join(self._folder, name.hex())

    def has(self, name: bytes) -> bool:
        try:
            os.stat(self._file(name))
        except FileNotFoundError:
            return False
        return True

    def read(self, name: bytes) -> memoryview | None:
        try:
            with open(self._file(name), "rb", buffering=0) as file:
                content, start = self._memory.take(os.fstat(file.fileno()).st_size), 0
                while start < len(content) and (count := file.readinto(content[start:])):
                    start += count
                return content  # cut short, it does not have its checksum
        except FileNotFoundError:
            return None

    def write(self, name: bytes, header: bytes, payload: memoryview) -> None:
        size = len(header) + len(payload)
        if self._size is not None:
            if self._room is None or self._room < size:
                self._room = self._shrink(size)
                if self._room < size:
                    return
            self._room -= size
        unfinished = self._unfinished(header, payload)
        try:
            os.replace(unfinished, self._file(name))
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise

    def _unfinished(self, *parts: bytes | memoryview) -> str:
        """A new temporary file that contains `parts`."""
        # No flush to the disk: what a power failure cuts short does not have its checksum.
        name = os.path.join(self._folder, _UNFINISHED + secrets.token_hex(8))
        number = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        try:
            with open(number, "wb", buffering=0) as file:
                for part in parts:
                    view = memoryview(part)
                    while view:
                        view = view[file.write(view) :]
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
        return name

    def remove(self, name: bytes) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._file(name))

    def used(self, names: Sequence[bytes]) -> None:
        now = time.time_ns()
        for number, name in enumerate(names):
            with suppress(FileNotFoundError):
                os.utime(self._file(name), ns=(now, now - 1000 * number))

    def _shrink(self, wanted: int) -> int:
        """Remove the files that were used longest ago if fewer than `wanted` bytes are left → the bytes left."""
        assert self._size is not None
        files, held, now = [], 0, time.time()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if entry.name.startswith(_UNFINISHED):
                        if now - found.st_mtime > _ABANDONED:
                            os.unlink(entry.path)
                    elif _is_name(entry.name):
                        files.append((found.st_mtime_ns, found.st_size, entry.path))
                        held += found.st_size
        if held + wanted > self._size:
            files.sort(reverse=True)
            target = int(_SHRUNK * self._size) - wanted
            while files and held > target:
                _, size, path = files.pop()
                with suppress(FileNotFoundError):
                    os.unlink(path)
                held -= size
        return self._size - held


def _is_name(text: str) -> bool:
    """Whether a file of this name is an object: a user's own files, in a folder of theirs, stay."""
    return len(text) == 32 and set(text) <= set("0123456789abcdef")
