"""The protocol of a tier, which keeps objects by name; a tier in memory, and one in a folder that processes may share.

A tier knows names and bytes, and nothing about their meaning. It keeps the most recently used objects. Processes may
read, write and remove the same object at the same time: its file appears as a whole, or not at all.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from polarlm.engine.storage import files
from polarlm.model_loaders.forks import renew_in_children
from polarlm.model_loaders.recent import Recent
from polarlm.model_loaders.user_dirs import last_used

_NAME = re.compile("[0-9a-f]{32}")
_COUNTS = ".held"  # the name of the file that counts what a folder holds
_COUNTS_FORMAT = struct.Struct("<QQ")  # its contents: bytes and objects
_BINARY = getattr(os, "O_BINARY", 0)
_ALIGNMENT = 64  # bytes: alignment of the memory that an object is read into
_SHRUNK_SHARE = 0.9  # the share of its limit that a full folder is reduced to, so that the next writes need no scan


class TierContents(NamedTuple):
    bytes: int
    objects: int


class TierStore(Protocol):
    """Keeps objects by name. All methods may raise OSError; any thread may call them."""

    label: str
    """For users: "ram", "disk" or "remote"."""
    place: str
    """For users: "ram", or where on disk or in which store."""
    readers: int
    """How many threads of a request read from it at a time."""

    @property
    def contents(self) -> TierContents | None:
        """What the tier held after this process's last write; None for a tier without a limit. Never waits."""

    def has(self, name: bytes) -> bool:
        """Whether there is an object of this name."""

    def read(self, name: bytes) -> bytes | bytearray | memoryview | None:
        """Return the object of this name; None if there is none."""

    def write(self, name: bytes, header: bytes, payload: memoryview) -> None:
        """Keep an object, which replaces any other of this name."""

    def remove(self, name: bytes) -> None:
        """Remove the object of this name, if there is one."""

    def touch(self, names: Sequence[bytes], seconds: int = 0) -> None:
        """Record that these objects were used, or, on a disk, as if it were so many seconds later. The first ones are
        to stay longest."""


class MemoryTier:
    """Objects in at most `size` bytes of memory."""

    label = place = "ram"
    readers = 3

    def __init__(self, size: int):
        self._size, self._objects = size, Recent[bytes, bytes](size, len)

    @property
    def contents(self) -> TierContents:
        return TierContents(self._objects.size, len(self._objects))

    def has(self, name: bytes) -> bool:
        return name in self._objects

    def read(self, name: bytes) -> bytes | None:
        return self._objects.peek(name)

    def write(self, name: bytes, header: bytes, payload: memoryview) -> None:
        if len(header) + len(payload) <= self._size:
            self._objects.put(name, b"".join((header, payload)))

    def remove(self, name: bytes) -> None:
        self._objects.drop(name)

    def touch(self, names: Sequence[bytes], seconds: int = 0) -> None:
        for name in reversed(names):
            self._objects.get(name)


class _ReadMemory:
    """Memory for reads, cut from pieces large enough for huge pages: new small pages take longer than reading."""

    _SIZE = 8 << 20

    def __init__(self) -> None:
        self._left = memoryview(b"")
        self._lock = Lock()
        renew_in_children(self)

    def renew(self) -> None:
        self._lock = Lock()

    def take(self, size: int) -> memoryview:
        """Return `size` writable bytes, not initialised. A piece is freed when all that was cut from it is free."""
        with self._lock:
            if len(self._left) < size:
                self._left = np.empty(max(size, self._SIZE), np.uint8).data
            memory, self._left = self._left[:size], self._left[-(-size // _ALIGNMENT) * _ALIGNMENT :]
            return memory


class FolderTier:
    """Objects as files of a folder, readable by their owner only, of at most `size` bytes together; None: no limit.

    Several processes may share a folder. The limit holds for all their files together, at every moment: a writer locks
    the file of the counts, makes room, counts the new object, and then writes it. The least recently used files are
    removed first; a file's time of modification is its last use. A killed process leaves counts that are too high.
    The next scan of all files corrects them, when the folder seems full or a process makes its first write.
    """

    readers = 3

    def __init__(self, folder: Path, size: int | None, label: str = "disk"):
        """Raises OSError if the folder cannot be created, or no file can be written there."""
        self.label, self.place = label, f"{label} ({folder})"
        self._folder, self._size = folder, size
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as probe:
            self._owner = os.fstat(probe.fileno()).st_uid  # the owner of the files that this process writes there
        self._memory = _ReadMemory()
        self._has_scanned = False  # whether all files have been scanned
        self.contents: TierContents | None = None
        if size is not None:
            self.contents = TierContents(0, 0)
            with suppress(FileNotFoundError), open(self._counts_file, "rb") as file:
                self.contents = _read_counts(file) or self.contents

    @property
    def _counts_file(self) -> str:
        return os.path.join(self._folder, _COUNTS)

    def _file(self, name: bytes) -> str:
        return os.path.join(self._folder, name.hex())

    def has(self, name: bytes) -> bool:
        return _file_size(self._file(name)) is not None

    def read(self, name: bytes) -> memoryview | None:
        try:
            with open(self._file(name), "rb", buffering=0) as file:
                content, start = self._memory.take(os.fstat(file.fileno()).st_size), 0
                while start < len(content) and (count := file.readinto(content[start:])):
                    start += count
                return content  # if it is cut short, its checksum is wrong
        except FileNotFoundError:
            return None

    def write(self, name: bytes, header: bytes, payload: memoryview) -> None:
        size = len(header) + len(payload)
        with self._lock_counts() as file:
            if not self._make_room(file, size):
                return
            self._count(file, size, 0)
            try:
                old_size = _file_size(self._file(name))
                # If a power failure cuts a file short, its checksum is wrong.
                files.write(Path(self._file(name)), (header, payload), is_durable=False)
            except BaseException:
                self._count(file, -size, 0)
                raise
            self._count(file, -(old_size or 0), old_size is None)

    def remove(self, name: bytes) -> None:
        if not self.has(name):
            return
        with self._lock_counts() as file:
            size = _file_size(self._file(name))
            with suppress(FileNotFoundError):
                os.unlink(self._file(name))
            if size is not None:
                self._count(file, -size, -1)

    def touch(self, names: Sequence[bytes], seconds: int = 0) -> None:
        now = time.time_ns() + seconds * 1_000_000_000
        for number, name in enumerate(names):
            with suppress(FileNotFoundError):
                os.utime(self._file(name), ns=(now, now - 1000 * number))

    # -- the limit, of all processes together ------------------------------------------------------------------

    @contextmanager
    def _lock_counts(self) -> Iterator[BinaryIO]:
        """Yield the file of the counts, for one writer to a limited folder at a time. Tiers without a limit, which
        count nothing, share the lock. Without locks, as on Windows, processes may exceed the size by an object each."""
        while True:
            with self._open_counts() as file:
                files.lock(file, is_shared=self._size is None)
                try:
                    if os.fstat(file.fileno()).st_nlink:
                        yield file
                        return
                    # The folder was deleted while this thread waited, and may have been created again.
                finally:
                    files.unlock(file)

    def _open_counts(self) -> BinaryIO:
        flags = os.O_RDWR | os.O_CREAT | _BINARY
        try:
            number = os.open(self._counts_file, flags, 0o600)
        except FileNotFoundError:  # a user has deleted the folder
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            number = os.open(self._counts_file, flags, 0o600)
        return open(number, "r+b", buffering=0)

    def _count(self, file: BinaryIO, more_bytes: int, more_objects: int) -> None:
        if self._size is not None:
            counts = _read_counts(file) or TierContents(0, 0)
            self._set_counts(file, max(0, counts.bytes + more_bytes), max(0, counts.objects + more_objects))

    def _set_counts(self, file: BinaryIO, size: int, objects: int) -> None:
        file.seek(0)
        file.write(_COUNTS_FORMAT.pack(size, objects))
        self.contents = TierContents(size, objects)

    def _make_room(self, file: BinaryIO, needed_bytes: int) -> bool:
        """Remove least recently used files if fewer than `needed_bytes` are left, and return whether they are now."""
        if self._size is None:
            return True
        limit = self._size - _COUNTS_FORMAT.size - needed_bytes
        counts = _read_counts(file)
        if counts is not None and self._has_scanned and counts.bytes <= limit:
            return True
        objects, total = self._scan()
        if total > limit >= 0:
            objects.sort(reverse=True)
            while objects and total > int(_SHRUNK_SHARE * self._size) - needed_bytes:
                _, size, path = objects.pop()
                with suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size
        self._set_counts(file, total, len(objects))
        self._has_scanned = True
        return total <= limit

    def _scan(self) -> tuple[list[tuple[int, int, str]], int]:
        """Return (time of last use, bytes, path) of all objects, and their bytes. Removes abandoned files."""
        files.remove_unfinished(self._folder)
        objects, total = [], 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == self._owner
                    if is_ours and _NAME.fullmatch(entry.name):  # what is no object stays, and does not count
                        objects.append((last_used(status), status.st_size, entry.path))
                        total += status.st_size
        return objects, total


def _file_size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def _read_counts(file: BinaryIO) -> TierContents | None:
    """Return the counts in their file; None if there are none yet."""
    file.seek(0)
    content = file.read(_COUNTS_FORMAT.size)
    return TierContents(*_COUNTS_FORMAT.unpack(content)) if len(content) == _COUNTS_FORMAT.size else None
