"""Models that compute the same function with keys or values of another magnitude."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polarlm.engine.loading import assembly
from tests.weights import pack


class _Rescaled:
    """A weight source that multiplies some weights: name of a projection or norm → factor."""

    def __init__(self, source: Any, factors: dict[str, float]):
        self._source, self._factors = source, factors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def stored_dtype(self, name: str) -> str:
        """float32, because half precision could overflow."""
        return "BF16" if self._source.stored_dtype(name) == "BF16" else "F32"

    def read_into(self, name: str, out: np.ndarray, rows: slice = slice(None)) -> None:
        self._source.read_into(name, out, rows)
        for part, factor in self._factors.items():
            if f".{part}." in name:
                out *= np.float32(factor)

    def read_raw(self, name: str, rows: slice) -> np.ndarray:
        values = np.empty((rows.stop - rows.start, self._source.shape(name)[1]), np.float32)
        self.read_into(name, values, rows)
        return pack(values, self.stored_dtype(name).lower())


def rescale(patch: pytest.MonkeyPatch, side: str, factor: float) -> None:
    """Engines that are loaded from now on have `factor` times their "keys" or "values", and answer as before.

    Queries take it out again, or the output projection. Where heads are normalised, their norms make the size of keys.
    """
    load = assembly.load_weights

    def load_rescaled(ops, config, source, *rest, **more):
        into = ("k_norm", "q_norm") if config.attention.qk_norm else ("k_proj", "q_proj")
        by, inverse = into if side == "keys" else ("v_proj", "o_proj")
        return load(ops, config, _Rescaled(source, {by: factor, inverse: 1 / factor}), *rest, **more)

    patch.setattr(assembly, "load_weights", load_rescaled)
