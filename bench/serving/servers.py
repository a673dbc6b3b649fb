"""The servers of a measurement: ours in a process of its own, and another engine's for the same load."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from polarlm.bench.serving.options import XLLAMACPP
from polarlm.bench.speed.child import Child
from polarlm.bench.speed.peers import every
from polarlm.engine import EngineError
from polarlm.engine.backends.native.thread_count import thread_count
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError

_LAST_SECONDS = 60.0  # seconds for the process to end
_CACHE = "f16"  # llama.cpp's default


@contextmanager
def own_server(flags: Sequence[str]) -> Iterator[str]:
    """A context with the URL of a server, started with `flags` on a free port. Raises EngineError."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        command = [sys.executable, "-m", "polarlm", "serve", "--port", "0", *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            try:
                address = re.search(r"http://\S+", process.stdout.readline())
                errors.seek(0)
                lines = errors.read().splitlines() or ["it lines nothing"]
                if address is None:
                    raise EngineError(f"The server did not start: {lines[-1].removeprefix('error: ')}")
                note(lines[-1])
                yield address[0]
            finally:
                process.terminate()
                try:
                    process.wait(_LAST_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()


@dataclass(frozen=True)
class PeerServer:
    """Where another engine's server is, or how it is started: llama.cpp's, from the package xllamacpp."""

    name: str
    place: str  # its URL, or a Python that has the package

    @classmethod
    def read(cls, text: str) -> PeerServer:
        """The server of --peer NAME=PLACE. Raises FlagError."""
        name, _, place = (part.strip() for part in text.partition("="))
        peer = cls(name, place)
        if not name or not place or not (peer.is_running or name == XLLAMACPP):
            raise FlagError(f"--peer {text}: give {XLLAMACPP}=PYTHON, a Python that has it, or NAME=URL of a server")
        return peer

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
