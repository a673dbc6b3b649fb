"""Weights into which adapters (LoRA) are merged while they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from polarlm import model_loaders
from polarlm.engine.config import EngineConfig
from polarlm.engine.model.adapters import Adapters, Loaded, read_adapters
from polarlm.engine.weight_formats import find
from polarlm.model_loaders.files.weights import WeightSource


def with_adapters(
    config: EngineConfig, source: model_loaders.Model, say: Callable[[str], None]
) -> tuple[model_loaders.Model, Adapters]:
    """Return the model and the adapters that requests choose among; or the model with all merged into its weights."""
    adapters = read_adapters(config, source.config, source.weights, say)
    if not config.lora_merge:
        return source, adapters
    merged = MergedWeights(source.weights, adapters.all)
    rounded = f"; changed matrices of {', '.join(merged.converted)} become Q8_0" if merged.converted else ""
    say(f"Merged into the weights: {', '.join(adapters.by_name)}{rounded}.")
    return replace(source, weights=merged), Adapters()


class MergedWeights:
    """A `WeightSource` whose matrices have what adapters add to them.

    A changed matrix has the type of the file, or q8_0 if that cannot be written; its values are rounded to it.
    merged: the keys of the adapters, in order.
    """

    def __init__(self, source: WeightSource, adapters: Sequence[Loaded]) -> None:
        self._source = source
        self.merged = tuple(one.key() for one in adapters)
        self._changes: Mapping[str, list[tuple[np.ndarray, np.ndarray]]] = {
            name: [
                (own.a, np.float32(one.scale) * own.b)
                for one in adapters
                if (own := one.adapter.changes.get(name)) is not None
            ]
            for name in {name for one in adapters for name in one.adapter.changes}
        }

    @property
    def converted(self) -> tuple[str, ...]:
        """The types in the file of changed matrices that become q8_0, sorted."""
        stored = {self._source.stored_dtype(name) for name in self._changes}
        return tuple(sorted(name for name in stored if not _is_writable(name)))

    def names(self) -> frozenset[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def stored_dtype(self, name: str) -> str:
        stored = self._source.stored_dtype(name)
        return "Q8_0" if name in self._changes and not _is_writable(stored) else stored

    def read_raw(self, name: str, rows: slice) -> np.ndarray:
        if name not in self._changes:
            return self._source.read_raw(name, rows)
        format = find(self.stored_dtype(name))
        assert format is not None
        assert format.quantize is not None
        values = np.empty((rows.stop - rows.start, self.shape(name)[1]), np.float32)
        self.read_into(name, values, rows)
        return format.quantize(values)

    def expect(self, name: str) -> None:
        self._source.expect(name)

    def read_into(self, name: str, out: np.ndarray, rows: slice = slice(None)) -> None:
        self._source.read_into(name, out, rows)
        for a, b in self._changes.get(name, ()):
            out += b[rows] @ a

    def files(self) -> frozenset[Path]:
        return self._source.files()

    def close(self) -> None:
        self._source.close()


def _is_writable(stored: str) -> bool:
    format = find(stored)
    return format is not None and format.quantize is not None
