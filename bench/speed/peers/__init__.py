"""Other engines to compare with ours: one file each, which runs in a process of its own.

A file has NAME; LABEL, its name in tables; CACHES, its cache types with the bits of a value (None where nobody says
them); and NOTES, sentences about what it cannot measure or measures otherwise. It runs in the Python that has the
package, so that it imports only that package and the standard library.

What it serves, made from a path, a context, threads and a cache, is a contestant:

- `about()`: its "version", and what it was "built_with";
- `prompt_rate(ids)`: tokens per second of a whole prompt;
- `generation_rate(ids, following)`: len(following) − 1 steps per second, after `ids` and one more token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

DEFAULT = "llama-cpp-python"


class NoPeer(Exception):
    """The peer is not available, or cannot do what is asked; the message is the reason, in a few words for a table."""


@dataclass(frozen=True)
class Peer:
    """What a file of this folder says about itself."""

    name: str
    label: str
    caches: Mapping[str, float | None]  # name → bits per value; None where nobody says them
    notes: Sequence[str]  # sentences
    module: str


@cache
def every() -> Mapping[str, Peer]:
    """Name → peer, the default peer first."""
    modules = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
    peers = [Peer(m.NAME, m.LABEL, m.CACHES, m.NOTES, m.__name__) for m in modules]
    return {peer.name: peer for peer in sorted(peers, key=lambda peer: (peer.name != DEFAULT, peer.name))}


def library(name: str, package: str) -> Any:
    """A peer's library of a package. Raises NoPeer if it is missing, or does not work on this machine."""
    try:
        return import_module(name)
    except ImportError:
        raise NoPeer(f"not installed (pip install {package})") from None
    except (OSError, RuntimeError):  # its shared library is missing
        raise NoPeer("does not start") from None
