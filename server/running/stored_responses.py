"""Keeps the items of responses in one SQLite file, so that a request can go on from a response by its id."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE = "responses.sqlite3"
_MOST_BYTES = 64 << 20  # of all items; the oldest responses leave first
_BUSY_SECONDS = 10.0  # for which another server with the same folder may write
_LOG = logging.getLogger(__name__)
_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, key TEXT NOT NULL, previous TEXT, items TEXT NOT NULL
);
"""


class StoredResponses:
    """The items of responses: what their requests added, and what answered them. Thread-safe, and safe beside other
    servers. With a full disk or a damaged file it keeps none, or in memory alone, and the log says so."""

    def __init__(self, folder: Path) -> None:
        self._lock, self._path = threading.Lock(), folder / FILE
        self._file: sqlite3.Connection | None = None  # until the first response

    def items(self, id: str, key: str) -> list[Any] | None:
        """All items up to the end of a response of this key; None if not all that it goes on from are kept."""
        parts: list[list[Any]] = []
        at: str | None = id
        with self._storage_errors() as file:
            while at is not None:
                query = "SELECT previous, items FROM responses WHERE id = ? AND key = ?"
                row = file.execute(query, (at, key)).fetchone()
                if row is None:
                    return None
                at = row[0]
                parts.append(json.loads(row[1]))
            return [item for part in reversed(parts) for item in part]
        return None

    def keep(self, id: str, key: str, previous: str | None, items: Sequence[Any]) -> None:
        """Keep what a response and its request add to the items of the previous one."""
        with self._storage_errors() as file:
            file.execute("INSERT INTO responses VALUES (NULL, ?, ?, ?, ?)", (id, key, previous, json.dumps(items)))
            (total,) = file.execute("SELECT sum(length(items)) FROM responses").fetchone()
            for number, size in file.execute("SELECT number, length(items) FROM responses ORDER BY number").fetchall():
                if total <= _MOST_BYTES:
                    break
                file.execute("DELETE FROM responses WHERE number = ?", (number,))
                total -= size

    @contextmanager
    def _storage_errors(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                yield self._opened()
        except sqlite3.Error as error:
            _LOG.warning("responses cannot be kept or read now, for previous_response_id: %s", error)

    def _opened(self) -> sqlite3.Connection:
        if self._file is None:
            try:
                self._file = _open(self._path)
            except (OSError, sqlite3.Error) as error:
                _LOG.warning("responses are kept in memory alone, for previous_response_id: %s", error)
                self._file = sqlite3.connect(":memory:", check_same_thread=False)
                self._file.execute(_TABLE)
        return self._file


def _open(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # for its owner alone
    file = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    file.execute("PRAGMA journal_mode = WAL")
    file.execute(_TABLE)
    return file
