"""Another engine's server for the same load: llama.cpp's, started from the package xllamacpp, or one that runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from polarlm.bench.serving.options import XLLAMACPP
from polarlm.bench.speed.child import Child
from polarlm.bench.speed.peers import every
from polarlm.engine.backends.native.thread_count import thread_count
from polarlm.engine.cli.flags import FlagError

_CACHE = "f16"  # llama.cpp's default


@dataclass(frozen=True)
class PeerServer:
    """Where a server is, or how it is started."""

    name: str
    place: str  # its URL, or a Python that has the package

    @property
    def is_running(self) -> bool:
        """Whether it runs already."""
        return "://" in self.place

    def thread_counts(self, setting: int) -> list[int]:
        """The numbers of threads to try, of which the best counts: all, and all but one, which leaves a core to the
        clients. setting: as `thread_count` takes it. A single 0 for a server that runs already."""
        if self.is_running:
            return [0]
        count = thread_count(setting).number
        return sorted({max(1, count - 1), count})

    @contextmanager
    def started(self, path: str, sequences: int, context: int, threads: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """A context with its URL, and what is known of it.

        path: of the model's .gguf file. sequences: how many it has room for, of `context` tokens each. Raises Failed.
        """
        if self.is_running:
            yield self.place.rstrip("/").removesuffix("/v1"), {}
            return
        with closing(Child(every()[XLLAMACPP].module, self.place)) as child:
            child.call("start", path, context, threads, _CACHE, sequences)
            yield child.call("address"), child.call("about")


def read_peer(text: str) -> PeerServer:
    """The server of --peer NAME=PLACE. Raises FlagError."""
    name, _, place = (part.strip() for part in text.partition("="))
    peer = PeerServer(name, place)
    if not name or not place or not (peer.is_running or name == XLLAMACPP):
        raise FlagError(f"--peer {text}: give {XLLAMACPP}=PYTHON, a Python that has it, or NAME=URL of a server")
    return peer
