"""Files that are written as a whole or not at all, beside one who removes what was left half written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import checked_file


@pytest.mark.skipif(checked_file.fcntl is None, reason="this system removes no file that somebody writes")
def test_a_file_that_is_removed_before_it_is_locked_is_created_again(tmp_path: Path, monkeypatch) -> None:
    lock, removed = checked_file.fcntl.flock, []

    def late(file: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            checked_file.remove_unfinished(tmp_path)
        lock(file, how)

    monkeypatch.setattr(checked_file.fcntl, "flock", late)
    checked_file.write(tmp_path / "file", {"a": "b"}, {"x": np.arange(3)})
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert len(removed) == 1
    header, arrays = checked_file.read(tmp_path / "file")
    assert header["a"] == "b"
    assert arrays["x"].tolist() == [0, 1, 2]
