"""The number of BLAS threads, which the whole process shares, and a thread pool for work with one BLAS thread each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

from threadpoolctl import LibController, ThreadpoolController

from polarlm.engine.backends.ops import Result
from polarlm.model_loaders.forks import renew_in_children


class Cores:
    """The number of BLAS threads, shared by any number of engines and threads.

    If two threads each saved, changed and restored the number, they could restore a wrong one. So active calls of
    `one_each` are counted, and the last to end restores it. Libraries with a number per thread (OpenBLAS with OpenMP,
    MKL) do not need this.
    """

    def __init__(self, libraries: list[LibController]):
        self._libraries = libraries
        self._each_its_own = [library for library in libraries if _is_per_thread(library)]
        self._shared = [library for library in libraries if not _is_per_thread(library)]
        self._lock = threading.Lock()
        self._alone: set[object] = set()  # one for each active `one_each`
        self._usual = self._now
        self._pool = self._new_pool()
        renew_in_children(self)

    @property
    def _now(self) -> int:
        return max((library.num_threads for library in self._libraries), default=1)

    @property
    def number(self) -> int:
        """BLAS threads outside `one_each`."""
        with self._lock:
            return self._usual if self._alone else self._now

    def use(self, number: int) -> None:
        """Set the number of BLAS threads of the process, or of this thread for libraries with a number per thread."""
        with self._lock:
            self._usual = number
            _apply(self._each_its_own, number)
            if not self._alone:
                _apply(self._shared, number)

    @contextmanager
    def one_each(self) -> Iterator[None]:
        """A context in which BLAS runs on the calling thread alone, in every thread of the process."""
        mine = object()
        with self._lock:
            if not self._alone:
                self._usual = self._now
                _apply(self._shared, 1)
            self._alone.add(mine)
            own = [library.num_threads for library in self._each_its_own]
            _apply(self._each_its_own, 1)
        try:
            yield
        finally:
            with self._lock:
                for library, number in zip(self._each_its_own, own, strict=True):
                    library.set_num_threads(number)
                if mine in self._alone:  # not in a child that was forked here
                    self._alone.remove(mine)
                    if not self._alone:
                        _apply(self._shared, self._usual)

    def parallel_map(self, work: Callable[[int], Result], count: int) -> list[Result]:
        """[work(0), …, work(count − 1)], in parallel if BLAS has more than one thread.

        BLAS would use all cores for a product but leave the work between products on one. So each core takes a part of
        the work, with single-threaded BLAS.
        """
        if count == 1 or self.number == 1:
            return [work(i) for i in range(count)]
        with self.one_each():
            later = [self._pool.submit(work, i) for i in range(1, count)]
            try:
                return [work(0), *(task.result() for task in later)]
            finally:
                wait(later)  # no part may still write after an error was raised

    def _new_pool(self) -> ThreadPoolExecutor:
        """A pool whose threads run only inside `one_each`."""
        return ThreadPoolExecutor(thread_name_prefix="part", initializer=_apply, initargs=(self._each_its_own, 1))

    def renew(self) -> None:
        """Replace lock and pool in a forked child, in which the threads of the pool and of `one_each` do not exist."""
        self._lock = threading.Lock()
        self._pool = self._new_pool()
        if self._alone:
            self._alone.clear()
            _apply(self._shared, self._usual)


def _is_per_thread(library: LibController) -> bool:
    return library.internal_api == "mkl" or getattr(library, "threading_layer", "") == "openmp"


def _apply(libraries: list[LibController], number: int) -> None:
    for library in libraries:
        # threadpoolctl ≥ 3.8 ignores all threads but the first one that set a number.
        release = getattr(library, "clear_controlling_thread", None)
        if release:
            release(force=True)
        library.set_num_threads(number)
        if release:
            release(force=True)


_of_this_process: list[Cores] = []


def cores() -> Cores:
    """The cores of this process, with the BLAS that NumPy has loaded."""
    if not _of_this_process:
        # Without a lock, which could stay locked in a forked child: if two threads make one at once, the first is used.
        _of_this_process.append(Cores(ThreadpoolController().select(user_api="blas").lib_controllers))
    return _of_this_process[0]
