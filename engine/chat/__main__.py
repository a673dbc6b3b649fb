"""`python -m polarlm.engine.chat`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from polarlm.engine.chat.config import CHECKS, GROUPS, read_command_line
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.errors import EngineError

__all__ = ["CHECKS", "GROUPS", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Chats, and returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if {"-h", "--help", "--version"} & {*words}:  # which are printed without importing the engine
        with suppress(FlagError, EngineError):
            read_command_line(words)
    from polarlm.engine.chat import terminal

    return terminal.main(words)


if __name__ == "__main__":
    sys.exit(main())
