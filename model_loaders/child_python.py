"""How every child that runs Python starts: apart from the current folder and from Python's environment variables.

The current folder may be one that was downloaded, or have a `types.py`, and Python would look there first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_START = (
    "import runpy, sys; run, end = sys.argv[1], 3 + int(sys.argv[2]); "
    "sys.path[:] = sys.argv[3:end]; del sys.argv[1:end]; "
    "(runpy.run_path if run.endswith('.py') else runpy.run_module)(run, run_name='__main__')"
)


def python(run: str, *arguments: str) -> list[str]:
    """The command of a child that runs a module by its full name, or a file, as `__main__`.

    It has this process's path, without the current folder unless this project is imported from there.
    """
    ours = str(Path(sys.modules["polarlm"].__file__ or "").resolve().parents[1])
    given = (entry for entry in sys.path if entry and isinstance(entry, str))  # as imports take them
    path = [entry for entry in given if _is_same(entry, ours) or not _is_same(entry, os.curdir)]
    path[:0] = [] if any(_is_same(entry, ours) for entry in path) else [ours]
    kept = ["-X", f"utf8={sys.flags.utf8_mode}", *(["-B"] if sys.flags.dont_write_bytecode else [])]
    return [sys.executable, "-I", *kept, "-c", _START, run, str(len(path)), *path, *arguments]


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
