"""A model of random weights in memory, whose matrices are in any formats."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from polarlm.model_loaders import families
from polarlm.model_loaders.config import ModelConfig
from tests.weights import BLOCKS, StoredArray, StoredBytes, random_blocks

_SCALES = (2**-13, -(2**-13), 2**-14)  # of blocks: values are a few hundredths


class RandomWeights:
    """See `model_loaders.files.weights.WeightSource`. Vectors are ones.

    type_of: name of a matrix → its weight format.
    """

    def __init__(self, config: ModelConfig, type_of: Callable[[str], str]):
        rng = np.random.default_rng(5)
        self._shapes = {spec.name: spec.shape for spec in families.tensors(config).specs()}
        self._matrices = {
            name: _random(rng, type_of(name), *shape) for name, shape in self._shapes.items() if len(shape) > 1
        }

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def stored_dtype(self, name: str) -> str:
        return self._matrices[name].format.name.upper() if name in self._matrices else "F32"

    def read_raw(self, name: str, rows: slice) -> np.ndarray:
        return self._matrices[name].raw[rows]

    def expect(self, name: str) -> None:
        """There is nothing to read ahead."""

    def read_into(self, name: str, out: np.ndarray, rows: slice = slice(None)) -> None:
        out[...] = self._matrices[name].values[rows] if name in self._matrices else 1

    def close(self) -> None:
        pass


def _random(rng: np.random.Generator, name: str, rows: int, columns: int) -> StoredBytes:
    if name in BLOCKS:
        return StoredBytes(random_blocks(rng, name, rows, columns, _SCALES), name)
    return StoredArray(rng.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5), name)
