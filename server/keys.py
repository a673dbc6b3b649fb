"""The API keys that clients may send, each with a name if its line in a file has one."""

from __future__ import annotations

import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from polarlm.engine.cli.flags import FlagError, read_text
from polarlm.engine.errors import counted

FLAG = "--api-key-file"
_WORD = re.compile(r"[!-~]+")  # what fits in an HTTP header
_LONGEST_NAME = 64
_LIMIT = re.compile(r"(requests|tokens)=([1-9][0-9]{0,11})|(priority)=(-?[0-9]{1,9})")  # the first two, of a minute
_SHORTEST = 8  # characters of a key with a name: a shorter one is a name, and the key would go to the log
_PAUSES = (0.05, 60.0)  # seconds from a failed read of the file to the next: the first, which is doubled up to the last
_LOG = logging.getLogger(__name__)


def is_key(text: str) -> bool:
    """Whether `text` has no white space and fits in an HTTP header."""
    return _WORD.fullmatch(text) is not None


class Keys:
    """All keys, which are compared in constant time. The file is read again once it has changed: the key of a line that
    is gone is valid no more. A file that is wrong by then changes nothing, the log says why, and it is read again until
    it is right."""

    def __init__(self, key: str | None, file: str | None, now: Callable[[], float] = time.monotonic) -> None:
        """key: one without a name. file: has further keys. Raises FlagError if the file is wrong or has no key."""
        self._now, self._pause, self._next_read = now, _PAUSES[0], 0.0
        self._problem: str | None = None  # why the last read failed
        self._config_keys = {} if key is None else {key.encode(): ""}
        self._file = None if file is None else Path(file).expanduser()
        self._file_keys: dict[bytes, str] = {}
        self._limits: dict[str, dict[str, int]] = {}
        self._file_state: tuple[int, ...] | None = None  # the file's state when it was read
        if self._file is not None:
            self._file_state = _state(self._file)
            self._file_keys, self._limits = _read(self._file)
            if not self._file_keys:
                raise FlagError(f"{FLAG} {file}: has no key; write one on each line, as in anna KEY")

    @property
    def are_required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._config_keys) or self._file is not None

    def name_of(self, key_sent: str) -> str | None:
        """The name of a key that a client has sent, empty if it has none; None if it is not valid."""
        self._reload()
        data, name_found = key_sent.encode("utf-8", "surrogatepass"), None
        for key, name in {**self._file_keys, **self._config_keys}.items():
            if hmac.compare_digest(data, key):  # all are compared, so that no client finds one byte by byte
                name_found = name
        return name_found

    def limits_of(self, name: str) -> Mapping[str, int]:
        """The limits of a name's keys, where its lines have one: for a minute, of "requests" and of "tokens"; and the
        least "priority" of its requests."""
        return self._limits.get(name, {})

    def warning(self) -> str | None:
        """A sentence about a file that other users of this machine may read; None if there is none."""
        if self._file is None or os.name != "posix" or not self._file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            return None
        return f"warning: other users of this machine may read {FLAG} {self._file}: chmod 600 {self._file}"

    def has_problem(self) -> bool:
        """Whether the file is wrong or cannot be read now, so that keys which it has no more are still valid."""
        self._reload()
        return self._problem is not None

    def _reload(self) -> None:
        """Read the file if it has changed, or could not be read."""
        if self._file is None:
            return
        if (state := _state(self._file)) != self._file_state:
            self._file_state, self._pause = state, _PAUSES[0]
        elif self._problem is None or self._now() < self._next_read:
            return
        try:
            self._file_keys, self._limits = _read(self._file)
            self._problem = None
            _LOG.warning("%s has changed, and has %s now", self._file, counted(len(self._file_keys), "valid key"))
        except FlagError as error:
            if str(error) != self._problem:
                _LOG.warning("%s; the keys that were read before stay valid", error)
            self._problem, self._next_read = str(error), self._now() + self._pause
            self._pause = min(2 * self._pause, _PAUSES[1])


def _state(file: Path) -> tuple[int, ...]:
    """What changes with a file; zeros if it is not there."""
    try:
        status = file.stat()
    except OSError:
        return (0, 0, 0, 0)
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino  # ctime: also of other permissions


def _read(file: Path) -> tuple[dict[bytes, str], dict[str, dict[str, int]]]:
    """Key → name, of each line, and name → limits. Raises FlagError, which names no key."""
    at = f"{FLAG} {file}"
    if not os.path.isfile(file):  # a pipe would wait for its writer
        raise FlagError(f"{at}: there is no such file")
    lines = read_text(f"{at}:", file).splitlines()
    keys: dict[bytes, str] = {}
    limits: dict[str, dict[str, int]] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, key = words[:2] if len(words) > 1 else ("", words[0])
        found = [_LIMIT.fullmatch(word) for word in words[2:]]
        if not all(map(is_key, words)) or len(name) > _LONGEST_NAME or None in found:
            problem = f"is neither a key nor a name, of at most {_LONGEST_NAME} characters, and a key, in ASCII"
            problem += ", with limits as in requests=60 tokens=100000 priority=1" if len(words) > 2 else ""
        elif name and len(key) < _SHORTEST:
            problem = f"has a key of fewer than {_SHORTEST} characters; a name goes before its key"
        elif keys.setdefault(key.encode(), name) != name:
            problem = "has a key that has another name above"
        else:
            if found:
                limits.setdefault(name, {}).update({one[1] or one[3]: int(one[2] or one[4]) for one in found if one})
            continue
        raise FlagError(f"{at}: line {number} {problem}")
    return keys, limits
