"""Progress on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


_DELAY = 0.3  # seconds without a bar: most work ends before
_REDRAW = 0.2  # seconds
_LINES_EVERY = 15  # seconds, without a terminal
# Both show the seconds, so that something moves while nothing is counted.
SHARE = "{desc}: {percentage:3.0f}% |{bar}| {elapsed_s:.1f} s"
BYTES = "{desc}: {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{unit} {elapsed_s:.1f} s"


@contextmanager
def progress_bar(is_shown: bool, **settings: Any) -> Iterator[tqdm[Any] | None]:
    """Yields a progress bar, which is redrawn several times a second and disappears at the end; None if it is not to be
    shown, or there is no terminal. settings: of tqdm, whose import takes 2 MB."""
    if not (is_shown and sys.stderr.isatty()):
        yield None
        return
    from tqdm import tqdm

    end_event = threading.Event()
    with tqdm(leave=False, delay=_DELAY, **settings) as bar:
        redraw = threading.Thread(target=_redraw, args=(bar, end_event), daemon=True)
        redraw.start()
        try:
            yield bar
        finally:
            end_event.set()
            redraw.join()
            bar.clear()  # which closing it leaves out, if nothing was counted


def _redraw(bar: tqdm[Any], end_event: threading.Event) -> None:
    wait = _DELAY
    while not end_event.wait(wait):
        bar.refresh()
        wait = _REDRAW


@contextmanager
def counting(what: str, unit: str = "", total: float | None = None) -> Iterator[Callable[..., None]]:
    """Yields a function that counts one more: on a bar that disappears at the end, or without a terminal in a line on
    standard error now and then. It takes what to show next to the count, such as the time that is left. Without a unit,
    it also takes the amount, and a share of the total is shown."""
    layout = None if unit else "{desc}: {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left{postfix}"
    with progress_bar(True, desc=what, unit=unit, total=total, bar_format=layout) as bar:
        count, last_note, end_event = 0.0, "", threading.Event()
        start = last_line = time.monotonic()

        def say(note: str, amount: float = 1) -> None:
            nonlocal count, last_note
            count, last_note = count + amount, note
            if bar is not None:
                bar.set_postfix_str(note, refresh=False)
                bar.update(amount)
            elif time.monotonic() - last_line >= _LINES_EVERY:
                write_line(note)

        def write_line(note: str) -> None:
            nonlocal last_line
            last_line = time.monotonic()
            of_total = "" if total is None else f" of {total:,}"
            done = f"{unit} {count:,.0f}{of_total}" if unit else f"{count / (total or 1):.0%}"
            print(f"{what}: {done}{note and f', {note}'}", file=sys.stderr, flush=True)

        def write_while_silent() -> None:
            """Lines where nothing is counted for a while: what is done takes long."""
            while not end_event.wait(_LINES_EVERY):
                if time.monotonic() - last_line >= _LINES_EVERY:
                    write_line(", ".join(filter(None, (last_note, f"after {time.monotonic() - start:.0f} s"))))

        if bar is None:
            threading.Thread(target=write_while_silent, daemon=True).start()
        try:
            yield say
        finally:
            end_event.set()


def above_bars(say: Callable[[str], None]) -> Callable[[str], None]:
    """A function as `say`, which may print, with lines that stay above the bars on the terminal."""

    def print_above(sentence: str) -> None:
        if not sys.stderr.isatty():
            say(sentence)
            return
        from tqdm import tqdm

        with tqdm.external_write_mode(file=sys.stderr):
            say(sentence)

    return print_above


def amounts(bar: tqdm[Any] | None) -> Callable[[int, int], None]:
    """A function of what is done and the total, which shows both on the bar, if there is one."""

    def show(amount_done: int, total: int) -> None:
        if bar is not None:
            bar.total = total
            bar.update(amount_done - bar.n)

    return show
