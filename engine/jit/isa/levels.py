"""The levels of CPU features that kernels are compiled for, found in the files of this folder."""

from __future__ import annotations

import importlib
import pkgutil

from polarlm.engine.jit import isa
from polarlm.engine.jit.lang import Level


def all_levels() -> tuple[Level, ...]:
    """The `LEVELS` of all files: `generic` first, then other machines', each in ascending order."""
    stems = {info.name for info in pkgutil.iter_modules(isa.__path__)} - {"levels"}
    in_order = sorted(stems, key=lambda stem: (stem != "generic", stem))
    modules = [importlib.import_module(f"{isa.__name__}.{stem}") for stem in in_order]
    return tuple(level for module in modules for level in module.LEVELS)


LEVELS = all_levels()
