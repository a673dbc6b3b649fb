"""The files and batches of OpenAI's shape: records, which are JSON objects, and files of lines, apart for each key."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from polarlm.engine import EngineError
from polarlm.engine.config import format_bytes
from polarlm.engine.storage import files
from polarlm.server.running.sessions import private_folder

_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}(-output|-errors)?")
_LINES = ".jsonl"
_PIECE = 1 << 20  # bytes of an uploaded file that are copied at a time

Record = dict[str, Any]


class BatchFolder:
    """What an owner of a key has. Its methods block on the disk, and raise OSError."""

    def __init__(self, root: str, owner: str, most: int) -> None:
        """owner: the name of its folder in `root`. most: bytes that its files may have. Raises EngineError."""
        self._folder, self._most = private_folder("--batches", root, owner), most

    def lines(self, name: str) -> Path:
        """The file of lines with this id."""
        return self._folder / f"{name}{_LINES}"

    def record(self, name: str) -> Record | None:
        """The record with this id; None if there is none, it is damaged, or this is no id."""
        if _ID.fullmatch(name):
            with suppress(FileNotFoundError, ValueError):
                return dict(json.loads((self._folder / f"{name}.json").read_bytes()))
        return None

    def records(self, kind: str) -> list[Record]:
        """The records of a kind, "file-" or "batch_", the newest first."""
        names = sorted((path.stem for path in self._folder.glob(f"{kind}*.json")), reverse=True)
        return [record for record in map(self.record, names) if record is not None]

    def keep(self, record: Record) -> None:
        """Write a record, in place of any other with its id."""
        files.write(self._folder / f"{record['id']}.json", [json.dumps(record).encode()])

    def keep_lines(self, record: Record, content: BinaryIO) -> None:
        """Write a file of lines, of the bytes that its record says, and the record. Raises EngineError if there is no
        room for it."""
        self.check_room(record["bytes"])
        files.write(self.lines(record["id"]), iter(partial(content.read, _PIECE), b""))
        self.keep(record)

    def remove(self, name: str) -> None:
        """Remove a file's lines and record."""
        self.lines(name).unlink(missing_ok=True)
        (self._folder / f"{name}.json").unlink()

    def check_room(self, size: int) -> None:
        """Raises EngineError if there is no room for `size` more bytes of lines."""
        used = sum(path.stat().st_size for path in self._folder.glob(f"*{_LINES}"))
        if used + size > self._most:
            sentence = (
                f"files take {format_bytes(used)} of the {format_bytes(self._most)} that --max-batches-size allows"
            )
            raise EngineError(f"There is no room for {format_bytes(size)}: {sentence}; delete some", "storage")
