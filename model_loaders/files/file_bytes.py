"""Byte ranges of a weight file."""

from __future__ import annotations

import os
import threading
import zlib
from pathlib import Path

import numpy as np

from polarlm.model_loaders.errors import LoadError, stand_in

_SAMPLES, _SAMPLE = 16, 4096  # how many pieces tell a file whose time has changed from one that was written, and bytes


class FileBytes:
    """One open file. It is read and not mapped, which is as fast: a mapped page after the end of a file that became
    shorter would kill the process.

    The memory of a range is freed with its array, so that a tensor can be converted slab by slab and the file is never
    in memory twice. Threads may share an object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()  # guards the file's position, where reading depends on it
        self._whole: tuple[int, np.ndarray] | None = None
        try:
            self._file = path.open("rb", buffering=0)
            self.size, self._time = self._state()
            problem = stand_in(path, self.read(0, 64))
            if problem is None and path.with_name(f"{path.name}.aria2").exists():  # it has its size from the beginning
                problem = LoadError(f"{path} is not downloaded completely: let aria2 finish, or download it again.")
            if problem is not None:
                self._file.close()
                raise problem
            self._sample = self._sample_checksum()
        except OSError as error:
            raise LoadError(f"{path} cannot be opened: {error.strerror or error}.") from error

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset`; fewer only where the file ends."""
        out = bytearray(max(0, min(count, self.size - offset)))
        return bytes(memoryview(out)[: self._read_into(memoryview(out), offset)])

    def view(self, offset: int, count: int) -> np.ndarray:
        """The bytes of a range inside the file, uint8 (count,), read-only.

        Raises LoadError if the file has changed since it was opened.
        """
        out = np.empty(count, np.uint8)
        bytes_done = self._read_into(out.data, offset)
        size, time = self._state()
        if time != self._time and size == self.size and self._sample_checksum() == self._sample:
            self._time = time  # only the time is another one, as after a copy of it, or `touch`
        if bytes_done < count or (size, time) != (self.size, self._time):
            raise LoadError(
                f"{self.path.name} has changed since it was opened; when its download has finished, load the model "
                "again, or start the server again."
            )
        out.flags.writeable = False
        return out

    def whole(self, offset: int, count: int) -> np.ndarray:
        """As `view`; until `forget` is called, the range from this offset is read once."""
        if self._whole is None or self._whole[0] != offset:
            self._whole = offset, self.view(offset, count)
        return self._whole[1]

    def forget(self) -> None:
        """Free what `whole` keeps."""
        self._whole = None

    def expect(self, offset: int, count: int) -> None:
        """Lets the system read a range ahead: many requests to a disk at a time are several times as fast as one."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), offset, count, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        self._file.close()

    def _read_into(self, out: memoryview, offset: int) -> int:
        """Fill `out` from `offset` on, and return how many bytes the file has there."""
        bytes_done, number = 0, self._file.fileno()
        try:
            while bytes_done < len(out):
                if hasattr(os, "preadv"):
                    count = os.preadv(number, [out[bytes_done:]], offset + bytes_done)
                else:
                    with self._lock:
                        self._file.seek(offset + bytes_done)
                        count = self._file.readinto(out[bytes_done:])
                if not count:
                    break
                bytes_done += count
        except OSError as error:
            raise LoadError(f"{self.path.name} cannot be read: {error.strerror or error}.") from error
        return bytes_done

    def _state(self) -> tuple[int, int]:
        """The file's size in bytes, and the time of its last change in nanoseconds."""
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def _sample_checksum(self) -> int:
        """A checksum of pieces all over the file, its first and its last bytes among them."""
        checksum = 0
        for number in range(_SAMPLES):
            checksum = zlib.crc32(self.read(number * max(0, self.size - _SAMPLE) // (_SAMPLES - 1), _SAMPLE), checksum)
        return checksum
