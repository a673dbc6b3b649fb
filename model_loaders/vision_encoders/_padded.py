"""Tensors with zeros after their values, whose rows GPUs can read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polarlm.model_loaders.files.tensors import StoredTensor

SIDE = 8  # GPUs take rows of a multiple of so many values


def pad(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    return _PaddedTensor(tensor.source, tensor.label, shape, tensor.dtype, tensor.offset, whole=tensor)


@dataclass(frozen=True)
class _PaddedTensor(StoredTensor):
    """A tensor with zeros after its rows, and after the values of each, in a type whose zero has no bits."""

    whole: StoredTensor | None = None

    def raw(self, rows: slice) -> np.ndarray:
        assert self.whole is not None
        rows_padded = np.zeros((rows.stop - rows.start, self.row_bytes), np.uint8)
        if (stop := min(rows.stop, self.whole.shape[0])) > rows.start:
            rows_padded[: stop - rows.start, : self.whole.row_bytes] = self.whole.raw(slice(rows.start, stop))
        return rows_padded

    def expect(self) -> None:
        assert self.whole is not None
        self.whole.expect()
