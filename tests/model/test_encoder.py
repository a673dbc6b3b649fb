"""The forward pass of encoders against transformers in float32, in NumPy and in compiled kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.errors import EngineError
from polarlm.engine.model.encoder import Encoder
from polarlm.engine.model.weights import load_weights
from polarlm.engine.state.plan import plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore
from polarlm.engine.weight_formats import get
from polarlm.model_loaders import load_weights as open_weights
from tests.conftest import ENCODERS
from tests.encoders import reference

BACKENDS = (NumpyOps(), NativeOps())
NAMES = sorted(path.name for path in ENCODERS.iterdir())


def read_encoder(path: Path, ops: Ops, weight_type: str | None = None) -> Encoder:
    config, source, _ = open_weights(path)
    weights = load_weights(ops, config, source, weight_type=get(weight_type) if weight_type else None)
    source.close()
    return Encoder(ops, config, weights, KVStore(ops, plan_for_tokens(CacheShape(16, ()), 64, 1), []))


@pytest.mark.parametrize("name", NAMES)
def test_states_are_those_of_transformers(name: str) -> None:
    texts = reference(name)
    expected = np.concatenate([states for _, states in texts])
    for ops in BACKENDS:
        states = read_encoder(ENCODERS / name, ops, "f32").encode([ids for ids, _ in texts])
        # Sums of a few hundred products in float32, whose order differs.
        assert np.abs(states - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["bert_wide", "embedding_gemma"])
def test_states_of_weights_that_become_words_are_nearly_those_of_transformers(name: str) -> None:
    """Closer than with inputs of every product in half precision, whose numbers are 2⁻¹¹ of their size apart."""
    texts = reference(name)
    expected = np.concatenate([states for _, states in texts])
    states = read_encoder(ENCODERS / name, NativeOps()).encode([ids for ids, _ in texts])
    assert np.linalg.norm(states - expected) <= 2**-11 * np.linalg.norm(expected)


@pytest.mark.parametrize("ops", BACKENDS, ids=["numpy", "native"])
def test_what_a_table_has_no_row_for_is_an_error(ops: Ops) -> None:
    encoder = read_encoder(ENCODERS / "bert_f32", ops)
    config = encoder.config
    assert len(encoder.encode([[5] * config.positions])) == config.positions
    for text, types in (([5] * (config.positions + 1), None), ([5, config.vocab_size], None), ([-1], None)):
        with pytest.raises(EngineError, match="has no row"):
            encoder.encode([text], types)
    inputs = encoder.weights.encoder_inputs
    inputs = replace(inputs, token_types=replace(inputs.token_types, shape=(1, config.hidden_size)))
    encoder.weights = replace(encoder.weights, encoder_inputs=inputs)
    with pytest.raises(EngineError, match="has no row 1 in a table of 1"):
        encoder.encode([[5, 6]], [1])
