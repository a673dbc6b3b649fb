"""Byte ranges of a weight file, mapped into memory or read on demand."""

from __future__ import annotations

import mmap as _mmap
import os
from pathlib import Path

import numpy as np

from polarlm.model_loaders.errors import LoadError, stand_in


class FileBytes:
    """One open file.

    With `mmap` a range is a view of the page cache and costs nothing until it is touched; without it every range is
    read into memory of its own. Either way the memory is freed with the arrays that were returned, so that a tensor can
    be converted slab by slab and the file is never in memory twice.
    """

    def __init__(self, path: Path, mmap: bool) -> None:
        self.path = path
        self._map: _mmap.mmap | None = None
        try:
            self._file = path.open("rb", buffering=0)
            self._opened = self._state()
            self.size = self._opened[0]
            if not self.size:
                self._file.close()
                raise LoadError(f"{path} is empty; download it again.")
            if (problem := stand_in(path, self.read(0, 64))) is not None:
                self._file.close()
                raise problem
            if path.with_name(f"{path.name}.aria2").exists():  # it has its size from the beginning
                self._file.close()
                raise LoadError(f"{path} is not downloaded completely: let aria2 finish, or download it again.")
            if mmap:
                self._map = _mmap.mmap(self._file.fileno(), 0, access=_mmap.ACCESS_READ)
        except OSError as error:
            raise LoadError(f"{path} cannot be opened: {error.strerror or error}.") from error

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset`; fewer only where the file ends."""
        chunks = []
        try:
            self._file.seek(offset)
            while count > 0 and (chunk := self._file.read(count)):
                chunks.append(chunk)
                count -= len(chunk)
        except OSError as error:
            raise LoadError(f"{self.path.name} cannot be read: {error.strerror or error}.") from error
        return b"".join(chunks)

    def view(self, offset: int, count: int) -> np.ndarray:
        """The bytes of a range inside the file, uint8 (count,), read-only.

        Raises LoadError if the file has changed since it was opened: a mapped page after its new end would kill the
        process.
        """
        self._check_unchanged()
        if self._map is not None:
            return np.frombuffer(self._map, np.uint8, count, offset)
        data = self.read(offset, count)
        if len(data) < count:
            raise self._changed()
        return np.frombuffer(data, np.uint8)

    def _state(self) -> tuple[int, int]:
        """The file's size in bytes, and the time of its last change in nanoseconds."""
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def _check_unchanged(self) -> None:
        if self._state() != self._opened:
            raise self._changed()

    def _changed(self) -> LoadError:
        return LoadError(f"{self.path.name} has changed while it was read; wait until its download has finished.")

    def expect(self, offset: int, count: int) -> None:
        """Lets the system read a range ahead: many requests to a disk at a time are several times as fast as one."""
        self._advise("MADV_WILLNEED", offset // _mmap.PAGESIZE, -(-(offset + count) // _mmap.PAGESIZE))

    def release(self, offset: int, count: int) -> None:
        """Lets the system drop the pages of a range that will not be read again."""
        self._advise("MADV_DONTNEED", -(-offset // _mmap.PAGESIZE), (offset + count) // _mmap.PAGESIZE)

    def _advise(self, name: str, first: int, last: int) -> None:
        """Give this advice about pages `first` to `last` of the mapped file. Windows has none, and trims by itself."""
        advice = getattr(_mmap, name, None)
        if self._map is not None and advice is not None and last > first:
            self._map.madvise(advice, first * _mmap.PAGESIZE, (last - first) * _mmap.PAGESIZE)

    def close(self) -> None:
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:  # a view is still alive: the mapping ends with the view
                self._map = None
        self._file.close()
