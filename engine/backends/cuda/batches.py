"""Batches of steps in buckets: empty rows fill a batch up, so that steps are recorded for few sizes of batches.

An empty row has token 0, a span of zeros and a greedy draw. By its span it writes no keys and values and sees no token.
No kernel mixes rows, and a bucket takes the kernels that each of its batches would take, so the results of the other
rows are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polarlm.engine.backends.cuda.cache import HostTable, SpanTable, with_rows
from polarlm.engine.backends.cuda.launch_configs import SMALL_ROWS

_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, SMALL_ROWS)


def bucket(rows: int) -> int:
    """Rows that are computed for a batch of `rows` rows. Products take SMALL_ROWS at a time; what is left over them is
    filled up."""
    full, left = rows // SMALL_ROWS * SMALL_ROWS, rows % SMALL_ROWS
    return full + next(size for size in _BUCKETS if size >= left) if left else full


def filled_up(inputs: Sequence[Any]) -> Sequence[Any]:
    """The inputs of `Ops.run_graph` with empty rows up to their bucket; as they are if a sequence has several rows."""
    rows = bucket(len(inputs[0]))
    if rows == len(inputs[0]) or any(isinstance(x, SpanTable) and x.most_rows > 1 for x in inputs):
        return inputs
    return [x.filled_up(rows) if isinstance(x, HostTable) else with_rows(x, rows) for x in inputs]


def first_rows(result: Any, rows: int) -> Any:
    """The first rows of a result of `Ops.run_graph`: of an array, or of each array of a tuple."""
    return tuple(x[:rows] for x in result) if isinstance(result, tuple) else result[:rows]
