"""The tables of a step's spans."""

from __future__ import annotations

import dataclasses

import pytest

from polarlm.engine.backends.kv import KVLocation, SpanView
from polarlm.engine.backends.native.attention_ops.step_table import SpanHeader, StepTable


def view(first: int, rows: int, position: int, blocks: int, following: tuple[int, ...] = (), n: int = 16) -> SpanView:
    """A sequence with a sink in slot 7, and quantized blocks 100, 101, … before the current one in slot 5."""
    return SpanView(
        rows=slice(first, first + rows),
        position=position,
        current=KVLocation(None, 5),
        current_start=position // n * n,
        sink=7 if position >= n else None,
        table=range(100, 100 + blocks),
        table_start=position // n * n - blocks * n,
        following=following,
    )


def test_the_rows_of_a_sequence_go_to_its_current_block_and_those_that_follow() -> None:
    table = StepTable([view(0, 1, 3, 0), view(1, 4, 78, 3, following=(9,))], 16)
    assert table.arrays.places.tolist() == [[5, 3], [5, 14], [5, 15], [9, 0], [9, 1]]
    assert table.arrays.row_sequences.tolist() == [0, 1, 1, 1, 1]
    assert table.arrays.full[0, :1].tolist() == [[5, 0]]
    assert table.arrays.full[1].tolist() == [[7, 0], [5, 64], [9, 80]]
    assert SpanHeader(*table.arrays.headers[0, 1].tolist()) == SpanHeader(1, 4, 78, 3, 16, 32, 1, 2, 3)
    assert table.arrays.table[1, :3].tolist() == [100, 101, 102]
    assert table.arrays.units[0, : table.unit_counts[0]].tolist() == [[1, 1], [0, 0], [1, 0]]


@pytest.mark.parametrize("blocks", [1, 32, 33, 2049, 10_000])
def test_chunks_cover_all_quantized_blocks(blocks: int) -> None:
    table = StepTable([view(0, 1, 16 * (blocks + 1), blocks)], 16)
    header = SpanHeader(*table.arrays.headers[0, 0].tolist())
    chunks = sorted(chunk for _, chunk in table.arrays.units[0, : table.unit_counts[0]].tolist())
    assert chunks == list(range(header.chunks))
    assert (header.chunks - 2) * header.chunk_blocks < blocks <= (header.chunks - 1) * header.chunk_blocks
    assert header.chunks <= table.arrays.most_chunks


@pytest.mark.parametrize(("high_precision", "others"), [(0, 0), (0, 40), (3, 0), (3, 1), (40, 2000)])
def test_the_first_high_precision_blocks_share_a_chunk_with_those_in_full_precision(
    high_precision: int, others: int
) -> None:
    one = view(0, 1, 16 * (high_precision + others + 1), others)
    table = StepTable([dataclasses.replace(one, high_precision=range(7000, 7000 + high_precision))], 16)
    headers = [SpanHeader(*header.tolist()) for header in table.arrays.headers[:, 0]]
    read: list[int] = []
    for header, units, count in zip(headers, table.arrays.units, table.unit_counts, strict=True):
        for _, chunk in sorted(units[:count].tolist()):
            begin = (chunk - header.first_quantized) * header.chunk_blocks
            if begin < 0:
                continue
            read += table.arrays.table[0, begin : min(begin + header.chunk_blocks, header.quantized)].tolist()
    assert read == [*range(7000, 7000 + high_precision), *range(100, 100 + others)]
    assert headers[0].first_quantized == (0 if high_precision and others else 1)
    assert sum(table.unit_counts) == headers[0].chunks <= table.arrays.most_chunks


def test_tables_with_the_same_key_are_copied_into_each_other() -> None:
    target, source = (StepTable([view(0, 1, 16 * (blocks + 1) + 5, blocks)], 16) for blocks in (40, 60))
    address = target.arrays.table.ctypes.data
    assert target.key == source.key != StepTable([view(0, 1, 16 * 70, 69)], 16).key
    target.copy_from(source)
    assert target.arrays.table.ctypes.data == address
    assert (target.arrays.table == source.arrays.table).all()
    assert (target.arrays.headers == source.arrays.headers).all()
    assert target.unit_counts == source.unit_counts
    assert list(target) == list(source)
