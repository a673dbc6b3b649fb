"""Keeps the conversations of terminals in the user's files, as they were after their last answer; `/load` reads
them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from polarlm.engine.storage import files
from polarlm.model_loaders.user_dirs import last_used, state_folder

_MOST = 8  # conversations, since other terminals have theirs


class KeptTalks:
    """The kept messages of this conversation, of earlier ones, and of those at other terminals. Their part of the cache
    is not kept: the next prompt is computed."""

    def __init__(self) -> None:
        folder = state_folder()
        self._folder = None if folder is None else folder / "talks"
        self._own_file: Path | None = None  # the file of this conversation, once it is kept

    @property
    def has_own(self) -> bool:
        """Whether this conversation is kept."""
        return self._own_file is not None

    def keep(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Writes the conversation, in place of what was kept of it before. Raises OSError."""
        if self._folder is None:
            return
        if self._own_file is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in self._files()[_MOST - 1 :]:
                old.unlink(missing_ok=True)
            number, name = tempfile.mkstemp(suffix=".json", dir=self._folder)
            os.close(number)
            self._own_file = Path(name)
        # Without ids, which another model does not have.
        texts = [{name: value for name, value in message.items() if name != "token_ids"} for message in messages]
        files.write(self._own_file, [json.dumps({"messages": texts}).encode()], is_durable=False)

    def begin(self) -> None:
        """What is kept from now on is another conversation."""
        self._own_file = None

    def forget(self) -> None:
        """Removes what is kept of this conversation."""
        with suppress(OSError):
            if self._own_file is not None:
                self._own_file.unlink(missing_ok=True)
        self._own_file = None

    def last(self, start_time: int) -> Any:
        """What was kept last of another conversation, as JSON; None if that was before `start_time`, in nanoseconds
        since the epoch."""
        for file in self._files():
            with suppress(OSError, ValueError):
                if file != self._own_file and last_used(file.stat()) > start_time:
                    return json.loads(file.read_bytes())
        return None

    def _files(self) -> list[Path]:
        """The newest first."""
        files = []
        with suppress(OSError):
            for file in () if self._folder is None else self._folder.glob("*.json"):
                files.append((last_used(file.stat()), file))
        return [file for _, file in sorted(files, reverse=True)]
