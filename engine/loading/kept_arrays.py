"""Arrays that are computed once for a model and kept in the user's cache folder, in a file that is named by a key."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from polarlm.engine.storage import files, objects
from polarlm.engine.storage.objects import DamagedObject
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE, cache_folder

_LIMIT_BYTES = 1 << 30  # of all files of a kind; the most recently used ones stay


def digest_key(*parts: object) -> str:
    """Return a digest of these values, by their `repr`."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=objects.NAME_BYTES).hexdigest()


def read(kind: str, key: str) -> dict[str, np.ndarray] | None:
    """Return the arrays of this kind and key by their names, float32, read-only; None if there are none, or if their
    file is damaged."""
    try:
        file = _file(kind, key)
        with file.open("rb") as opened:
            stored = objects.read(opened, bytes.fromhex(key))
    except (LoadError, OSError, DamagedObject):
        return None
    with suppress(OSError):
        file.touch()  # marks it as recently used
    stored.payload.flags.writeable = False
    return objects.split_arrays(stored)


def write(kind: str, key: str, arrays: Mapping[str, np.ndarray], say: Callable[[str], None]) -> None:
    """Keep arrays (float32), or say why that is not possible."""
    try:
        file = _file(kind, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write(file, objects.join_arrays({"kind": kind}, arrays).pack(bytes.fromhex(key)))
        names = re.compile(f"{kind}-[0-9a-f]{{32}}")
        files.remove_oldest(file.parent, names, _LIMIT_BYTES - file.stat().st_size, file)
    except LoadError as error:
        say(f"What was computed for fitting the KV cache cannot be kept for the next time. {error}")
    except OSError as error:
        say(
            f"What was computed for fitting the KV cache cannot be kept in {file.parent} "
            f"({error.strerror or error}), and is computed again at the next start: "
            f"set {CACHE_VARIABLE} to a folder that can be written."
        )


def _file(kind: str, key: str) -> Path:
    """Return the file for arrays of this kind and key. Raises LoadError if the user has no cache folder."""
    return cache_folder() / f"{kind}-{key}"
