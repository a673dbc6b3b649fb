"""A checkout's packages under their short names: `engine.state` is the module `polarlm.engine.state`, not a second one.

Only modules that Python would import from the checkout become aliases; another project's module of the same name is
left alone. An installed package has no short names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

NAMES = ("bench", "engine", "model_loaders", "server")


# Neither class has a base of `importlib.abc`, which takes longer to import than everything else here.
class _Alias:
    """Loads a module by importing it under its full name."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(self._spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has replaced it with the alias's
        _add_aliases(self._spec.name)

    def get_code(self, fullname: str) -> CodeType | None:
        return self._spec.loader.get_code(self._spec.name)  # type: ignore[union-attr]


class _Aliases:
    """Finds modules of this project by their short names."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top not in NAMES:
            return None
        if path is None:
            spec = PathFinder.find_spec(top)
            ours = spec is not None and spec.origin is not None and _is_ours(top, spec.origin)
        else:
            ours = sys.modules.get(top) is sys.modules.get(f"polarlm.{top}")
        spec = find_spec(f"polarlm.{fullname}") if ours else None
        if spec is None:
            return None
        alias = ModuleSpec(fullname, _Alias(spec), origin=spec.origin)  # type: ignore[arg-type]
        alias.submodule_search_locations = spec.submodule_search_locations
        alias.has_location = spec.has_location
        return alias


def install() -> None:
    """Make short names aliases, including those that are imported already."""
    ours = [
        name
        for name in NAMES
        if (module := sys.modules.get(name)) is not None
        and module.__file__ is not None
        and _is_ours(name, module.__file__)
    ]
    sys.meta_path.insert(0, _Aliases())
    for name in ours:
        sys.modules[name] = import_module(f"polarlm.{name}")
        _add_aliases(f"polarlm.{name}")


def _add_aliases(package: str) -> None:
    """Alias the modules of a package that are imported already: importlib would set each as an attribute of its package
    again, and overwrite a function of the same name."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            sys.modules.setdefault(name.removeprefix("polarlm."), module)


def _is_ours(name: str, file: str) -> bool:
    """Whether a file that Python would import as `name` is the file of `polarlm.name`."""
    ours = find_spec(f"polarlm.{name}")
    return ours is not None and ours.origin is not None and Path(ours.origin).resolve() == Path(file).resolve()
