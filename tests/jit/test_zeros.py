"""Zeros that take no memory until they are written."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine.jit.run.zeros import zeros
from tests.requests.test_forks import begun_in_child


def resident() -> int:
    """Bytes of this process's memory that are no file's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s*(\d+)", status)[1])  # type: ignore[index]


@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (3, 1 << 14), (2, 1 << 20)])
def test_they_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    for dtype in (np.uint8, np.float32, "<u2"):
        array, other = zeros(shape, dtype), zeros(shape, dtype)
        np.testing.assert_array_equal(array, np.zeros(shape, dtype), err_msg=str(dtype))  # type: ignore[call-overload]
        assert array.dtype == dtype, dtype
        assert array.flags.writeable, dtype
        array[:] = 7
        assert not other.any(), dtype


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not say what is resident")
def test_what_is_not_written_takes_no_memory() -> None:
    # The C library keeps the memory of many small arrays, and would hand it out again, filled with zeros.
    np.zeros(16 << 20, np.uint8)[:] = 1
    used = [np.ones(1 << 18, np.uint8) for _ in range(256)]
    del used
    before = resident()
    arrays = [zeros((1 << 20,), np.uint8) for _ in range(64)]
    assert resident() - before < 8 << 20
    for array in arrays[::2]:
        array[:] = 1
    assert 32 << 20 <= resident() - before < 40 << 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_writes_to_its_own() -> None:
    array = zeros((1 << 20,), np.uint8)
    array[0] = 1

    def write() -> int:
        array[:] += 1
        return int(array[0])

    assert begun_in_child(write)() == 2
    assert array[0] == 1
    assert not array[1:].any()


def test_too_much_is_a_memory_error() -> None:
    for exponent in (60, 70):
        with pytest.raises(MemoryError):
            zeros((1 << exponent,), np.uint8)
