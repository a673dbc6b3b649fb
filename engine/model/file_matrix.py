"""Reads matrices of a model's files for a device, in the format of the file or converted to another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.ops import Ops
from polarlm.engine.weight_formats import WeightFormat, find, get
from polarlm.model_loaders.files.ggml_types import size_of
from polarlm.model_loaders.files.weights import WeightSource

_SLAB_VALUES = 1 << 18  # converted at a time: they stay in the CPU's cache


@dataclass(frozen=True)
class FileMatrix:
    """A `StoredMatrix` in a file. format: the file's, whose bytes are not changed, or another one, to which values are
    rounded. progress: called with the bytes of the file that were read since its last call. begin: called before
    reading."""

    source: WeightSource
    name: str
    format: WeightFormat
    progress: Callable[[int], None] = lambda nbytes: None
    begin: Callable[[], None] = lambda: None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.source.shape(self.name)
        return rows, columns

    def expect(self) -> None:
        self.source.expect(self.name)

    def dequantize(self, out: np.ndarray) -> None:
        for rows, raw in self.slabs(self.format.size(_SLAB_VALUES)):
            self.format.dequantize(raw, out[rows])

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        self.begin()
        count, columns = self.shape
        step = max(1, nbytes // self.format.size(columns))
        is_raw = find(self.source.stored_dtype(self.name)) is self.format
        converted = None if is_raw else np.empty((min(step, count), self.format.size(columns)), np.uint8)
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            if converted is None:
                yield rows, self.source.read_raw(self.name, rows)
            else:
                raw = converted[: rows.stop - first]
                self._convert(rows, raw)
                yield rows, raw
            self.progress(size_of(self.source.stored_dtype(self.name), (rows.stop - first) * columns))

    def _convert(self, rows: slice, raw: np.ndarray) -> None:
        assert self.format.quantize is not None
        columns = self.shape[1]
        step = max(1, _SLAB_VALUES // max(1, columns))
        for first in range(rows.start, rows.stop, step):
            part = slice(first, min(first + step, rows.stop))
            values = np.empty((part.stop - first, columns), np.float32)
            self.source.read_into(self.name, values, part)
            raw[first - rows.start : part.stop - rows.start] = self.format.quantize(values)


def format_for(ops: Ops, stored: str, columns: int, wanted: WeightFormat | None) -> WeightFormat:
    """Return the format in which `ops` gets a matrix with rows of `columns` values that the file stores as `stored`.

    wanted: the format to convert it to; None: the file's. Blocks that the backend does not keep become q8_0 if it keeps
    that; their rows are whole blocks of it, too. Else types without a weight format become float32.
    """
    if wanted is not None:
        return nearest(wanted, stored, columns)
    file_format, q8_0 = find(stored), get("q8_0")
    if file_format is not None and (file_format.values == 1 or ops.stored_format(file_format) is file_format):
        return file_format
    return q8_0 if ops.stored_format(q8_0) is q8_0 else file_format or get("f32")


def nearest(wanted: WeightFormat, stored: str, columns: int) -> WeightFormat:
    """Return `wanted` if rows are whole blocks of it, else the file's own format; f16 if that is float32 or unknown."""
    if fits(columns, wanted):
        return wanted
    file_format = find(stored)
    return get("f16") if file_format is None or file_format.name == "f32" else file_format


def fits(columns: int, format: WeightFormat) -> bool:
    """Whether rows of `columns` values are whole blocks."""
    return columns % format.values == 0
