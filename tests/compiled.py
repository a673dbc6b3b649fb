"""The folder of this checkout with compiled kernels of a CPU, for all processes and runs of the tests."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kept_files import COMPILED, used

if TYPE_CHECKING:
    from polarlm.engine.jit.isa.levels import Level

KERNELS = Path(__file__).parents[1] / ".pytest_cache" / "kernels"
# Each level has a set for the tests of the language and one for the engine's kernels: more than a user's cache keeps.
SETS = 32


def kept(make: Callable[[], bytes], *parts: str, folder: Path = COMPILED) -> bytes:
    """What `make` returns, once for the same `parts`, which it depends on; after that, from a file in the folder.

    The folder is one for all checkouts: a change of a source compiles again what it changes.
    """
    path = folder / hashlib.sha256("\0".join(parts).encode()).hexdigest()
    with suppress(FileNotFoundError):
        content = path.read_bytes()
        used(path)
        return content
    made = make()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        (whole := Path(unfinished) / "whole").write_bytes(made)
        os.replace(whole, path)
    return made


def keeping(compile: Callable[[str, Level], bytes]) -> Callable[[str, Level], bytes]:
    """A function of `compiler` that has LLVM compile IR, with what it has returned for the same IR and target."""
    from polarlm.engine.jit.compile import compiler

    # This file says with which options and passes LLVM compiles.
    passes = Path(compiler.__file__).read_text(encoding="utf-8")

    def compile_once(source: str, level: Level) -> bytes:
        description = compiler.target_description(level)
        return kept(lambda: compile(source, level), compile.__name__, source, description, passes)

    return compile_once


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
