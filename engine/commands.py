"""What commands have in common: errors are sentences on standard error, and notes do not disturb a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tqdm import tqdm

from polarlm.engine.errors import EngineError
from polarlm.engine.flags import FlagError, in_flags
from polarlm.model_loaders.errors import LoadError

_BAD_REQUEST, _INTERRUPTED = 2, 130


def run(work: Callable[[Sequence[str]], None], argv: Sequence[str] | None) -> int:
    """The exit code of `work` on a command line: 2 with a sentence for bad input, 130 after Ctrl-C.

    argv: without the program; None is the process's own.
    """
    try:
        work(sys.argv[1:] if argv is None else argv)
    except FlagError as error:
        print(f"error: {error}; --help lists the flags", file=sys.stderr)
    except EngineError as error:
        print(f"error: {in_flags(error)}", file=sys.stderr)
    except LoadError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        note("Stopped")
        return _INTERRUPTED
    else:
        return 0
    return _BAD_REQUEST


def note(sentence: str) -> None:
    """Writes a message to standard error, above a progress bar; standard output is for results."""
    tqdm.write(sentence, file=sys.stderr)
