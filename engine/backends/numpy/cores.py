"""The processor's cores, which BLAS and threads of ours share: one number for the whole process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache

from threadpoolctl import LibController, ThreadpoolController

from engine.backends.ops import Result
from model_loaders.forks import renew_in_children


class Cores:
    """How many threads BLAS uses, set for and by any number of engines and threads at a time.

    Who sets the number and later puts back what was there leaves a wrong one where two do so at the same time: so
    those who want one thread are counted, and the last of them puts the number back. Libraries that keep a number for
    each thread (OpenBLAS with OpenMP, MKL) need none of this.
    """

    def __init__(self, libraries: list[LibController]):
        self._libraries = libraries
        self._each_its_own = [library for library in libraries if _is_per_thread(library)]
        self._shared = [library for library in libraries if not _is_per_thread(library)]
        self._lock = threading.Lock()
        self._alone: set[object] = set()  # one for each `one_each` that has not ended
        self._usual = self._now
        self._pool = self._new_pool()
        renew_in_children(self)

    @property
    def _now(self) -> int:
        return max((library.num_threads for library in self._libraries), default=1)

    @property
    def number(self) -> int:
        """Threads of BLAS outside `one_each`."""
        with self._lock:
            return self._usual if self._alone else self._now

    @property
    def kernels(self) -> set[str]:
        """Names of the processors that the BLAS kernels are made for, as the libraries spell them."""
        return {library.info().get("architecture", "") for library in self._libraries}

    def use(self, number: int) -> None:
        """Set the number of threads of BLAS for the whole process; where each thread has a number, for this one."""
        with self._lock:
            self._usual = number
            _apply(self._each_its_own, number)
            if not self._alone:
                _apply(self._shared, number)

    @contextmanager
    def one_each(self) -> Iterator[None]:
        """Inside, a call of BLAS stays in the thread that makes it, whichever thread of this process that is."""
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
        """[work(0), …, work(count − 1)], at the same time where BLAS has more than one thread.

        BLAS uses all cores for one product, but everything between two products would run on one: so each core gets a
        part of the work and a BLAS of its own.
        """
        if count == 1 or self.number == 1:
            return [work(i) for i in range(count)]
        with self.one_each():
            later = [self._pool.submit(work, i) for i in range(1, count)]
            try:
                return [work(0), *(task.result() for task in later)]
            finally:
                wait(later)  # nothing may go on writing once an error is out

    def _new_pool(self) -> ThreadPoolExecutor:
        """Threads that work inside `one_each` alone."""
        return ThreadPoolExecutor(thread_name_prefix="part", initializer=_apply, initargs=(self._each_its_own, 1))

    def renew(self) -> None:
        """Make lock and pool anew in a forked child: threads of the pool, and those in `one_each`, are the parent's."""
        self._lock = threading.Lock()
        self._pool = self._new_pool()
        if self._alone:
            self._alone.clear()
            _apply(self._shared, self._usual)


def _is_per_thread(library: LibController) -> bool:
    return library.internal_api == "mkl" or getattr(library, "threading_layer", "") == "openmp"


def _apply(libraries: list[LibController], number: int) -> None:
    for library in libraries:
        # From version 3.8 on, threadpoolctl does nothing in other threads than the first one that set a number.
        let_go = getattr(library, "clear_controlling_thread", None)
        if let_go:
            let_go(force=True)
        library.set_num_threads(number)
        if let_go:
            let_go(force=True)


@cache
def cores() -> Cores:
    """The cores of this process, with the BLAS that NumPy has loaded."""
    return Cores(ThreadpoolController().select(user_api="blas").lib_controllers)
