"""Memory for results returns to its pool when the last view of it is gone."""

from __future__ import annotations

import itertools

import numpy as np

from polarlm.engine.jit.run.buffers import MOST, Arena, Buffers, aligned, is_leased


def test_memory_is_used_again_once_no_view_is_left() -> None:
    buffers = Buffers()
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
    buffers = Buffers()
    x, y = buffers.empty((300, 7)), buffers.empty((300, 9))
    del x
    buffers.give_back()
    assert buffers.nbytes > 0
    del y
    buffers.give_back()
    assert buffers.nbytes == 0
    assert buffers.empty((300, 7)).shape == (300, 7)


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
    buffers = Buffers()
    buffers.empty((MOST + 1,), np.uint8)
    assert buffers.nbytes == 0


def test_leases_are_aligned_and_told_from_other_arrays() -> None:
    buffers = Buffers()
    x = buffers.empty((3, 5), np.int16)
    assert (x.shape, x.dtype, x.ctypes.data % 64) == ((3, 5), np.int16, 0)
    assert is_leased(x)
    assert is_leased(x[1:].T)
    assert not is_leased(aligned(10)[2:])
    assert buffers.empty((0, 4)).shape == (0, 4)
