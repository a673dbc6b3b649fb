"""The file of conversations: changes have revisions, and none overwrites one that its writer has not seen."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from polarlm.engine import EngineError
from polarlm.server.running.conversations import FILE, Changes, ConversationStore

A, B = "a" * 16, "b" * 16
GIB = 1 << 30


def test_what_changed_is_told_once_and_a_stale_change_is_refused(tmp_path: Path) -> None:
    one, other = ConversationStore(str(tmp_path / "new"), GIB), ConversationStore(str(tmp_path / "new"), GIB)
    first = one.write(A, 0, "{}", {"1": '"one"'})
    assert first is not None
    assert other.changes_since(0) == ({A: {"head": {}, "messages": {"1": "one"}}}, first, False)
    second = other.write(A, first, '{"title":"x"}', {"2": '"two"'})
    assert second is not None
    assert one.write(A, first, "{}", {"1": '"lost"'}) is None
    assert one.changes_since(first) == ({A: {"head": {"title": "x"}, "messages": {"2": "two"}}}, second, False)
    assert one.write(B, first, "{}", {}) == second + 1  # another conversation has not changed
    assert other.changes_since(second + 1) == ({}, second + 1, False)
    assert stat.S_IMODE((tmp_path / "new" / FILE).stat().st_mode) == 0o600


def test_a_deletion_is_told_and_only_who_has_seen_it_brings_the_conversation_back(tmp_path: Path) -> None:
    store = ConversationStore(str(tmp_path), GIB)
    first = store.write(A, 0, "{}", {"1": '"one"'})
    assert first is not None
    gone = store.remove(A)
    assert store.changes_since(first) == ({A: {"head": None, "messages": {}}}, gone, False)
    assert store.write(A, first, "{}", {}) is None
    assert store.write(A, gone, "{}", {"2": '"two"'}) == gone + 1
    assert store.changes_since(0) == ({A: {"head": {}, "messages": {"2": "two"}}}, gone + 1, False)


def test_much_is_told_in_parts_that_end_between_changes(tmp_path: Path) -> None:
    store = ConversationStore(str(tmp_path), GIB)
    for place in range(8):
        store.write(f"{place:016}", 0, "{}", {name: json.dumps("x" * 500_000) for name in ("1", "2")})
    changes, revision, parts, more = Changes(), 0, 0, True
    while more:
        part, revision, more = store.changes_since(revision)
        assert all(len(change["messages"]) == 2 and "head" in change for change in part.values())
        assert not changes.keys() & part.keys()
        changes |= part
        parts += 1
    assert (len(changes), parts) == (8, 2)


def test_a_folder_that_cannot_be_used_and_a_damaged_file_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"--conversations .*: File exists; name a folder"):
        ConversationStore(str(tmp_path / "file"), GIB)
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(EngineError, match=r"--conversations .*not a database; name"):
        ConversationStore(str(tmp_path), GIB)


def test_a_file_that_is_full_takes_what_fits_into_what_was_deleted(tmp_path: Path) -> None:
    store, body = ConversationStore(str(tmp_path), 300_000), json.dumps("x" * 100_000)
    first = store.write(A, 0, "{}", {"1": body, "2": body})
    with pytest.raises(EngineError, match=r"--max-conversations-size allows 293\.0 KiB: delete some") as caught:
        store.write(B, 0, "{}", {"1": body, "2": body})
    assert caught.value.code == "storage"
    messages = dict.fromkeys(("1", "2"), json.loads(body))
    assert store.changes_since(0)[0] == {A: {"head": {}, "messages": messages}}  # nothing of it was kept
    assert first is not None
    store.remove(A)
    assert store.write(B, 0, "{}", {"1": body, "2": body})
    store.close()
    assert (tmp_path / FILE).stat().st_size <= 300_000
    small = ConversationStore(str(tmp_path), 1)
    small.remove(B)
    assert small.write(B, GIB, "{}", {"1": body})
