"""The user's folders; whether a file is the user's, when it was used, and on which code it depends."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from polarlm.model_loaders.errors import LoadError

CACHE_VARIABLE = "POLARLM_CACHE"
_CLOCK_ERROR = 300_000_000_000  # nanoseconds by which clocks of machines that share a folder may differ


def cache_folder() -> Path:
    """This program's cache folder, or the one that POLARLM_CACHE names; it may not exist yet.

    Raises LoadError if there is none.
    """
    folder_named = os.environ.get(CACHE_VARIABLE)
    try:
        return (Path(folder_named) if folder_named else _default()).expanduser()
    except RuntimeError as error:  # no home folder is known
        raise LoadError(f"There is no cache folder ({error}): set {CACHE_VARIABLE} to a folder.") from error


def _default() -> Path:
    try:
        from platformdirs import user_cache_path
    except ModuleNotFoundError as error:
        raise LoadError(
            f"The cache folder is not known without the Python package platformdirs: install it (pip install "
            f"platformdirs), or set {CACHE_VARIABLE} to a folder."
        ) from error
    return user_cache_path("polarlm")


def state_folder() -> Path | None:
    """The folder of the chat's private files, which need not exist yet; None for a user without a home folder."""
    import platformdirs

    try:
        folder = platformdirs.user_state_path("polarlm")
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None  # "~/…", from earlier versions of platformdirs


def belongs_to_user(status: os.stat_result) -> bool:
    """Whether a file or folder is this user's, so that this program may remove it. Always True on Windows, where the
    folders are the users' own."""
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def last_used(status: os.stat_result) -> int:
    """When a file was used, by its time of modification: nanoseconds since the epoch.

    A time in the future is from before the clock was set back. It counts as before all others, since such files would
    otherwise stay longest until the clock has caught up.
    """
    is_ahead = status.st_mtime_ns > time.time_ns() + _CLOCK_ERROR
    return status.st_mtime_ns - (1 << 64 if is_ahead else 0)


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
