"""The folder of this checkout with compiled kernels of a CPU, for all processes and runs of the tests."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

KERNELS = Path(__file__).parents[1] / ".pytest_cache" / "kernels"
# Each level has a set for the tests of the language and one for the engine's kernels: more than a user's cache keeps.
SETS = 32


def end_of_compilation() -> None:
    """Return when the kernels are compiled that earlier tests have asked for: that takes memory and processor time."""
    for thread in threading.enumerate():
        if thread.name == "compiler":
            thread.join()


def share_kernels(cache: Path) -> Path:
    """The cache folder of a process to be started, which finds the compiled kernels in it."""
    cache.mkdir(exist_ok=True)
    (KERNELS / "kernels").mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # it is there, or the system has no links
        (cache / "kernels").symlink_to(KERNELS / "kernels")
    return cache
