"""The compiled kernels of this process."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from polarlm.engine.errors import KernelError
from polarlm.engine.jit.compile.compiler import LoadedCode, cacheable_code, compile_object, load
from polarlm.engine.jit.compile.object_cache import ObjectCache, object_cache
from polarlm.engine.jit.isa import VARIABLE
from polarlm.engine.jit.lang import Kernel, Level
from polarlm.model_loaders.forks import renew_in_children

_TRANSIENT_ERRORS = (OSError, ImportError)  # errors of the system, which a kernel may not have the next time


class Library:
    """The kernels of one level. A thread reads them from the user's cache folder or compiles them.

    `expect` asks for kernels before they are needed, so that they are compiled while a model loads.
    """

    def __init__(self, level: Level, cache: ObjectCache | None) -> None:
        self.level, self._cache = level, cache
        self.compiled, self.compile_seconds = 0, 0.0  # kernels that the cache did not have; CPU time
        self._loaded: dict[Kernel, LoadedCode] = {}
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Forget the thread and its queue: for a forked child, which does not have the thread."""
        self._lock = threading.Lock()
        self._futures: dict[Kernel, Future[LoadedCode]] = {}  # kernels not loaded yet, or that the compiler refuses
        self._queue: deque[Kernel] = deque()
        self._has_thread = False

    def address(self, kernel: Kernel) -> int:
        """The address of the compiled kernel. Raises KernelError if it cannot be compiled or loaded."""
        loaded = self._loaded.get(kernel)
        if loaded is None:
            loaded = self._request(kernel, first=True).result()
        return loaded.address

    def expect(self, kernels: Iterable[Kernel], *, first: bool = False) -> None:
        """Queue these kernels for compilation, in this order; first: before all others. Returns at once."""
        for kernel in reversed([*kernels]) if first else kernels:
            if kernel not in self._loaded:
                self._request(kernel, first=first)

    def has(self, kernel: Kernel) -> bool:
        return kernel in self._loaded

    def wait(self, kernels: Iterable[Kernel], progress: Callable[[int, int], None] = lambda done, count: None) -> None:
        """Wait until these kernels are compiled, calling progress(number done, number of all).

        Raises KernelError if one cannot be compiled or loaded.
        """
        requested = list(kernels)
        for done, kernel in enumerate(requested):
            progress(done, len(requested))
            self.address(kernel)
        progress(len(requested), len(requested))

    def _request(self, kernel: Kernel, *, first: bool = False) -> Future[LoadedCode]:
        """The future of a kernel, which is queued if it is new; first: it moves to the head of the queue."""
        with self._lock:
            future = self._futures.get(kernel)
            if future is None:
                future = Future()
                if (loaded := self._loaded.get(kernel)) is not None:
                    future.set_result(loaded)
                    return future
                self._futures[kernel] = future
                self._queue.append(kernel)
            if first and kernel in self._queue:
                self._queue.remove(kernel)
                self._queue.appendleft(kernel)
            if self._queue and not self._has_thread:
                # Not a daemon, even if one asks: LLVM must not run while the process exits.
                threading.Thread(target=self._work, name="compiler", daemon=False).start()
                self._has_thread = True
        return future

    def _work(self) -> None:
        """Compile the kernels in the queue until it is empty or the main thread has ended."""
        while True:
            with self._lock:
                if not self._queue or not threading.main_thread().is_alive():
                    self._has_thread = False
                    return
                kernel = self._queue.popleft()
                future = self._futures[kernel]
            code = None
            try:
                loaded, code = self._load(kernel)
            except BaseException as error:
                if isinstance(error, MemoryError) or isinstance(error.__cause__, _TRANSIENT_ERRORS):
                    with self._lock:
                        del self._futures[kernel]  # whoever needs it next asks again
                future.set_exception(error)
                continue
            with self._lock:
                self._loaded[kernel] = loaded
                del self._futures[kernel]
            future.set_result(loaded)
            if code is not None and self._cache is not None:
                self._cache.write(kernel.name, code)

    def _load(self, kernel: Kernel) -> tuple[LoadedCode, bytes | None]:
        """The loaded kernel, and its code if the cache did not have it. Raises KernelError."""
        try:
            code = self._cache.read(kernel.name) if self._cache is not None else None
            if code is not None:
                return load(code, self.level), None
            start = time.thread_time()
            code = cacheable_code(compile_object(kernel, self.level))
            self.compiled += 1
            self.compile_seconds += time.thread_time() - start
            return load(code, self.level), code
        except MemoryError:
            raise
        except _TRANSIENT_ERRORS as error:
            number = error.errno if isinstance(error, OSError) else None
            reason = str(error) if number is None else os.strerror(number)
            help_ = "raise the limit of open files (ulimit -n) or close some, and " if number == errno.EMFILE else ""
            raise KernelError(f"The kernel {kernel.name} cannot be loaded now: {reason}; {help_}try again") from error
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise KernelError(
                f"The kernel {kernel.name} cannot be compiled for this CPU: {reason}; set {VARIABLE} to a lower level"
            ) from error

    @property
    def failed_names(self) -> list[str]:
        """The names of the kernels that could not be compiled."""
        with self._lock:
            futures = list(self._futures.items())
        return sorted(kernel.name for kernel, future in futures if future.done() and future.exception() is not None)

    @property
    def names(self) -> list[str]:
        return sorted(kernel.name for kernel in list(self._loaded))


_instances: dict[tuple[Level, tuple[Path, ...]], Library] = {}


def library(level: Level, sources: tuple[Path, ...] = ()) -> Library:
    """This process's library of a level, for kernels whose code is in the folders `sources` (see `object_cache`)."""
    # Without a lock, which could stay locked in a forked child: if two threads make one at once, the first is used.
    key = level, sources
    return _instances.get(key) or _instances.setdefault(key, Library(level, object_cache(level, sources)))


def compiled() -> tuple[int, float]:
    libraries = list(_instances.values())
    return sum(each.compiled for each in libraries), sum(each.compile_seconds for each in libraries)
