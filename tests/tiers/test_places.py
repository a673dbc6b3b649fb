"""Places that keep objects: they stay below their size, forget what was not used, and survive each other."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from polarlm.engine.tiers.objects import DamagedObject, unpack
from polarlm.engine.tiers.places import Folder, Memory, Place
from tests.small_disk import small_disk
from tests.tiers import killed_writer
from tests.tiers.killed_writer import name

ROOT = Path(__file__).resolve().parents[2]


def put(place: Place, number: int, size: int = 100) -> None:
    place.write(name(number), b"head", memoryview(bytes([number % 256]) * (size - 4)))


@pytest.fixture(params=["ram", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Memory(1000) if request.param == "ram" else Folder(tmp_path / "folder", 1000)


def test_what_was_written_is_read(place: Place) -> None:
    assert place.read(name(1)) is None
    put(place, 1)
    assert bytes(place.read(name(1)) or b"") == b"head" + bytes([1]) * 96
    assert place.has(name(1))
    place.remove(name(1))
    place.remove(name(1))
    assert not place.has(name(1))


def test_a_full_place_forgets_what_was_used_longest_ago(place: Place) -> None:
    for number in range(10):
        put(place, number)
        time.sleep(0.002)  # times of modification differ
    place.used([name(0), name(1)])
    put(place, 10)
    kept = [number for number in range(11) if place.has(name(number))]
    assert 10 in kept
    assert {0, 1} <= set(kept)
    assert 2 not in kept
    assert len(kept) <= 10


def test_of_the_names_that_were_used_the_first_stays_longest(place: Place) -> None:
    for number in range(9):
        put(place, number)
    place.used([name(number) for number in range(9)])
    for number in range(20, 26):
        put(place, number)
    kept = [number for number in range(9) if place.has(name(number))]
    assert kept == list(range(len(kept)))
    assert 0 < len(kept) < 9


def test_an_object_larger_than_the_place_is_not_kept(place: Place) -> None:
    put(place, 1)
    put(place, 2, size=1001)
    assert not place.has(name(2))


def test_files_are_their_owners_only(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "a" / "b", 1000)
    put(folder, 1)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    (file,) = (tmp_path / "a" / "b").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_other_files_of_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_bytes(b"x" * 5000)
    folder = Folder(tmp_path, 300)
    for number in range(9):
        put(folder, number)
    assert (tmp_path / "letter.txt").exists()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 5300


def test_unfinished_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-old").write_bytes(b"x")
    (tmp_path / ".unfinished-new").write_bytes(b"x")
    os.utime(tmp_path / ".unfinished-old", (1, 1))
    put(Folder(tmp_path, 1000), 1)
    assert {file.name for file in tmp_path.iterdir()} == {".unfinished-new", name(1).hex()}


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError):
        Folder(tmp_path / "file" / "folder", 1000)


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    with small_disk(tmp_path, 1 << 16):
        folder = Folder(tmp_path, 1 << 20)
        put(folder, 1)
        with pytest.raises(OSError) as raised:
            put(folder, 2, size=1 << 17)
        assert raised.value.errno == errno.ENOSPC
        assert [file.name for file in tmp_path.iterdir()] == [name(1).hex()]


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Each writes over the limit while the other does; what is read is whole, and the size is kept to."""
    here, there = Folder(tmp_path, 1000), Folder(tmp_path, 1000)
    for number in range(60):
        put((here, there)[number % 2], number)
        for place in (here, there):
            found = place.read(name(number))
            assert found is None or len(found) == 100
    put(here, 99)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1200
    assert there.has(name(99))


_WRITER = """
import sys
from pathlib import Path
import numpy as np
from polarlm.engine.tiers.objects import pack, IDS
from polarlm.engine.tiers.places import Folder
folder = Folder(Path(sys.argv[1]), 3 << 20)
print("ready", flush=True)
for number in range(int(sys.argv[2]), 10**6):
    name = (number % 40).to_bytes(16, "big")
    folder.write(name, *pack(name, IDS, np.full(1 << 16, number % 7, np.uint8), tokens=4))
"""


def test_a_killed_process_leaves_whole_objects_only(tmp_path: Path) -> None:
    seen = 0
    for attempt in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(attempt)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.003 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        reader = Folder(tmp_path, 3 << 20)
        for number in range(40):
            content = reader.read(name(number))
            if content is not None:
                found = unpack(name(number), content)
                assert len(set(found.payload.tolist())) == 1
                seen += 1
    assert seen


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_killed_at_any_line_of_writing_leaves_whole_objects_only(tmp_path: Path) -> None:
    """Of opening a folder, writing, replacing, noting use, and making room: a few hundred places to die at."""
    command = [sys.executable, "-m", "tests.tiers.killed_writer", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    assert points > 200
    for point in range(points):
        reader = Folder(tmp_path / str(point), killed_writer.SIZE)
        for number in range(killed_writer.OBJECTS):
            content = reader.read(name(number))
            if content is not None:
                assert len(set(unpack(name(number), content).payload.tolist())) == 1
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.name.startswith(".unfinished-") for file in files)  # they are removed an hour later
    assert all(not file.stat().st_mode & 0o077 for file in files)


def test_a_file_cut_short_by_a_power_failure_is_damaged(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1000)
    put(folder, 1)
    os.truncate(tmp_path / name(1).hex(), 50)
    content = folder.read(name(1))
    assert content is not None
    with pytest.raises(DamagedObject):
        unpack(name(1), content)


class Against(RuleBasedStateMachine):
    """A memory against a list of (name, size), the ones used last at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Memory(500)
        self.expected: dict[int, int] = {}

    @rule(number=st.integers(0, 9), size=st.integers(4, 600))
    def write(self, number: int, size: int) -> None:
        put(self.place, number, size)
        if size > 500:
            return
        self.expected.pop(number, None)
        self.expected[number] = size
        while sum(self.expected.values()) > 500:
            del self.expected[next(iter(self.expected))]

    @rule(numbers=st.lists(st.integers(0, 9), unique=True))
    def use(self, numbers: list[int]) -> None:
        self.place.used([name(number) for number in numbers])
        for number in reversed(numbers):
            if number in self.expected:
                self.expected[number] = self.expected.pop(number)

    @rule(number=st.integers(0, 9))
    def remove(self, number: int) -> None:
        self.place.remove(name(number))
        self.expected.pop(number, None)

    @invariant()
    def both_have_the_same(self) -> None:
        for number in range(10):
            content = self.place.read(name(number))
            assert (None if content is None else len(content)) == self.expected.get(number)


TestAgainst = Against.TestCase
