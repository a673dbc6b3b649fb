"""Writes files atomically, to a temporary file, which is renamed at the end; removes old ones; locks of files."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from polarlm.model_loaders.user_dirs import belongs_to_user, last_used

try:
    import fcntl
except ImportError:  # Windows, where a file that is open for writing cannot be removed
    fcntl = None  # type: ignore[assignment]

Progress = Callable[[int], None]  # called with the number of bytes done since its last call

_UNFINISHED = ".unfinished-"  # prefix of temporary names
_TEMPORARY = re.compile(re.escape(_UNFINISHED) + "[a-z0-9_]{8}")
_PIECE = 16 << 20  # bytes after which the file is flushed to the disk
_READ_PIECE = 4 << 20  # bytes of a file that are read at a time
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


def is_device(name: str) -> bool:
    """Whether Windows takes a file of this name for a device, whatever follows a dot: what is written to it is lost.

    >>> is_device("nul.session"), is_device("console.session")
    (True, False)
    """
    return _DEVICE.fullmatch(name) is not None


def file_state(file: Path) -> list[int]:
    """Return attributes of a file that change with its content."""
    status = file.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits. Raises OSError, also for one that changes meanwhile."""
    state, content = file_state(file), hashlib.sha256()
    with file.open("rb", buffering=0) as opened:
        while piece := opened.read(_READ_PIECE):
            content.update(piece)
    if file_state(file) != state:
        raise OSError(f"{file} has changed while it was read")
    return content.hexdigest()


def lock(file: BinaryIO | int, *, is_shared: bool = False, waits: bool = True) -> bool:
    """Lock an open file until it is closed. Returns False where there are no locks: on Windows, and on some file
    systems. Raises BlockingIOError if another process has locked it, unless `waits`."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def unlock(file: BinaryIO) -> None:
    """Unlock a file. Closing it does not suffice while a forked child has it open, too."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def write(
    path: Path,
    parts: Iterable[bytes | memoryview],
    progress: Progress = lambda done: None,
    *,
    is_durable: bool = True,
) -> None:
    """Write a file of these parts to `path`, replacing any other. Only its owner can read it. After an exception, such
    as OSError, the file at `path` is unchanged. is_durable: wait for the disk, so that a power failure cuts nothing."""
    number, name = _new_file(path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            for part in parts:
                _write_part(file, part, progress, is_durable)
            _flush(file, is_durable)
            if fcntl is not None:
                os.replace(name, path)  # while it is locked: for `remove_unfinished` it is being written
        if fcntl is None:  # Windows, where an open file keeps its name
            os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files of killed processes from `folder`. Files that are being written or cannot be removed
    stay, and so does everything that is not a regular file of this user with a temporary name."""
    with suppress(OSError):
        for file in [file for file in folder.iterdir() if _TEMPORARY.fullmatch(file.name)]:
            with suppress(OSError):
                status = file.lstat()
                if not (stat.S_ISREG(status.st_mode) and belongs_to_user(status)):
                    continue
            with suppress(OSError), file.open("r+b") as opened:
                if lock(opened, waits=False):  # raises if the file is being written
                    file.unlink()
            if fcntl is None:
                with suppress(OSError):
                    file.unlink()


def remove_oldest(folder: Path, name: re.Pattern[str], limit: int, kept: Path) -> None:
    """Remove the least recently used files with such names until all but `kept` take `limit` bytes. Files of other
    users, and other names, stay and do not count."""
    candidates = []
    for file in folder.iterdir():
        with suppress(OSError):
            status = file.lstat()
            if name.fullmatch(file.name) and stat.S_ISREG(status.st_mode) and belongs_to_user(status) and file != kept:
                candidates.append((last_used(status), status.st_size, file))
    total = sum(size for _, size, _ in candidates)
    for _, size, file in sorted(candidates):
        if total <= limit:
            break
        with suppress(OSError):
            file.unlink()
            total -= size


def _new_file(folder: Path) -> tuple[int, str]:
    """Create a temporary file, which is locked while it is open, and return (descriptor, name)."""
    while True:
        number, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=folder)
        lock(number)
        if fcntl is None or os.fstat(number).st_nlink:
            return number, name
        os.close(number)  # `remove_unfinished` removed it before it was locked


def _write_part(file: BinaryIO, content: bytes | memoryview, progress: Progress, is_durable: bool) -> None:
    view = memoryview(content)
    for first in range(0, len(view), _PIECE):
        piece = view[first : first + _PIECE]
        before = file.tell() // _PIECE
        file.write(piece)
        if file.tell() // _PIECE > before:
            _flush(file, is_durable)
        progress(len(piece))


def _flush(file: BinaryIO, is_durable: bool) -> None:
    file.flush()
    if is_durable:
        os.fsync(file.fileno())
