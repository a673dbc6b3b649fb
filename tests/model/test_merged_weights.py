"""Weights into which adapters are merged: the file's values and the changes, in the file's type or in Q8_0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine.model.adapters import Loaded
from polarlm.engine.model.merged_weights import MergedWeights
from polarlm.engine.weight_formats import get
from polarlm.model_loaders import WeightSource, load_weights
from polarlm.model_loaders.adapters import Adapter, Factors
from scripts.make_random_model import write
from tests.random_model import TINY, tokenizer_file

NAME, OTHER = "model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"


@contextmanager
def opened(folder: Path, kind: str) -> Iterator[WeightSource]:
    write(folder / "random.gguf", "tiny", TINY, kind, tokenizer_file(folder))
    _, source, _ = load_weights(folder / "random.gguf")
    try:
        yield source
    finally:
        source.close()


@pytest.mark.parametrize(("kind", "becomes"), [("q8_0", "Q8_0"), ("q4_0", "Q4_0"), ("bf16", "BF16"), ("q4_k", "Q8_0")])
def test_changed_matrices_are_the_sum_rounded_once(tmp_path: Path, kind: str, becomes: str) -> None:
    rng = np.random.default_rng(0)
    with opened(tmp_path, kind) as source:
        out, columns = source.shape(NAME)
        shapes = [((rank, columns), (out, rank)) for rank in (4, 7)]
        factors = [Factors(*(rng.standard_normal(shape).astype(np.float32) for shape in pair)) for pair in shapes]
        changes = [Adapter(tmp_path, {NAME: one}, "F32", str(number)) for number, one in enumerate(factors)]
        adapters = [Loaded(one, 0.5) for one in changes]
        merged = MergedWeights(source, adapters)
        assert merged.stored_dtype(NAME) == becomes
        assert merged.converted == (() if becomes == source.stored_dtype(NAME) else (source.stored_dtype(NAME),))
        wanted = np.empty((out, columns), np.float32)
        source.read_into(NAME, wanted)
        wanted = wanted + sum(0.5 * one.b.astype(np.float64) @ one.a for one in factors)
        found = np.empty((40, columns), np.float32)
        merged.read_into(NAME, found, slice(20, 60))
        np.testing.assert_allclose(found, wanted[20:60], atol=1e-4)
        format = get(becomes.lower())
        np.testing.assert_array_equal(merged.read_raw(NAME, slice(20, 60)), format.quantize(found))
        rows = slice(0, 8)
        np.testing.assert_array_equal(merged.read_raw(OTHER, rows), source.read_raw(OTHER, rows))
        assert merged.stored_dtype(OTHER) == source.stored_dtype(OTHER)
