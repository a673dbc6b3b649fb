"""`python -m tests.tiers.killed_writer FOLDER` kills writers at every line of tier_store.py and files.py, each in its
own folder.

Each writer is a fork of this process, which is small: a fork takes as long as its parent's memory is large. Prints the
number of writers that were killed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

import numpy as np

from polarlm.engine.storage import files
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.tiers import tier_store

SIZE = 3000  # bytes of a folder; the objects take more
OBJECTS = 6


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def write(folder: Path, point: int) -> None:
    """Open a folder, write, replace, note use, make room and remove; die at the line of number `point`."""
    left = [point]

    def trace(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code.co_filename not in (tier_store.__file__, files.__file__):
            return None
        if event == "line":
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    tier = tier_store.FolderTier(folder, SIZE)
    for step, number in enumerate([*range(OBJECTS), OBJECTS - 1]):  # the last one again, with other contents
        tier.write(name(number), *Object({}, np.full(600, step + point % 7, np.uint8)).pack(name(number)))
        tier.touch([name(number), name(number - 1)] if number else [])
    tier.remove(name(OBJECTS - 1))


def is_killed(folder: Path, point: int) -> bool:
    """Whether a forked writer was killed; False if it ended before. Raises RuntimeError if it failed."""
    child = os.fork()
    if not child:
        code = 1
        try:
            write(folder, point)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise RuntimeError(f"the writer that was to be killed at line {point} failed")
    return False


if __name__ == "__main__":
    point = 0
    while is_killed(Path(sys.argv[1]) / str(point), point):
        point += 1
    print(point)
