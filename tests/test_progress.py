"""Progress bars on a terminal."""

from __future__ import annotations

import io
import re
import sys
import time
from contextlib import redirect_stderr

import pytest

from polarlm.engine.cli import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(progress, "_DELAY", 0.01)
    monkeypatch.setattr(progress, "_REDRAW", 0.01)
    return Terminal()


def wait_for(terminal: Terminal, count: int) -> None:
    """Wait until a bar has been drawn with `count` different seconds."""
    for _ in range(6000):
        if len(set(re.findall(r"(\d+\.\d) s", terminal.getvalue()))) >= count:
            return
        time.sleep(0.01)
    raise AssertionError(terminal.getvalue())


@pytest.mark.parametrize("total", [None, 100])
def test_a_bar_moves_while_nothing_is_counted_and_disappears(terminal: Terminal, total: int | None) -> None:
    with (
        redirect_stderr(terminal),
        progress.progress_bar(True, desc="Loading m", bar_format=progress.BYTES, unit="B", total=total, ncols=60),
    ):
        wait_for(terminal, 3)
    assert "Loading m:   0%|" in terminal.getvalue().replace("% |", "%|")
    assert terminal.getvalue().split("\r")[-2].strip() == ""


def test_what_is_said_stays_above_the_bar(terminal: Terminal) -> None:
    say = progress.above_bars(lambda sentence: print(sentence, file=sys.stderr))
    with (
        redirect_stderr(terminal),
        progress.progress_bar(True, desc="Loading m", bar_format=progress.SHARE, total=1, ncols=60),
    ):
        wait_for(terminal, 1)
        say("A sentence.")
    before, after = terminal.getvalue().split("A sentence.\n")
    assert before.split("\r")[-2].strip() == before.split("\r")[-1] == "", "the line of the bar is cleared first"
    assert "Loading m" in after


@pytest.mark.parametrize(("is_shown", "is_terminal"), [(False, True), (True, False)])
def test_elsewhere_nothing_is_drawn(
    is_shown: bool, is_terminal: bool, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "isatty", lambda: is_terminal)
    with redirect_stderr(terminal), progress.progress_bar(is_shown, desc="Loading m") as bar:
        progress.above_bars(lambda sentence: print(sentence, file=sys.stderr))("A sentence.")
    assert bar is None
    assert terminal.getvalue() == "A sentence.\n"


@pytest.mark.parametrize(("total", "of"), [(None, ""), (1200, " of 1,200")])
def test_without_a_terminal_a_line_is_written_now_and_then(
    total: int | None, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, written = 0.0, io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with redirect_stderr(written), progress.counting("Scoring", "pass", total) as count:
        for _ in range(1000):
            now += 0.0625
            count("")
        now += 60
        count("a minute left")
    lines = written.getvalue().splitlines()
    assert lines == [
        *(f"Scoring: pass {count}{of}" for count in (240, 480, 720, 960)),
        f"Scoring: pass 1,001{of}, a minute left",
    ]


def test_amounts_without_a_unit_are_shown_as_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = 0.0, io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with redirect_stderr(written), progress.counting("Measuring", total=400) as count:
        now += 20
        count("prompts", 100.5)
    assert written.getvalue() == "Measuring: 25%, prompts\n"


def test_a_line_comes_also_while_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(progress, "_LINES_EVERY", 0.02)
    with redirect_stderr(written), progress.counting("Scoring", "pass", 2):
        while written.getvalue().count("\n") < 2:
            time.sleep(0.005)
    assert re.fullmatch(r"(Scoring: pass 0 of 2, after 0 s\n){2,}", written.getvalue())
