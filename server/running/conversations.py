"""Keeps the chat page's conversations in one SQLite file."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from polarlm.engine import EngineError
from polarlm.engine.config import format_bytes
from polarlm.server.running.sessions import private_folder, unusable

FILE = "conversations.sqlite3"
_BUSY_SECONDS = 10.0  # for which another server with the same folder may write
_MOST_BYTES = 4 << 20  # size of an answer to `since`, beyond which only the current change is completed

_TABLES = """
CREATE TABLE IF NOT EXISTS conversations (id TEXT PRIMARY KEY, revision INTEGER NOT NULL, head TEXT);
CREATE TABLE IF NOT EXISTS messages (
    conversation TEXT NOT NULL, id TEXT NOT NULL, revision INTEGER NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (conversation, id)
);
CREATE INDEX IF NOT EXISTS changed_conversations ON conversations (revision);
CREATE INDEX IF NOT EXISTS changed_messages ON messages (revision);
"""


Changes = dict[str, dict[str, Any]]
"""What is new of conversations, by id: {"head", "messages": {ID: a message}}, without a head that is the same. A
deleted one has the head None."""


class ConversationStore:
    """Conversations by id, in a file in `folder`. Every change has a revision, a number that grows over all of them.

    Threads and servers may use it at the same time. Its methods raise EngineError if the disk or the file is full, or
    the file is damaged. What is deleted makes room in the file.
    """

    def __init__(self, folder: str, most: int) -> None:
        """most: bytes that the file may have; one that has more already does not grow. Raises EngineError."""
        self._lock, self._most = threading.Lock(), most
        path = private_folder("--conversations", folder)
        try:
            os.close(os.open(path / FILE, os.O_CREAT | os.O_RDWR, 0o600))  # for its owner alone
            self._file = sqlite3.connect(
                path / FILE, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.executescript(_TABLES)
            (page,) = self._file.execute("PRAGMA page_size").fetchone()
            self._file.execute(f"PRAGMA max_page_count = {max(1, most // page)}")
        except (OSError, sqlite3.Error) as error:
            raise unusable("--conversations", folder, error) from None

    def close(self) -> None:
        self._file.close()

    def changes_since(self, revision: int) -> tuple[Changes, int, bool]:
        """(what changed after a revision, by conversation; the revision that this leads to; whether there is more)."""
        with self._lock, self._storage_errors():
            rows = self._file.execute(
                "SELECT revision, id, NULL, head FROM conversations WHERE revision > ? UNION ALL "
                "SELECT revision, conversation, id, body FROM messages WHERE revision > ? ORDER BY 1",
                (revision, revision),
            )
            changes: Changes = {}
            size = 0
            for row_revision, conversation, message, text in rows:
                if size > _MOST_BYTES and row_revision != revision:
                    return changes, revision, True
                change = changes.setdefault(conversation, {"messages": {}})
                value = None if text is None else json.loads(text)
                if message is None:
                    change["head"] = value
                else:
                    change["messages"][message] = value
                size += len(text or "")
                revision = row_revision
            return changes, revision, False

    def write(self, conversation: str, base: int, head: str, messages: Mapping[str, str]) -> int | None:
        """Change a conversation, and return the revision; None, and no change, if it has changed after `base`."""
        with self._lock, self._storage_errors(), _transaction(self._file):
            row = self._file.execute("SELECT revision FROM conversations WHERE id = ?", (conversation,)).fetchone()
            if row is not None and row[0] > base:
                return None
            revision = self._next()
            self._file.execute("INSERT OR REPLACE INTO conversations VALUES (?, ?, ?)", (conversation, revision, head))
            self._file.executemany(
                "INSERT OR REPLACE INTO messages VALUES (?, ?, ?, ?)",
                [(conversation, message, revision, body) for message, body in messages.items()],
            )
            return revision

    def remove(self, conversation: str) -> int:
        """Delete a conversation; that it was deleted is kept, so that others hear of it. Returns the revision."""
        with self._lock, self._storage_errors(), _transaction(self._file):
            revision = self._next()
            self._file.execute("DELETE FROM messages WHERE conversation = ?", (conversation,))
            self._file.execute("INSERT OR REPLACE INTO conversations VALUES (?, ?, NULL)", (conversation, revision))
            return revision

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            full = f"; --max-conversations-size allows {format_bytes(self._most)}: delete some" * ("full" in str(error))
            raise EngineError(f"conversations cannot be kept or read now: {error}{full}", "storage") from None

    def _next(self) -> int:
        # Every change writes its conversation's row, so that no message has a later revision.
        return 1 + int(self._file.execute("SELECT coalesce(max(revision), 0) FROM conversations").fetchone()[0])


@contextmanager
def _transaction(file: sqlite3.Connection) -> Iterator[None]:
    """A transaction in which no other server writes between its reads and its writes; an error undoes all of it."""
    file.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if file.in_transaction:  # SQLite has undone it already where there was no room
            file.execute("ROLLBACK")
        raise
    file.execute("COMMIT")
