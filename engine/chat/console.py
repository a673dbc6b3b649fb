"""The chat's terminal: messages, the model's text, notes and progress.

Standard output carries only the model's text; notes, errors and progress go to standard error. The input prompt is
drawn only if standard input and one of the two outputs are terminals.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from polarlm.engine.chat.line_editor import PROMPT, LineEditor
from polarlm.engine.chat.wrapping import Wrapping, wrap
from polarlm.engine.errors import EngineError

try:
    import termios
except ModuleNotFoundError:  # Windows, whose console does not write ^C
    termios = None  # type: ignore[assignment]

_WAIT = 1.0  # seconds until it is said that standard input is read
_ERROR = "error:"
_DIM, _RED, _GREEN, _PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[0m"
# A model's text must not move the cursor or retitle the window: control characters except \t and \n show as symbols.
_VISIBLE = {c: 0x2400 + c for c in range(0x20) if c not in b"\t\n"} | dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)


class Console:
    """Reads messages from standard input, writes the model's text to standard output and the rest to standard error."""

    def __init__(self, color: str = "auto", completions: Sequence[str] = ()) -> None:
        """color: on, off or auto. completions: what the Tab key completes."""
        # A process started without standard input has nothing to read.
        self._in, self._out, self._err = sys.stdin or io.StringIO(), sys.stdout, sys.stderr
        self.on_terminal = self._out.isatty()
        self.interactive = self._in.isatty() and (self.on_terminal or self._err.isatty())
        self._colored = color == "on" or (color == "auto" and self._err.isatty() and _colors_wanted())
        self._line_open = False
        self._wrapping = Wrapping(columns)
        self._bar: tqdm[None] | None = None
        self._completions = completions
        self._editor: LineEditor | None = None  # made when a message is asked for, since it writes to the terminal

    def read(self) -> str:
        """The next message; of piped input, or of a terminal that takes text alone, the next line, with the one after
        it if it ends in a backslash, and so on. Raises EOFError, KeyboardInterrupt for Ctrl-C at the empty prompt, and
        EngineError for input that is not UTF-8."""
        if self.interactive and _is_dumb():
            print(f"\n{PROMPT}", end="", file=self._out if self.on_terminal else self._err, flush=True)
        elif self.interactive:
            prompt = self._paint(_GREEN, PROMPT)
            self._editor = self._editor or LineEditor(prompt, self._colored, self._completions)
            return self._editor.read()
        lines: list[str] = []
        while line := self._read_pipe(self._in.readline):
            lines.append(line.removesuffix("\n"))
            if not lines[-1].endswith("\\"):
                break
            lines[-1] = lines[-1][:-1]
        if not lines:
            raise EOFError
        return "\n".join(lines)

    def read_all(self) -> str:
        """All of piped input, without its last line end; empty at a terminal. Raises EngineError if it is not UTF-8."""
        if self._in.isatty():
            return ""
        timer = threading.Timer(
            _WAIT, lambda: self.note("Reading standard input, which is a part of the message, up to its end …")
        )
        timer.daemon = True
        timer.start()
        try:
            return self._read_pipe(self._in.read).removesuffix("\n")
        finally:
            timer.cancel()

    def ask(self, question: str) -> str:
        """What is typed after a question. Raises EOFError or KeyboardInterrupt."""
        print(self._paint(_GREEN, question), end="", file=self._err, flush=True)
        if not (line := self._in.readline()):
            raise EOFError
        return line

    def keep_message(self) -> None:
        """Adds the last message to the history unless it was dropped; `read` does so before the next message."""
        if self._editor is not None:
            self._editor.history.keep()

    def drop_message(self) -> None:
        """Leaves the last message out of the history if it is long, such as a refused paste."""
        if self._editor is not None:
            self._editor.history.drop()

    def show_message(self, text: str) -> None:
        """Shows a message from the command line as if it had been typed."""
        if self.interactive:
            print(
                "\n" + self._paint(_GREEN, PROMPT) + text, file=self._out if self.on_terminal else self._err, flush=True
            )

    def write(self, text: str) -> None:
        if text:
            self.end_progress()
            self._out.write(self._wrapping.feed(text.translate(_VISIBLE)) if self.on_terminal else text)
            self._out.flush()
            self._line_open = not text.endswith("\n")

    def end_answer(self) -> None:
        if self._line_open:
            self._out.write(self._wrapping.feed("\n") if self.on_terminal else "\n")
            self._out.flush()
            self._line_open = False

    def note(self, text: str) -> None:
        self._tell(self._paint(_DIM, self._laid_out(text)))

    def error(self, text: str) -> None:
        laid_out = self._laid_out(f"{_ERROR} {text}")
        self._tell(self._paint(_RED, _ERROR) + laid_out.removeprefix(_ERROR))

    def progress(self, what: str, bytes_done: int, total: int, amount: str = "") -> None:
        """Shows progress as a bar that appears after a second. amount: what precedes the time that is left."""
        if self._bar is None and self._err.isatty():
            layout = f"{what} {{percentage:3.0f}}% |{{bar:30}}| {amount}{{remaining}} left"
            self._bar = tqdm(total=total, file=self._err, delay=1, leave=False, bar_format=layout)
        if self._bar is not None:
            self._bar.update(bytes_done - self._bar.n)

    def end_progress(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _laid_out(self, text: str) -> str:
        """On a terminal, `text` between words into lines, and with control characters replaced: notes quote files and
        messages, too."""
        return wrap(text.translate(_VISIBLE), columns) if self._err.isatty() else text

    def _read_pipe(self, read: Callable[[], str]) -> str:
        try:
            return read()
        except UnicodeDecodeError:
            raise EngineError("Standard input is not UTF-8 text: convert it first") from None
        except OSError:  # nohup has put a file there that cannot be read
            return ""

    def _tell(self, text: str) -> None:
        self.end_progress()
        if self.on_terminal and self._err.isatty():
            self.end_answer()
        print(text, file=self._err, flush=True)

    def _paint(self, code: str, text: str) -> str:
        return f"{code}{text}{_PLAIN}" if self._colored else text


@contextmanager
def ctrl_c_pressed() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether Ctrl-C was pressed, so that no step of the engine is interrupted. A second
    Ctrl-C raises KeyboardInterrupt."""
    is_pressed = False

    def on_signal(number: int, frame: object) -> None:
        nonlocal is_pressed
        if is_pressed:
            raise KeyboardInterrupt
        is_pressed = True

    old_handler = signal.signal(signal.SIGINT, on_signal)
    try:
        with _without_echo():
            yield lambda: is_pressed
    finally:
        signal.signal(signal.SIGINT, old_handler)


@contextmanager
def _without_echo() -> Iterator[None]:
    """Keeps the terminal from writing what is typed, such as ^C, into the model's text. It waits for the prompt, with
    each key as it was pressed."""
    terminal = _own_terminal()
    if terminal is None:
        yield
        return
    old_settings = termios.tcgetattr(terminal)
    flags = old_settings[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH  # Ctrl-C drops no keys
    termios.tcsetattr(terminal, termios.TCSANOW, [*old_settings[:3], flags, *old_settings[4:]])
    try:
        yield
    finally:
        if _own_terminal() is not None:
            termios.tcsetattr(terminal, termios.TCSANOW, old_settings)


def _own_terminal() -> int | None:
    """The descriptor of standard input if it is a terminal and this process is in its foreground, else None: a
    background process that configures its terminal is stopped."""
    if termios is None or sys.stdin is None or not sys.stdin.isatty():
        return None
    try:
        number = sys.stdin.fileno()
        return number if os.tcgetpgrp(number) == os.getpgrp() else None
    except OSError:  # a terminal, but not the one that controls this process
        return None


def columns() -> int:
    """The width of the terminal now."""
    return shutil.get_terminal_size().columns


def _colors_wanted() -> bool:
    return not os.environ.get("NO_COLOR") and not _is_dumb()


def _is_dumb() -> bool:
    """Whether the terminal says that it takes text alone."""
    return os.environ.get("TERM") == "dumb"
