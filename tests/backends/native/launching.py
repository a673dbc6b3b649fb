"""Launches of kernels that are compiled for a level of CPU features."""

from __future__ import annotations

from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.jit.lang import Level


def launcher(level: Level, threads: int = 1) -> Launcher:
    return Launcher(threads, level)
