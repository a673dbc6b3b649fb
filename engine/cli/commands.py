"""What commands have in common: errors as sentences, notes above a progress bar, output whose reader may close it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps

from polarlm.engine.cli.flags import FlagError, in_flags
from polarlm.engine.errors import EngineError
from polarlm.model_loaders.errors import LoadError

_BAD_REQUEST, _INTERRUPTED = 2, 130
BROKEN_PIPE = 141  # 128 + SIGPIPE: a shell's exit code of a program that a closed pipe ended


def run(work: Callable[[Sequence[str]], None], argv: Sequence[str] | None) -> int:
    """Run `work` on a command line and return the exit code: 0; 2, with a sentence, for bad input; 130 after Ctrl-C;
    141 when the reader of the output has closed it.

    argv: without the program's name; None means the process's own.
    """
    try:
        work(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except FlagError as error:
        print(f"error: {error}; --help lists the flags", file=sys.stderr)
    except EngineError as error:
        print(f"error: {in_flags(error)}", file=sys.stderr)
    except LoadError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        note("Stopped")
        return _INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return BROKEN_PIPE
    else:
        return 0
    return _BAD_REQUEST


def command(work: Callable[[Sequence[str]], None]) -> Callable[..., int]:
    """`work` as the `main` of a command: see `run`."""

    @wraps(work)
    def main(argv: Sequence[str] | None = None) -> int:
        return run(work, argv)

    return main


def note(sentence: str) -> None:
    """Writes a message to standard error, above a progress bar; standard output is for results."""
    from tqdm import tqdm  # imported where it is used: it takes 2 MB

    tqdm.write(sentence, file=sys.stderr)


def discard_output() -> None:
    """Redirects both outputs to the null device, so that the interpreter's last flush meets no closed pipe."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nothing, stream.fileno())
