"""Runs Python as on a bare GPU machine: with a GPU and CuPy, without some packages, and without a network.

    python -m tests.bare_machine -m pytest tests/cuda/test_gpu.py

The GPU is the stand-in of `tests.cuda.fake_cupy`: kernels run in the emulator. What `bench.lab.gpu` measures is small,
and its times mean nothing.
"""

from __future__ import annotations

import runpy
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution
from types import ModuleType
from typing import Any

MISSING = ("gguf", "platformdirs", "prompt_toolkit", "llvmlite", "starlette", "uvicorn", "openai")
_DRIVER = 13000


_find, _distributions = PathFinder.find_spec, PathFinder.find_distributions


def _find_installed(
    finder: type, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
) -> ModuleSpec | None:
    return None if name.split(".")[0] in MISSING else _find(name, path, target)


def _installed_distributions(finder: type, *context: Any) -> Iterator[Distribution]:
    for distribution in _distributions(*context):
        if distribution.metadata["Name"].replace("-", "_").lower() not in MISSING:
            yield distribution


class _Cupy:
    """Finds CuPy's stand-in, all modules of one machine."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.split(".")[0] != "cupy":
            return None
        if not self._modules:
            from polarlm.engine.backends.cuda.device import cublas_lt, packed_launch

            # With NumPy, which this module must not import before the paths are set.
            from tests.cuda import fake_cublas_lt, fake_cupy

            machine, modules = fake_cupy.make()
            self._modules.update(modules)
            packed_launch.load_driver = lambda: fake_cupy.Driver(machine)
            cublas_lt.load_library = lambda cuda: fake_cublas_lt.Library(machine)
        return ModuleSpec(name, self, is_package=True) if name in self._modules else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """The module is complete."""


def _refuse(*_: object, **__: object) -> Any:
    raise OSError("there is no network")


def prepare() -> None:
    """Make this process one of a bare GPU machine."""
    # pytest's own finder asks this one.
    PathFinder.find_spec = classmethod(_find_installed)  # type: ignore[method-assign]
    PathFinder.find_distributions = classmethod(_installed_distributions)  # type: ignore[method-assign, assignment]
    sys.meta_path.insert(0, _Cupy())  # type: ignore[arg-type]
    for name in MISSING:
        assert name not in sys.modules, f"{name} has been imported before"
    socket.getaddrinfo = socket.create_connection = _refuse  # type: ignore[assignment]
    socket.socket.connect = socket.socket.connect_ex = _refuse  # type: ignore[assignment, method-assign]

    from polarlm.bench import shapes
    from polarlm.bench.lab.gpu import setup
    from polarlm.engine.backends import select
    from tests.cuda import gpu_sizes

    select.driver_version = lambda: _DRIVER
    gpu_sizes.SIZES = gpu_sizes.SMALL
    setup.WARM_SECONDS = 0
    config = shapes.llama(layers=1, hidden_size=256, ffn_size=256, heads=16, kv_heads=2, head_dim=16, vocab_size=64)
    config = replace(config, max_context=128)
    sizes = {"block_size": 16, "blocks": 3, "rotated": 1 << 13, "copied": 1 << 12, "gemm": 32}
    setup.Sizes = partial(setup.Sizes, config, **sizes, rows=(1, 100), runs=1)  # type: ignore[misc, assignment]
    setup.HELD_SECONDS = 0


def main() -> None:
    flag, module, *arguments = sys.argv[1:]
    if flag != "-m":
        sys.exit("usage: python -m tests.bare_machine -m MODULE …")
    prepare()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
