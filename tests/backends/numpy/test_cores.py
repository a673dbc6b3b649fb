"""The number of BLAS threads is one for the process: however many set it back, it is right at the end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from polarlm.engine.backends.numpy.cores import Cores, cores

PATIENCE = 60


class Library:
    """What threadpoolctl knows of a BLAS."""

    internal_api = "openblas"

    def __init__(self, number: int) -> None:
        self.num_threads = number

    def set_num_threads(self, number: int) -> None:
        self.num_threads = number

    def info(self) -> dict[str, str]:
        return {"architecture": "Haswell"}


def test_the_last_thread_to_finish_restores_the_number() -> None:
    """Two threads overlap in the order in which saving and restoring by each would leave one thread forever."""
    library = Library(4)
    shared = Cores([library])  # type: ignore[list-item]
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first() -> None:
        with shared.one_each():
            first_in.set()
            assert second_in.wait(PATIENCE)
        first_out.set()

    def second() -> None:
        assert first_in.wait(PATIENCE)
        with shared.one_each():
            second_in.set()
            assert first_out.wait(PATIENCE)
            assert (library.num_threads, shared.number) == (1, 4)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(first), pool.submit(second)]:
            done.result(PATIENCE)
    assert (library.num_threads, shared.number) == (4, 4)


def test_a_number_set_inside_one_each_holds_afterwards() -> None:
    library = Library(4)
    shared = Cores([library])  # type: ignore[list-item]
    with shared.one_each():
        shared.use(3)
        assert (library.num_threads, shared.number) == (1, 3)
    assert (library.num_threads, shared.number) == (3, 3)


def test_parallel_map_uses_all_threads_and_waits_for_them() -> None:
    shared = Cores([Library(2)])  # type: ignore[list-item]
    together = threading.Barrier(2)

    def work(i: int) -> int:
        together.wait(PATIENCE)
        return i

    assert shared.parallel_map(work, 2) == [0, 1]
    done: list[int] = []

    def fails(i: int) -> None:
        together.wait(PATIENCE)
        if i == 0:
            raise ValueError("no")
        done.append(i)

    with pytest.raises(ValueError, match="no"):
        shared.parallel_map(fails, 2)
    assert done == [1]


class PerThreadLibrary(Library):
    """A BLAS on OpenMP, which keeps a number for each thread; a new one has as many as there are cores."""

    threading_layer = "openmp"

    def __init__(self) -> None:
        self._own = threading.local()

    @property
    def num_threads(self) -> int:
        return getattr(self._own, "number", 4)

    def set_num_threads(self, number: int) -> None:
        self._own.number = number


def test_each_part_has_one_thread_where_the_library_has_a_number_per_thread() -> None:
    library, together = PerThreadLibrary(), threading.Barrier(3)
    shared = Cores([library])  # type: ignore[list-item]

    def work(i: int) -> int:
        together.wait(PATIENCE)
        return library.num_threads

    assert shared.parallel_map(work, 3) == [1, 1, 1]
    assert (library.num_threads, shared.number) == (4, 4)


def test_with_one_core_parallel_map_runs_in_order_in_this_thread() -> None:
    shared = Cores([Library(1)])  # type: ignore[list-item]
    assert shared.parallel_map(lambda i: (i, threading.get_ident()), 3) == [
        (i, threading.get_ident()) for i in range(3)
    ]


def test_without_a_known_blas_library_there_is_one_thread() -> None:
    shared = Cores([])
    with shared.one_each():
        assert shared.number == 1
    assert shared.number == 1


@pytest.mark.skipif(not cores()._libraries, reason="NumPy's BLAS here has no number of threads that can be set")
def test_any_thread_can_set_the_number_for_all() -> None:
    """The thread of a server that works is not the one that loaded the model and set -t."""
    before = cores().number

    def inside() -> int:
        with cores().one_each():
            return cores()._now

    try:
        cores().use(2)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(inside).result(PATIENCE) == 1
            assert cores()._now == 2
            pool.submit(cores().use, 3).result(PATIENCE)
        assert cores()._now == 3
    finally:
        cores().use(before)
