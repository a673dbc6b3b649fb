"""Compiled kernels in the user's cache folder, and the thread that compiles them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine.errors import KernelError
from polarlm.engine.jit.compile import compiler
from polarlm.engine.jit.compile import library as module
from polarlm.engine.jit.compile import object_cache as cache_module
from polarlm.engine.jit.compile.compiler import compile_object
from polarlm.engine.jit.compile.library import Library
from polarlm.engine.jit.compile.object_cache import ObjectCache, object_cache
from polarlm.engine.jit.compile.target import levels
from polarlm.engine.jit.lang import I64, Emitter, Kernel, Level, Value
from polarlm.engine.storage import files as stored
from polarlm.model_loaders.errors import LoadError
from tests.compiled import end_of_compilation
from tests.jit.levels import Function, declared
from tests.jit.test_workers import PATIENCE, until
from tests.programs import ROOT

LEVEL = levels()[-1]
needs_users = pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner of this kind here")


def number_kernel(number: int) -> Kernel:
    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        e.store(e.constant(I64, number), args.out)

    return Kernel(f"test_{number}", emit, declared("out"))


def stored_by(address: int) -> int:
    out = np.zeros(1, np.int64)
    kernel = number_kernel(0)
    arguments = kernel.pack(kernel.arguments(out=out))
    Function(address)(arguments.ctypes.data, 0, 1, None)
    return int(out[0])


@pytest.fixture(autouse=True)
def _alone() -> None:
    """What these tests put in the compiler's place compiles nothing for libraries of earlier tests."""
    end_of_compilation()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache_module, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were compiled, and not read from the cache."""
    names: list[str] = []

    def watched(kernel: Kernel, level: object) -> bytes:
        names.append(kernel.name)
        return compile_object(kernel, LEVEL)

    monkeypatch.setattr(module, "compile_object", watched)
    return names


def loaded(number: int = 7) -> Library:
    """A new library that has loaded a kernel, and whose thread has ended."""
    library = Library(LEVEL, object_cache(LEVEL))
    assert stored_by(library.address(number_kernel(number))) == number
    end_of_compilation()
    return library


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_kernel_is_compiled_once_for_all_processes(folder: Path, compiled: list[str]) -> None:
    one, other = loaded(), loaded()
    assert compiled == ["test_7"]
    assert (one.compiled, other.compiled) == (1, 0), "the second reads what the first has compiled"
    assert one.compile_seconds > other.compile_seconds == 0
    loaded(8)
    assert compiled == ["test_7", "test_8"]


def test_the_process_waits_for_a_kernel_that_a_daemon_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads take over whether they are daemons, and LLVM must not run while the process exits."""
    found: list[bool] = []

    def compile_object_(kernel: Kernel, level: Level) -> bytes:
        found.append(threading.current_thread().daemon)
        return compile_object(kernel, level)

    monkeypatch.setattr(module, "compile_object", compile_object_)
    library = Library(levels()[0], None)
    asks = threading.Thread(target=library.expect, args=([number_kernel(3)],), daemon=True)
    asks.start()
    asks.join()
    library.wait([number_kernel(3)])
    end_of_compilation()
    assert found == [False]


def by_another_user(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give files away")
    os.chown(path, 1, -1)


def replaced(file: Path, make: Callable[[Path], None]) -> None:
    file.unlink()
    make(file)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda file: file.write_bytes(b""),
    "last byte": lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
    "checksum": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
}
OF_OTHERS: dict[str, Callable[[Path], Any]] = {
    "file that a group writes": lambda file: file.chmod(0o760),
    "folder that a group writes": lambda file: file.parent.chmod(0o760),
    "folder that all write": lambda file: file.parent.chmod(0o706),
    "file of another user": by_another_user,
    "folder of another user": lambda file: by_another_user(file.parent),
    "pipe": lambda file: replaced(file, os.mkfifo),
    "folder": lambda file: replaced(file, os.mkdir),
    "link": lambda file: os.symlink(file.rename(file.with_name("target")), file),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_replaced(folder: Path, compiled: list[str], damage: Callable[[Path], Any]) -> None:
    loaded()
    (file,) = files(folder)
    right = file.read_bytes()
    damage(file)
    loaded()
    assert compiled == ["test_7"] * 2
    assert file.read_bytes() == right


@needs_users
@pytest.mark.parametrize("change", OF_OTHERS.values(), ids=OF_OTHERS)
def test_what_others_may_have_written_is_not_loaded(
    folder: Path, compiled: list[str], change: Callable[[Path], Any]
) -> None:
    """Nor what is no file; a pipe does not hang the program."""
    loaded()
    (file,) = files(folder)
    change(file)
    loaded()
    assert compiled == ["test_7"] * 2


def test_a_file_of_another_kernel_is_not_loaded(folder: Path, compiled: list[str]) -> None:
    loaded(7)
    (file,) = files(folder)
    loaded(8)
    (other,) = set(files(folder)) - {file}
    file.write_bytes(other.read_bytes())
    loaded(7)
    assert compiled == ["test_7", "test_8", "test_7"]


@needs_users
def test_nobody_else_can_write_to_the_files(folder: Path) -> None:
    before = os.umask(0)
    try:
        loaded()
    finally:
        os.umask(before)
    (file,) = files(folder)
    assert not (file.stat().st_mode | file.parent.stat().st_mode) & 0o022


def test_a_cache_that_cannot_be_written_is_no_error(folder: Path, compiled: list[str]) -> None:
    folder.write_text("a file where the folder should be")
    loaded()
    loaded()
    assert compiled == ["test_7"] * 2


def test_no_cache_folder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise LoadError("There is no cache folder")

    monkeypatch.setattr(cache_module, "cache_folder", missing)
    assert object_cache(LEVEL) is None
    loaded()


def test_levels_versions_and_sources_have_sets_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sets() -> int:
        return len(list((folder / "kernels").iterdir()))

    for level in levels():
        cache = object_cache(level)
        cache.write("name", level.name.encode())
    for level in levels()[-2:]:
        cache = object_cache(level)
        assert cache.read("name") == level.name.encode()

    def is_new(sources: Sequence[Path] = ()) -> bool:
        cache = object_cache(LEVEL, sources)
        return cache.read("name") is None

    assert not is_new()
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "target_description", lambda level: "llvmlite 99")
        assert is_new()
    with monkeypatch.context() as patch:
        patch.setattr(np, "__version__", "99")
        assert is_new()
    source = tmp_path / "kernel.py"
    for text in ("", "changed"):
        source.write_text(text)
        assert is_new([tmp_path])
        written = object_cache(LEVEL, [tmp_path])
        written.write("name", b"")
        assert not is_new([tmp_path])
    assert not is_new()


def test_without_sources_there_is_no_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert object_cache(LEVEL, [tmp_path]) is None
    monkeypatch.setattr(cache_module, "_JIT", tmp_path)
    assert object_cache(LEVEL) is None


def make_set(folder: Path, number: int) -> Path:
    """The folder of a set with one kernel, used last at second `number` of 1970."""
    made = folder / f"{number:032x}"
    ObjectCache(made, "").write("name", b"code")
    os.utime(made, (number, number))
    return made


def test_the_sets_used_last_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [make_set(tmp_path, number) for number in range(6)]
    ObjectCache(made[2], "")  # it is used again
    monkeypatch.setattr(cache_module, "_SETS", 4)
    for ahead in (made[5], *made[5].iterdir()):
        os.utime(ahead, (time.time() + 86_400,) * 2)  # before the clock was set back
    made.append(make_set(tmp_path, 6))
    assert set(tmp_path.iterdir()) == {made[2], made[3], made[4], made[6]}


@pytest.fixture
def four_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_SETS", 4)


@needs_users
def test_other_folders_and_files_are_neither_removed_nor_counted(tmp_path: Path, four_sets: None) -> None:
    """The user may have named a folder whose `kernels` has something else."""
    others = tmp_path / "project", tmp_path / ("A" * 32), tmp_path / ("c" * 33), tmp_path / ("a" * 32)
    for other in others:
        other.mkdir()
        (other / "attention.cu").write_text("years of work")
    (tmp_path / ("b" * 32)).write_text("a file with the name of a set")
    (tmp_path / ("d" * 32)).symlink_to(others[0])
    for entry in tmp_path.iterdir():
        os.utime(entry, (1, 1), follow_symlinks=False)
    if not os.getuid():  # only root can give files away
        theirs = make_set(tmp_path, 1)
        os.chown(theirs, 1, -1)
    before = set(tmp_path.iterdir())
    made = [make_set(tmp_path, number) for number in range(2, 8)]
    assert set(tmp_path.iterdir()) == {*before, *made[2:]}
    assert all((other / "attention.cu").exists() for other in others)


def test_a_set_loses_its_own_files_only(tmp_path: Path, four_sets: None) -> None:
    old = make_set(tmp_path, 1)
    (old / "notes.txt").write_text("of the user")
    (old / ".unfinished-abcd_123").write_bytes(b"half")
    os.utime(old, (1, 1))
    for number in range(2, 6):
        make_set(tmp_path, number)
    assert [path.name for path in old.iterdir()] == ["notes.txt"]


def test_unfinished_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    """But not the file that another process writes, which has locked it, and no other file."""
    killed, written, other = ".unfinished-old_1234", ".unfinished-new_1234", ".unfinished-essay.txt"
    for name in (killed, written, other):
        (tmp_path / name).write_bytes(b"half")
    cache = ObjectCache(tmp_path, "key")
    with (tmp_path / written).open("rb") as opened:
        stored.lock(opened)
        cache.write("name", b"code")
    assert {path.name for path in tmp_path.iterdir()} >= {written, other}
    assert not (tmp_path / killed).exists()
    assert cache.read("name") == b"code"


def test_writers_and_readers_at_the_same_time_see_whole_files(tmp_path: Path) -> None:
    """Each has a cache of its own, as processes have."""
    contents = [bytes([number]) * 200_000 for number in range(4)]

    def write_and_read(content: bytes) -> None:
        cache = ObjectCache(tmp_path / "set", "key")
        for _ in range(20):
            cache.write("name", content)
            assert cache.read("name") in contents

    with ThreadPoolExecutor(len(contents)) as pool:
        list(pool.map(write_and_read, contents))
    assert len(files(tmp_path)) == 1


# -- the thread --------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], threading.Event]:
    """(names of kernels whose compilation began, the event for which each compilation waits)."""
    names: list[str] = []
    released = threading.Event()

    def slow(kernel: Kernel, level: object) -> bytes:
        names.append(kernel.name)
        assert released.wait(PATIENCE)
        return compile_object(kernel, LEVEL)

    monkeypatch.setattr(module, "compile_object", slow)
    return names, released


def test_kernels_are_compiled_before_they_are_needed(compiled: list[str]) -> None:
    library = Library(LEVEL, None)
    library.expect(number_kernel(number) for number in (1, 2, 1))
    seen: list[tuple[int, int]] = []
    library.wait([number_kernel(1), number_kernel(2)], lambda done, count: seen.append((done, count)))
    assert compiled == library.names == ["test_1", "test_2"]
    assert seen == [(0, 2), (1, 2), (2, 2)]
    library.expect([number_kernel(2)])
    assert stored_by(library.address(number_kernel(2))) == 2
    assert compiled == ["test_1", "test_2"]


def test_what_is_needed_at_once_comes_first(held: tuple[list[str], threading.Event]) -> None:
    names, released = held
    library = Library(LEVEL, None)
    library.expect(map(number_kernel, (1, 2, 3)))
    until(lambda: names == ["test_1"])
    needed = threading.Thread(target=lambda: library.address(number_kernel(3)))
    needed.start()
    until(lambda: library._queue[0] == number_kernel(3))
    released.set()
    needed.join(PATIENCE)
    library.wait(map(number_kernel, (1, 2, 3)))
    assert names == ["test_1", "test_3", "test_2"]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            OSError(errno.EMFILE, "no", "/a/file"),
            r"cannot be loaded now: .*; raise the limit of open files \(ulimit -n\)",
        ),
        (OSError(errno.ENOMEM, "no"), "cannot be loaded now: .*; try again$"),
        (ImportError("no"), "cannot be loaded now: no; try again$"),
        (MemoryError(), "^$"),
        (RuntimeError("no"), "cannot be compiled for this CPU: no; set POLARLM_CPU_LEVEL"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_errors_of_the_system_pass_and_those_of_the_compiler_do_not(
    monkeypatch: pytest.MonkeyPatch, error: Exception, advice: str
) -> None:
    def broken(kernel: Kernel, level: object) -> bytes:
        raise error

    library = Library(LEVEL, None)
    with monkeypatch.context() as patch:
        patch.setattr(module, "compile_object", broken)
        with pytest.raises((KernelError, MemoryError), match=advice):
            library.address(number_kernel(1))
    if isinstance(error, RuntimeError):
        assert library.failed_names == ["test_1"]
        with pytest.raises(KernelError, match=advice):
            library.address(number_kernel(1))
    else:
        assert library.failed_names == []
        assert stored_by(library.address(number_kernel(1))) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_children_compile_by_themselves() -> None:
    """Also those that are forked while LLVM is at work in the thread, which they do not have."""
    library, numbers = Library(LEVEL, None), iter(range(1_000_000))
    library.expect(map(number_kernel, islice(numbers, 100)))

    def llvm_is_at_work() -> bool:
        if compiler._llvm_lock.acquire(blocking=False):
            compiler._llvm_lock.release()
            library.expect([number_kernel(next(numbers))])  # it may have compiled all others
            return False
        return True

    for _ in range(2):
        until(llvm_is_at_work)
        child = os.fork()
        if not child:
            try:
                compile_object(number_kernel(1), LEVEL)  # in this thread; another one could pass for the dead one
                os._exit(0 if stored_by(library.address(number_kernel(99))) == 99 else 1)
            finally:
                os._exit(2)
        ended: list[int] = []

        def has_ended(child: int = child, ended: list[int] = ended) -> bool:
            pid, status = os.waitpid(child, os.WNOHANG)
            ended.extend([status] * (pid == child))
            return bool(ended)

        try:
            until(has_ended)
        finally:
            if not ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        assert ended == [0]
    count = next(numbers)
    library.wait(map(number_kernel, range(count)))
    assert len(library.names) == count


def test_the_program_ends_while_kernels_are_compiled() -> None:
    program = """
from tests.jit.test_library import *
library = Library(LEVEL, None)
library.expect(map(number_kernel, range(300)))
print(library._has_thread)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)
