"""Contestants in processes of their own: answers, failures, crashes, memory."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from polarlm.bench.speed.child import Child, Failed, OutOfTime, memory
from tests.compiled import end_of_compilation

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.bench.contestant"
ASKED = """
import library, polarlm
from polarlm.bench.speed.child import serve

class Engine:
    def places(self):
        return [library.place, polarlm.__file__]

serve(Engine, [])
"""


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(MODULE)
    yield child
    child.close()


def test_a_child_answers_and_reports_failures_and_goes_on(child: Child) -> None:
    with pytest.raises(Failed, match=r"^it needs a name$"):
        child.call("start", "")
    child.call("start", "Ada")
    assert child.call("greet", "Émile") == ["Ada", "Émile"]
    with pytest.raises(Failed, match=r"^ZeroDivisionError: division by zero$"):
        child.call("divide", 0)
    assert child.call("divide", 4) == 0.25


def test_a_call_ends_with_the_time_of_its_child() -> None:
    with closing(Child(MODULE, end=time.monotonic())) as child, pytest.raises(OutOfTime, match=r"^its time was over$"):
        child.call("wait", os.devnull)


@pytest.mark.skipif(os.name == "nt", reason="needs a symbolic link")
def test_only_our_own_package_comes_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an installed package lie others, which may be for another Python than the child's."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        (folder / "library.py").write_text(f"place = {folder.name!r}\n", encoding="utf-8")
    (ours / "polarlm").symlink_to(ROOT / "polarlm")
    (theirs / "polarlm.py").write_text("raise ImportError\n", encoding="utf-8")
    (theirs / "asked.py").write_text(ASKED, encoding="utf-8")
    monkeypatch.setattr("polarlm.bench.speed.child._ROOT", ours)
    monkeypatch.setenv("PYTHONPATH", str(theirs))
    with closing(Child("asked")) as child:
        child.call("start")
        assert child.call("places") == ["theirs", str(ours / "polarlm" / "__init__.py")]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals")
def test_a_crash_is_named_with_the_last_line_that_was_written(child: Child) -> None:
    child.call("start", "Ada")
    for _ in range(2):  # further calls say the same
        with pytest.raises(Failed, match=r"^crashed \(SIGABRT\): GGML_ASSERT failed$"):
            child.call("crash")


def test_a_python_that_does_not_exist_is_a_failure() -> None:
    with pytest.raises(Failed, match=r"^/no/python cannot be started: No such file or directory$"):
        Child(MODULE, "/no/python")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the parts are counted on Linux only")
def test_memory_is_that_of_the_process() -> None:
    end_of_compilation()
    for _ in range(5):  # other threads may take and free memory
        before = memory(os.getpid())
        # Pages of its own: an allocator gives memory that was freed before, which has counted already.
        with mmap.mmap(-1, 40 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
            held[:] = b"\1" * len(held)
            during = memory(os.getpid())
        after = memory(os.getpid())
        grown = during["private"] - before["private"]
        if abs(grown - (40 << 20)) < 4 << 20 and during["now"] > after["now"]:
            break
    assert grown == pytest.approx(40 << 20, abs=4 << 20)
    assert during["now"] > after["now"]
    assert after["peak"] > during["now"] - (1 << 20)  # the system counts in batches
    assert after["private"] + after["file"] <= after["now"] + (1 << 20)
