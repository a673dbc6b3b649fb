"""While a matrix is packed, the system reads the others ahead that are loaded with it."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model.weights import load_weights
from polarlm.model_loaders import load_weights as open_weights
from polarlm.model_loaders.files.tensors import StoredWeights
from tests.conftest import FIXTURES


def test_matrices_that_are_loaded_together_are_expected_before_the_first_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[tuple[str, str]] = []
    expect, read = StoredWeights.expect, StoredWeights.read_raw

    def watched(self: StoredWeights, name: str) -> None:
        events.append(("expect", name))
        expect(self, name)

    def read_and_watched(self: StoredWeights, name: str, rows: slice) -> np.ndarray:
        events.append(("read", name))
        return read(self, name, rows)

    monkeypatch.setattr(StoredWeights, "expect", watched)
    monkeypatch.setattr(StoredWeights, "read_raw", read_and_watched)
    config, source, _ = open_weights(FIXTURES / "qwen3_moe_normed")
    load_weights(NumpyOps(1), config, source)
    source.close()
    matrices = {name for name in source.names() if len(source.shape(name)) > 1}
    assert {name for what, name in events if what == "expect"} == matrices
    assert len([what for what, _ in events if what == "expect"]) == len(matrices)
    experts = [name for name in matrices if ".experts." in name and ".layers.0." in name and "down" not in name]
    last = max(events.index(("expect", name)) for name in experts)
    assert last < min(index for index, (what, name) in enumerate(events) if what == "read" and name in experts)
