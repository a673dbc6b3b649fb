"""Places that keep objects: they stay below their size, forget what was not used, and survive each other."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from polarlm.engine.storage.objects import unpack
from polarlm.engine.storage.tiers.tier_store import FolderTier, MemoryTier, TierStore
from tests.small_disk import small_disk
from tests.tiers import killed_writer
from tests.tiers.killed_writer import name

ROOT = Path(__file__).resolve().parents[2]


def put(place: TierStore, number: int, size: int = 100) -> None:
    place.write(name(number), b"head", memoryview(bytes([number % 256]) * (size - 4)))


@pytest.fixture
def place(tmp_path: Path) -> TierStore:
    """On a disk; `Against` has memory."""
    return FolderTier(tmp_path / "folder", 1000 + 16)  # its counts take 16 bytes


def test_a_full_place_forgets_what_was_used_longest_ago(place: TierStore) -> None:
    for number in range(10):
        put(place, number)
        time.sleep(0.02)  # times of modification differ, also where the system's clock has ticks of 10 ms
    place.touch([name(0), name(1)])
    put(place, 10)
    kept = [number for number in range(11) if place.has(name(number))]
    assert 10 in kept
    assert {0, 1} <= set(kept)
    assert 2 not in kept
    assert len(kept) <= 10


def test_of_the_names_that_were_used_the_first_stays_longest(place: TierStore) -> None:
    for number in range(9):
        put(place, number)
    place.touch([name(number) for number in range(9)])
    for number in range(20, 26):
        put(place, number)
    kept = [number for number in range(9) if place.has(name(number))]
    assert kept == list(range(len(kept)))
    assert 0 < len(kept) < 9


def test_an_object_larger_than_the_place_is_not_kept(place: TierStore) -> None:
    put(place, 1)
    put(place, 2, size=1001)
    assert not place.has(name(2))


def objects_in(folder: Path) -> list[str]:
    """The names of its files, without the file of the counts."""
    return sorted({file.name for file in folder.iterdir()} - {".held"})


def test_files_are_their_owners_only(tmp_path: Path) -> None:
    folder = FolderTier(tmp_path / "a" / "b", 1000)
    put(folder, 1)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    files = list((tmp_path / "a" / "b").iterdir())
    assert len(files) == 2  # with the file of the counts
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_unfinished_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-ab12_xyz").write_bytes(b"x" * 950)
    (tmp_path / ".unfinished-symphony.txt").write_bytes(b"x" * 950)  # a user's own
    put(FolderTier(tmp_path, 1000), 1)
    assert objects_in(tmp_path) == [".unfinished-symphony.txt", name(1).hex()]


def test_folders_links_and_files_of_others_stay_and_do_not_count(tmp_path: Path) -> None:
    (tmp_path / ("a" * 32)).mkdir()
    (tmp_path / ("b" * 32)).symlink_to(tmp_path / "elsewhere")
    (tmp_path / ("c" * 32)).write_bytes(b"x" * 5000)
    if os.getuid() == 0:  # only root can give files away
        os.chown(tmp_path / ("c" * 32), 1, -1)
    else:
        (tmp_path / ("c" * 32)).unlink()
    before = set(tmp_path.iterdir())
    for entry in before:
        os.utime(entry, (1, 1), follow_symlinks=False)
    folder = FolderTier(tmp_path, 500)
    for number in range(9):
        put(folder, number)
    assert set(tmp_path.iterdir()) > before
    assert folder.has(name(8))


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    """As users forget everything while the engine runs; it has the owner's rights alone, as before."""
    folder = FolderTier(tmp_path / "a" / "b", 1000)
    put(folder, 1)
    for gone in (tmp_path / "a" / "b", tmp_path / "a"):
        shutil.rmtree(gone)
        assert not folder.has(name(1))
        assert folder.read(name(1)) is None
        put(folder, 1)
        assert folder.has(name(1))
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    with small_disk(tmp_path, 1 << 16):
        folder = FolderTier(tmp_path, 1 << 20)
        put(folder, 1)
        with pytest.raises(OSError) as raised:
            put(folder, 2, size=1 << 17)
        assert raised.value.errno == errno.ENOSPC
        assert objects_in(tmp_path) == [name(1).hex()]
        assert folder.contents == (100, 1)


def test_two_places_share_a_folder(tmp_path: Path) -> None:
    """Each writes while the other does; what is read is whole, and the size limits both together."""
    here, there = FolderTier(tmp_path, 1000), FolderTier(tmp_path, 1000)
    for number in range(60):
        put((here, there)[number % 2], number)
        for place in (here, there):
            content = place.read(name(number))
            assert content is not None
            assert len(content) == 100
        assert 0 < bytes_in(tmp_path) <= 1000


def bytes_in(folder: Path) -> int:
    """The bytes of all files, unfinished ones included."""
    held = 0
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            held += entry.stat().st_size
    return held


# Writes objects in several threads, half of them over others, and prints the most bytes that the folder has held
# whenever an object lay there under its temporary name: this is when it holds most.
_MANY_WRITERS = """
import os, sys, threading
from pathlib import Path
from polarlm.engine.storage.tiers.tier_store import FolderTier
from tests.tiers.test_tier_store import bytes_in, put
path, size, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
held, replace = [], os.replace
def measured(*names):
    held.append(bytes_in(path))
    replace(*names)
os.replace = measured
shared = FolderTier(path, size)
def write(thread):
    place = shared if thread % 2 else FolderTier(path, size)
    for number in range(40):
        put(place, first + (100 * thread + number) % 150, 400 + 7 * number)
threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(max(held))
"""


@pytest.mark.slow
def test_the_limit_holds_at_every_moment_with_many_writers(tmp_path: Path) -> None:
    """Three processes with four threads each: what is being written counts, too."""
    size = 6000
    command = [sys.executable, "-c", _MANY_WRITERS, str(tmp_path), str(size)]
    writers = [
        subprocess.Popen([*command, str(first)], cwd=ROOT, stdout=subprocess.PIPE, text=True) for first in (0, 0, 50)
    ]
    most = [int(writer.communicate()[0]) for writer in writers]
    assert size // 2 < max(most) <= size
    assert bytes_in(tmp_path) <= size


def test_what_a_place_holds_is_counted(place: TierStore) -> None:
    assert place.contents == (0, 0)
    for number in range(4):
        put(place, number)
    put(place, 1, size=60)
    place.remove(name(2))
    place.remove(name(2))
    assert place.contents == (100 + 60 + 100, 3)


def test_files_that_others_put_there_or_removed_are_counted_when_a_place_is_opened(tmp_path: Path) -> None:
    put(FolderTier(tmp_path, 1000), 1)
    (tmp_path / name(2).hex()).write_bytes(b"x" * 700)
    folder = FolderTier(tmp_path, 1000)
    assert folder.contents == (100, 1)  # as the last writer left it
    put(folder, 3, size=250)
    assert bytes_in(tmp_path) <= 1000
    assert folder.has(name(3))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_killed_at_any_line_of_writing_leaves_whole_objects_only(tmp_path: Path) -> None:
    """It opens a folder, writes, replaces, notes use, and makes room: a few hundred places to die at.

    The next writer waits for no lock, removes what was not finished, and keeps to the limit.
    """
    command = [sys.executable, "-m", "tests.tiers.killed_writer", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    assert points > 200
    unfinished = 0
    for point in range(points):
        folder = tmp_path / str(point)
        unfinished += any(file.name.startswith(".unfinished-") for file in folder.iterdir()) if folder.exists() else 0
        reader = FolderTier(folder, killed_writer.SIZE)
        for number in range(killed_writer.OBJECTS):
            content = reader.read(name(number))
            if content is not None:
                assert len(set(unpack(name(number), content).payload.tolist())) == 1
        put(reader, 99)
        assert reader.has(name(99))
        assert reader.contents == (bytes_in(folder) - 16, len(objects_in(folder)))
        assert bytes_in(folder) <= killed_writer.SIZE
    assert unfinished
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [file for file in files if file.name.startswith(".unfinished-")]
    assert all(not file.stat().st_mode & 0o077 for file in files)


class Against(RuleBasedStateMachine):
    """A memory against a list of (name, size), the ones used last at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.place = MemoryTier(500)
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
        self.place.touch([name(number) for number in numbers])
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
