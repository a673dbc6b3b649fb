"""The tables of a step's spans."""

from __future__ import annotations

import pytest

from polarlm.engine.backends.kv import KVLocation, SpanView
from polarlm.engine.backends.native.attention_ops.step_table import SpanHeader, StepTable


def view(
    first: int, rows: int, position: int, blocks: int, following: tuple[int, ...] = (), kept: int = 0, n: int = 16
) -> SpanView:
    """A sequence with a sink in slot 7, and quantized blocks 100, 101, … before those in full precision, which begin in
    slot 5. kept: how many of these are complete."""
    start = (position // n - kept) * n
    return SpanView(
        rows=slice(first, first + rows),
        position=position,
        current=KVLocation(None, 5),
        current_start=start,
        sink=7 if position >= n else None,
        table=range(100, 100 + blocks),
        table_start=start - blocks * n,
        following=following,
    )


def test_the_rows_of_a_sequence_go_to_the_blocks_that_hold_their_positions() -> None:
    table = StepTable([view(0, 1, 3, 0), view(1, 4, 78, 3, following=(9,))], 16)
    assert table.arrays.places.tolist() == [[5, 3], [5, 14], [5, 15], [9, 0], [9, 1]]
    assert table.arrays.row_sequences.tolist() == [0, 1, 1, 1, 1]
    assert table.arrays.full[0, :1].tolist() == [[5, 0]]
    assert table.arrays.full[1, :3].tolist() == [[7, 0], [5, 64], [9, 80]]
    assert SpanHeader(*table.arrays.headers[1].tolist()) == SpanHeader(1, 4, 78, 3, 16, 32, 1, 2, 3)
    assert table.arrays.table[1, :3].tolist() == [100, 101, 102]
    assert table.arrays.units[: table.unit_count].tolist() == [[1, 1], [0, 0], [1, 0]]


def test_a_window_in_full_precision_is_cut_into_chunks_behind_those_of_codes() -> None:
    table = StepTable([view(0, 2, 335, 3, tuple(range(20, 37)), kept=16), view(2, 1, 5, 0)], 16)
    assert table.arrays.places.tolist() == [[35, 15], [36, 0], [5, 5]]
    assert table.arrays.full[0, :3].tolist() == [[7, 0], [5, 64], [20, 80]]
    assert SpanHeader(*table.arrays.headers[0].tolist()) == SpanHeader(0, 2, 335, 3, 16, 32, 3, 4, 19)
    assert table.arrays.units[: table.unit_count].tolist() == [[0, 3], [0, 0], [1, 0], [0, 1], [0, 2]]


@pytest.mark.parametrize("blocks", [1, 32, 33, 2049, 10_000])
def test_chunks_cover_all_quantized_blocks(blocks: int) -> None:
    table = StepTable([view(0, 1, 16 * (blocks + 1), blocks)], 16)
    header = SpanHeader(*table.arrays.headers[0].tolist())
    chunks = sorted(chunk for _, chunk in table.arrays.units[: table.unit_count].tolist())
    assert chunks == list(range(header.chunks))
    assert (header.chunks - 2) * header.chunk_blocks < blocks <= (header.chunks - 1) * header.chunk_blocks
    assert header.chunks <= table.arrays.most_chunks


def test_tables_with_the_same_key_are_copied_into_each_other() -> None:
    target, source = (StepTable([view(0, 1, 16 * (blocks + 1) + 5, blocks)], 16) for blocks in (40, 60))
    address = target.arrays.table.ctypes.data
    assert target.key == source.key != StepTable([view(0, 1, 16 * 70, 69)], 16).key
    target.copy_from(source)
    assert target.arrays.table.ctypes.data == address
    assert (target.arrays.table == source.arrays.table).all()
    assert (target.arrays.headers == source.arrays.headers).all()
    assert target.unit_count == source.unit_count
    assert list(target) == list(source)
