"""Compiled modules of CUDA source texts, which background threads compile before they are needed."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

Module = TypeVar("Module")

_MOST_THREADS = 8  # per process: seldom more texts are missing, and each thread takes some 100 MiB


def compiler_threads() -> int:
    """The number of threads that compile while the model loads: one core stays for loading."""
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 1) - 1))


class Modules(Generic[Module]):
    """The modules of a device. `expect` asks for one before it is needed, `get` waits for it.

    compile: text → module. It is called from several threads and should release Python's lock.
    """

    def __init__(self, compile: Callable[[str], Module], threads: int) -> None:
        self._compile, self._most_threads = compile, threads
        self._lock = threading.Lock()
        self._futures: dict[str, Future[Module]] = {}
        self._queue: deque[str] = deque()
        self._thread_count = 0

    def expect(self, text: str) -> None:
        """Queue a text for compilation. Returns at once."""
        with self._lock:
            if text in self._futures:
                return
            self._futures[text] = Future()
            self._queue.append(text)
            if self._thread_count < self._most_threads:
                # Not a daemon, even if one asks: the compiler must not run while the process exits.
                threading.Thread(target=self._work, name="compiler", daemon=False).start()
                self._thread_count += 1

    def get(self, text: str) -> Module:
        """The module of a text. Raises the compiler's error; the next call then compiles the text again."""
        with self._lock:
            future = self._futures.get(text)
            is_ours = future is None or text in self._queue
            if future is None:
                future = self._futures[text] = Future()
            elif is_ours:
                self._queue.remove(text)
        if is_ours:  # no thread has started on it: compile it here, ahead of the queue
            self._fill(text, future)
        try:
            return future.result()
        except BaseException:
            with self._lock:
                if self._futures.get(text) is future:
                    del self._futures[text]
            raise

    def wait(self, text: str) -> None:
        """Block until the compilation of an expected text has succeeded or failed."""
        with self._lock:
            future = self._futures.get(text)
        if future is not None:
            wait([future])

    def _work(self) -> None:
        """Compile the texts in the queue until it is empty or the main thread has ended."""
        while True:
            with self._lock:
                if not self._queue or not threading.main_thread().is_alive():
                    self._thread_count -= 1
                    return
                text = self._queue.popleft()
                future = self._futures[text]
            self._fill(text, future)

    def _fill(self, text: str, future: Future[Module]) -> None:
        try:
            future.set_result(self._compile(text))
        except BaseException as error:
            future.set_exception(error)
