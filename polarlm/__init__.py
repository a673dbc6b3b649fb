"""PolarLM: a local inference engine whose KV cache is stored as polar codes.

>>> from polarlm import Engine, SamplingParams  # doctest: +SKIP
>>> with Engine.load("./llama3") as engine:  # doctest: +SKIP
...     for chunk in engine.stream("Once upon a time", SamplingParams(max_tokens=64)):
...         print(chunk.text, end="", flush=True)

All of the project is imported under this name: `polarlm.engine`, `polarlm.server`, `polarlm.model_loaders`. In a
checkout these folders are siblings of this one. The names of `polarlm.engine` are imported when they are first used, so
that a module that needs none of them starts without it.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from polarlm import aliases

if not (Path(__file__).parent / "engine").is_dir():  # a checkout on a system without symbolic links
    __path__.append(str(Path(__file__).resolve().parents[1]))

aliases.install()


def _tell_errors(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C while the modules of a command are imported ends it, and is no error to tell of."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if [Path(program).stem for program in sys.argv[:1]] in (["-m"], ["polarlm"]):  # `python -m polarlm.server`, `polarlm`
    sys.excepthook = _tell_errors

from polarlm.engine import __all__  # noqa: E402 - errors while it is imported are told as above

if TYPE_CHECKING:
    from polarlm.engine import *


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("polarlm.engine.version").release() or "0.0.0"
    if name not in __all__:
        raise AttributeError(f"module 'polarlm' has no attribute {name!r}")
    return getattr(import_module("polarlm.engine"), name)


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__version__"]
