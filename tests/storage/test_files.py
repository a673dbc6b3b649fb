"""Files that are written as a whole or not at all, beside one who removes what was left half written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polarlm.engine.storage import files


@pytest.mark.skipif(files.fcntl is None, reason="this system removes no file that somebody writes")
def test_a_file_that_is_removed_before_it_is_locked_is_created_again(tmp_path: Path, monkeypatch) -> None:
    lock, removed = files.fcntl.flock, []

    def late(file: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            files.remove_unfinished(tmp_path)
        lock(file, how)

    monkeypatch.setattr(files.fcntl, "flock", late)
    files.write(tmp_path / "file", [b"a", memoryview(b"bc")])
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert len(removed) == 1
    assert (tmp_path / "file").read_bytes() == b"abc"


@pytest.mark.skipif(files.fcntl is None, reason="this system has no locks")
def test_a_file_is_not_taken_for_unfinished_before_it_has_its_name(tmp_path: Path, monkeypatch) -> None:
    replace = os.replace

    def replace_meanwhile(name: str, path: Path) -> None:
        files.remove_unfinished(tmp_path)  # as another process may
        replace(name, path)

    monkeypatch.setattr(os, "replace", replace_meanwhile)
    files.write(tmp_path / "file", [b"content"])
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"content")]


def test_only_own_files_with_temporary_names_are_removed(tmp_path: Path) -> None:
    """A server may be given any folder for its sessions."""
    folder = tmp_path / "folder"
    (folder / ".unfinished-folder12").mkdir(parents=True)
    (folder / ".unfinished-novel.txt").write_text("of the user")
    os.mkfifo(folder / ".unfinished-pipe1234")
    (tmp_path / "target").write_text("of the user")
    (folder / ".unfinished-link1234").symlink_to(tmp_path / "target")
    before = sorted(folder.iterdir())
    (folder / ".unfinished-ab12_xyz").write_text("left by a killed process")
    files.remove_unfinished(folder)
    assert sorted(folder.iterdir()) == before


def test_unfinished_files_of_other_users_stay(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give files away")
    theirs = tmp_path / ".unfinished-ab12_xyz"
    theirs.write_text("")
    os.chown(theirs, 1, -1)
    files.remove_unfinished(tmp_path)
    assert theirs.exists()
