"""A contestant for the tests of child processes: `python -m tests.bench.contestant`."""

from __future__ import annotations

import os
import sys
import threading

from polarlm.bench.speed.child import serve


class Refusal(Exception):
    pass


class Contestant:
    def __init__(self, name: str) -> None:
        if not name:
            raise Refusal("it needs a name")
        self._name = name

    def greet(self, *others: str) -> list[str]:
        print("what a library prints")
        return [self._name, *others]

    def divide(self, by: int) -> float:
        return 1 / by

    def take(self, size: int) -> None:
        self._held = bytearray(b"1" * size)

    def crash(self) -> None:
        sys.stderr.write("GGML_ASSERT failed\n\n")
        sys.stderr.flush()
        os.abort()

    def wait(self) -> None:
        threading.Event().wait()


if __name__ == "__main__":
    serve(Contestant, [Refusal])
