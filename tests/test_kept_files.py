"""What tests keep between runs is removed when it was not used for long, and where it is too much."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.compiled import kept
from tests.kept_files import forget, used

DAY = 24 * 3600


def entry(folder: Path, name: str, days: float, size: int = 10) -> Path:
    """A file of `size` bytes that was used so many days ago; in a folder if the name has one, which is the entry."""
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(bytes(size))
    whole = folder / Path(name).parts[0]
    os.utime(whole, (time.time() - days * DAY,) * 2)
    return whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_not_used_for_two_weeks_is_removed(tmp_path: Path) -> None:
    for name, days in (("new", 0), ("recent", 13.9), ("old", 14.1), ("headers/device.h.gch", 15), ("again", 20)):
        found = entry(tmp_path, name, days)
    used(found)
    forget(tmp_path)
    assert names(tmp_path) == ["again", "new", "recent"]


def test_beyond_a_size_the_least_recently_used_are_removed(tmp_path: Path) -> None:
    for days in range(5):
        entry(tmp_path, f"{days}/file", days, size=100)
    forget(tmp_path, most=320)
    assert names(tmp_path) == ["0", "1", "2"]


def test_what_is_read_counts_as_used(tmp_path: Path) -> None:
    made = [kept(lambda: b"made", "a text", folder=tmp_path)]
    (file,) = tmp_path.iterdir()
    os.utime(file, (0, 0))
    made.append(kept(lambda: b"other", "a text", folder=tmp_path))
    forget(tmp_path)
    assert (made, names(tmp_path)) == ([b"made", b"made"], [file.name])


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    forget(tmp_path / "none")
