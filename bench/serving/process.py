"""Starts a server for a measurement in its own process."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from polarlm.engine import EngineError
from polarlm.engine.cli.commands import note

_LAST_SECONDS = 60.0  # seconds for the process to end


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
                said = errors.read().splitlines() or ["it said nothing"]
                if address is None:
                    raise EngineError(f"The server did not start: {said[-1].removeprefix('error: ')}")
                note(said[-1])
                yield address[0]
            finally:
                process.terminate()
                try:
                    process.wait(_LAST_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
