"""The threads of the BLAS that NumPy has loaded: their number is one for the whole process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from threadpoolctl import ThreadpoolController

from polarlm.model_loaders.forks import renew_in_children

Result = TypeVar("Result")


class _MapLock:
    """The lock of `parallel_map`."""

    def __init__(self) -> None:
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        self.lock = threading.Lock()


_libraries = ThreadpoolController().select(user_api="blas").lib_controllers
_map_lock = _MapLock()


def threads() -> int:
    """The number of threads of BLAS."""
    return max((library.num_threads for library in _libraries), default=1)


def use_threads(number: int) -> None:
    """Set the number of threads of BLAS, or of BLAS called by this thread where a library has a number for each."""
    for library in _libraries:
        # threadpoolctl ≥ 3.8 ignores all threads but the first one that set a number.
        release = getattr(library, "clear_controlling_thread", None)
        if release:
            release(force=True)
        library.set_num_threads(number)
        if release:
            release(force=True)


def parallel_map(work: Callable[[int], Result], count: int) -> list[Result]:
    """[work(0), …, work(count − 1)] on as many threads as BLAS has; each calls a BLAS of one thread: for
    products so small that threads of BLAS would mostly wait for each other."""
    with _map_lock.lock:  # two callers could set back the number of the other
        number = threads()
        if number == 1:
            return list(map(work, range(count)))
        use_threads(1)
        try:
            with ThreadPoolExecutor(number, initializer=use_threads, initargs=(1,)) as pool:
                return list(pool.map(work, range(count)))
        finally:
            use_threads(number)
