"""Work with one BLAS thread each leaves the number of BLAS threads, which is one for the process, as it was."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from polarlm.engine.backends.numpy import blas


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = blas.threads()
    blas.use_threads(2)
    yield
    blas.use_threads(before)


def test_callers_of_parallel_map_take_turns_and_leave_the_number_of_threads() -> None:
    if blas.threads() < 2:
        pytest.skip("this BLAS has one thread")
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: blas.parallel_map(lambda i: (i, blas.threads()), 4), range(6)))
    assert results == [[(i, 1) for i in range(4)]] * 6
    with pytest.raises(ZeroDivisionError):
        blas.parallel_map(lambda i: 1 // i, 2)
    assert blas.threads() == 2
