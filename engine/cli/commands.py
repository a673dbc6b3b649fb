"""What commands have in common: errors as sentences, notes, tables, and an output whose reader may close it."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps

from polarlm.engine.cli.flags import Check, FlagError, in_flags, parse
from polarlm.engine.errors import EngineError
from polarlm.model_loaders.errors import LoadError

_UNEXPECTED_ERROR, _BAD_REQUEST, _INTERRUPT_EXIT_CODE = 1, 2, 130
BROKEN_PIPE = 141  # 128 + SIGPIPE: a shell's exit code of a program that a closed pipe ended
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def use_utf8() -> None:
    """Require UTF-8 of standard input, where a byte order mark is no text, and let output replace characters that its
    encoding lacks. An output that the process was started without becomes the null device."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run(
    work: Callable[[Sequence[str]], int | None],
    argv: Sequence[str] | None,
    failures: tuple[type[Exception], ...] = (),
) -> int:
    """Run `work` on a command line and return the exit code: what it returns; 1, with a sentence, for one of `failures`
    and 2 for bad input; 130 after Ctrl-C; the code of `lost_output`. argv: without the program's name; None means the
    process's own."""
    use_utf8()
    try:
        code = work(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except failures as error:
        print(f"error: {error}", file=sys.stderr)
        return _UNEXPECTED_ERROR
    except FlagError as error:
        print(f"error: {error}; --help lists the flags", file=sys.stderr)
    except EngineError as error:
        print(f"error: {in_flags(error)}", file=sys.stderr)
    except LoadError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        note("Stopped")
        return _INTERRUPT_EXIT_CODE
    except OSError as error:
        if (lost := lost_output(error)) is None:
            raise
        return lost
    else:
        return code or 0
    return _BAD_REQUEST


def command(work: Callable[[Sequence[str]], int | None]) -> Callable[..., int]:
    """`work` as the `main` of a command: see `run`."""

    @wraps(work)
    def main(argv: Sequence[str] | None = None) -> int:
        return run(work, argv)

    return main


def with_flags(
    groups: Mapping[str, type], prog: str, description: str, checks: Mapping[str, Check] = {}
) -> Callable[[Callable[..., int | None]], Callable[..., int]]:
    """Make a function of flags the `main` of a command: it gets an instance of each of `groups`, as `parse` says."""

    def decorate(work: Callable[..., int | None]) -> Callable[..., int]:
        return command(lambda argv: work(*parse(argv, groups, prog=prog, description=description, checks=checks)))

    return decorate


def note(sentence: str) -> None:
    """Writes a message to standard error, above a progress bar; standard output is for results."""
    from tqdm import tqdm  # imported where it is used: it takes 2 MB

    tqdm.write(sentence, file=sys.stderr)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        others = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *others]).rstrip())
    return lines


def note_in_flags(sentence: str) -> str:
    """A note of the engine with flags in place of the settings that it says to have no effect.

    >>> note_in_flags("cpu_moe has no effect on a CPU: all experts are in its memory.")
    '--cpu-moe has no effect on a CPU: all experts are in its memory.'
    """
    return re.sub(r"\b(\w+_\w+)(?= has no effect)", lambda setting: "--" + setting[1].replace("_", "-"), sentence)


def lost_output(error: OSError) -> int | None:
    """Return the exit code if `error` is that standard output takes no more: 141 when its reader has closed it; 1, with
    a sentence, when its disk is full. Else None. Nothing can be printed afterwards."""
    if isinstance(error, BrokenPipeError):
        _discard_output()
        return BROKEN_PIPE
    if error.errno not in _FULL or error.filename is not None:
        return None
    with suppress(OSError):  # standard error may be on the same disk
        print(f"error: standard output cannot be written: {error.strerror}", file=sys.stderr)
    _discard_output()
    return _UNEXPECTED_ERROR


def _discard_output() -> None:
    """Redirects both outputs to the null device, so that the interpreter's last flush meets no closed pipe."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(io.UnsupportedOperation):  # an output that is no file
            os.dup2(nothing, stream.fileno())
