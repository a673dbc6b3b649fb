"""Batch sizes of steps, padded to buckets with empty rows, so that steps are recorded for few batch sizes.

An empty row has token 0, a span without rows, and greedy sampling. By its span it writes no keys and values and sees no
token. No kernel mixes rows, and all batches of a bucket take the same kernels, so the results of the other rows are
bit-equal whatever rows are empty. Where a sequence has several rows, rows and spans are padded apart, and the most rows
of a sequence are rounded up to a number of `DRAFT_ROWS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polarlm.engine.backends.cuda.device import PaddedInput, PeerCopy
from polarlm.engine.backends.cuda.kv.cache import HostTable, SpanHeader, SpanTable, with_rows
from polarlm.engine.backends.cuda.launch_configs import SMALL_ROWS
from polarlm.engine.limits import DRAFT_ROWS

_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, SMALL_ROWS)


def bucket(rows: int) -> int:
    """The number of rows that a batch of `rows` rows is padded to. Blocks of products have SMALL_ROWS rows, so only
    the remainder is padded."""
    full, left = rows // SMALL_ROWS * SMALL_ROWS, rows % SMALL_ROWS
    return full + next(size for size in _BUCKETS if size >= left) if left else full


def pad_rows(inputs: Sequence[Any]) -> Sequence[Any]:
    """The inputs of `Ops.run_graph`, padded with empty rows to their bucket; but not if a sequence has several rows and
    recurrent layers, whose tables have a row for each sequence."""
    count, most = inputs[0].shape[0], max((x.most_rows for x in inputs if isinstance(x, SpanTable)), default=1)
    rows = bucket(count)
    if rows == count if most == 1 else any(x.shape[0] != count for x in inputs if not isinstance(x, HostTable)):
        return inputs
    return [_spans(x, count, rows, most) if isinstance(x, SpanTable) else _pad_input(x, rows) for x in inputs]


def _spans(x: SpanTable, count: int, rows: int, most: int) -> SpanTable:
    """The spans of `count` rows for `rows` rows. An empty row after others needs an empty span after theirs."""
    table = with_rows(x.table, rows if most == 1 else bucket(len(x.table) + 1))
    table[len(x.table) :, SpanHeader._fields.index("first_row")] = count
    return replace(x, table=table, copies={}, most_rows=next(size for size in (1, *DRAFT_ROWS) if size >= most))


def _pad_input(x: Any, rows: int) -> Any:
    if isinstance(x, HostTable):
        return x.pad_rows(rows)
    if isinstance(x, PeerCopy):
        return x._replace(rows=rows)
    return x._replace(filler=with_rows(x.filler, rows)) if isinstance(x, PaddedInput) else with_rows(x, rows)


def first_rows(result: Any, rows: int) -> Any:
    """The first `rows` rows of a result of `Ops.run_graph`, an array or a tuple of arrays."""
    return tuple(x[:rows] for x in result) if isinstance(result, tuple) else result[:rows]
