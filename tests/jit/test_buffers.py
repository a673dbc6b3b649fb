"""Memory for results returns to its pool when the last view of it is gone; zeros take none until they are written."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine.jit.run.buffers import MOST, Arena, BufferPool, aligned_bytes, is_leased, zeros
from tests.requests.test_forks import begun_in_child


def test_memory_is_used_again_once_no_view_is_left() -> None:
    buffers = BufferPool()
    x = buffers.empty((300, 7))
    address, view = x.ctypes.data, x[5:].reshape(-1)[3:]
    del x
    other = buffers.empty((300, 7))
    assert other.ctypes.data != address
    view[:] = 1
    del view
    assert buffers.empty((300, 7)).ctypes.data == address
    assert buffers.nbytes < 2.5 * other.nbytes + 3 * 4096


def test_memory_is_given_back_once_no_array_uses_any() -> None:
    """Little of it is kept: the next step may need it."""
    buffers = BufferPool()
    x, y = buffers.empty((3000, 700)), buffers.empty((3000, 900))
    del x
    buffers.give_back()
    assert buffers.nbytes > 0
    del y
    buffers.give_back()
    assert buffers.nbytes == 0
    little = buffers.empty((300, 7))
    address = little.ctypes.data
    del little
    buffers.give_back()
    assert buffers.empty((300, 7)).ctypes.data == address


def test_an_arena_fills_its_pieces() -> None:
    """Of 32 MiB: what one matrix leaves over is there for a later one."""
    arena = Arena()
    first, second, third, fourth, fifth = (arena.take(size << 20) for size in (20, 21, 12, 10, 1))
    assert [part.ctypes.data - first.ctypes.data for part in (third,)] == [20 << 20]
    assert [part.ctypes.data - second.ctypes.data for part in (fourth, fifth)] == [21 << 20, 31 << 20]


def test_an_arena_cuts_pieces_without_overlap() -> None:
    arena = Arena()
    sizes = [100, 64, 3 << 20, 40 << 20, 1, 30 << 20, 5]
    parts = [arena.take(size) for size in sizes]
    assert [part.nbytes for part in parts] == sizes
    spans = sorted((part.ctypes.data, part.ctypes.data + part.nbytes) for part in parts)
    assert all(first % 64 == 0 for first, _ in spans)
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(spans))


def test_memory_of_great_size_is_not_kept() -> None:
    buffers = BufferPool()
    buffers.empty((MOST + 1,), np.uint8)
    assert buffers.nbytes == 0


def test_leases_are_aligned_and_told_from_other_arrays() -> None:
    buffers = BufferPool()
    x = buffers.empty((3, 5), np.int16)
    assert (x.shape, x.dtype, x.ctypes.data % 64) == ((3, 5), np.int16, 0)
    assert is_leased(x)
    assert is_leased(x[1:].T)
    assert not is_leased(aligned_bytes(10)[2:])
    assert buffers.empty((0, 4)).shape == (0, 4)


def resident() -> int:
    """Bytes of this process's memory that are no file's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s*(\d+)", status)[1])  # type: ignore[index]


@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (3, 1 << 14), (2, 1 << 20)])
def test_zeros_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    for dtype in (np.uint8, np.float32, "<u2"):
        array, other = zeros(shape, dtype), zeros(shape, dtype)
        np.testing.assert_array_equal(array, np.zeros(shape, dtype), err_msg=str(dtype))  # type: ignore[call-overload]
        assert array.dtype == dtype, dtype
        assert array.flags.writeable, dtype
        array[:] = 7
        assert not other.any(), dtype


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not say what is resident")
def test_zeros_that_are_not_written_take_no_memory() -> None:
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
def test_a_forked_child_writes_to_its_own_zeros() -> None:
    array = zeros((1 << 20,), np.uint8)
    array[0] = 1

    def write() -> int:
        array[:] += 1
        return int(array[0])

    assert begun_in_child(write)() == 2
    assert array[0] == 1
    assert not array[1:].any()


def test_too_many_zeros_are_a_memory_error() -> None:
    for exponent in (60, 70):
        with pytest.raises(MemoryError):
            zeros((1 << exponent,), np.uint8)
