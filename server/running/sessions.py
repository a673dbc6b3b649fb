"""Named sessions: files in one folder that clients may save and load; no name can lead to a file elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarlm.engine import EngineError, PromptOptions
from polarlm.engine.config import format_bytes
from polarlm.engine.storage import files
from polarlm.engine.storage.sessions import is_session
from polarlm.server.reading.fields import requested_fields
from polarlm.server.reading.prompts import ModelInfo, read_options
from polarlm.server.reading.values import BadRequest
from polarlm.server.running.refusals import unknown_session

_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SUFFIX = ".session"


@dataclass(frozen=True)
class SavedSession:
    name: str
    bytes: int
    seconds: int  # since 1970, when it was saved


@dataclass(frozen=True)
class SessionFile(os.PathLike[str]):
    """The path of a session's file. Messages for clients show only its name."""

    folder: Path
    name: str

    def __fspath__(self) -> str:
        return str(self.folder / (self.name + _SUFFIX))

    def __str__(self) -> str:
        return self.name


def unusable(flag: str, folder: str, error: Exception) -> EngineError:
    reason = getattr(error, "strerror", None) or str(error).rstrip(".")
    return EngineError(f"{flag} {folder}: {reason}; name a folder that is there or can be made", "storage")


def private_folder(flag: str, root: str) -> Path:
    """Return the folder of a flag, which is made if need be, for its owner alone. Raises EngineError."""
    try:
        folder = Path(root).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ without a home folder
        raise unusable(flag, root, error) from None
    files.remove_unfinished(folder)
    return folder


class SessionFolder:
    """The sessions of a server. Its methods block on the disk."""

    def __init__(self, folder: str, most: int) -> None:
        """most: bytes of all sessions. Raises EngineError."""
        self._folder, self._most = private_folder("--sessions", folder), most

    def file(self, name: str) -> SessionFile:
        return SessionFile(self._folder, name)

    def all(self) -> list[SavedSession]:
        sessions = []
        for path in sorted(self._folder.glob("*" + _SUFFIX)):
            name = path.name.removesuffix(_SUFFIX)
            try:
                status = path.stat()
            except OSError:  # removed meanwhile, or a broken link
                continue
            if _NAME.fullmatch(name) and is_session(path):
                sessions.append(SavedSession(name, status.st_size, int(status.st_mtime)))
        return sessions

    def limit(self, name: str) -> Callable[[int, int], None]:
        """A `progress` function for saving a session in place of its old one. Raises EngineError if it is too large."""
        others = sum(session.bytes for session in self.all() if session.name != name)

        def check(_done: int, size: int) -> None:
            if others + size > self._most:
                raise EngineError(
                    f"The session {name} needs {format_bytes(size)}, and the others take {format_bytes(others)} of the "
                    f"{format_bytes(self._most)} that --max-sessions-size allows: remove some",
                    "storage",
                )

        return check

    def remove(self, name: str) -> None:
        """Remove a session. Raises Refusal if there is none, and EngineError if it cannot be, and for other files."""
        file = self.file(name)
        try:
            if os.path.lexists(file) and not is_session(file):
                raise EngineError(
                    f"The session {name} cannot be removed: its file is none of a session, or damaged; it can be "
                    "removed from the folder of the sessions",
                    "storage",
                )
            os.unlink(file)
        except FileNotFoundError:
            raise unknown_session(name) from None
        except OSError as error:
            raise EngineError(f"The session {name} cannot be removed: {error.strerror}", "storage") from None


def read_options_to_save(body: Mapping[str, Any], info: ModelInfo) -> PromptOptions:
    """The options of a prompt to save. Raises BadRequest. What is saved tells which part of a
    prompt was cached: with --hide-cached-tokens a client learns it only of prompts with a salt that it knows."""
    options = read_options(requested_fields(body), info)
    if not info.tells_cached and not options.cache_salt:
        raise BadRequest("cache_salt", "cache_salt is missing: this server saves sessions of prompts with a salt alone")
    return options


def read_name(field: str, value: Any) -> str:
    """`value` as the name of a session. Raises BadRequest for other values, such as paths, and, on every system, for
    names that Windows keeps for devices: folders are copied and shared."""
    if isinstance(value, str) and files.is_device(value):
        raise BadRequest(field, f"{field} is {value!r}, which Windows keeps for a device; choose another name")
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        form = "1 to 100 letters, digits, '.', '_' or '-', beginning with a letter or a digit"
        raise BadRequest(field, f"{field} must be {form}")
    return value
