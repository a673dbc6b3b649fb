"""Models with random weights: their matrices, their files, and that the engine runs them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from polarlm import model_loaders
from polarlm.bench.random_weights import RandomMatrix, RandomWeights
from polarlm.bench.shapes import SHAPES
from polarlm.engine import Engine, SamplingParams
from polarlm.model_loaders.config import ModelConfig
from scripts.make_random_model import write
from tests.random_model import TINY, tokenizer_file


@pytest.mark.parametrize("name", ["q8_0", "q4_k", "iq2_xxs", "bf16"])
def test_a_random_matrix_keeps_the_size_of_its_inputs(name: str) -> None:
    matrix, values = RandomMatrix(name, 64, 1024, "x"), np.empty((64, 1024), np.float32)
    matrix.dequantize(values)
    assert abs(values.mean()) < 0.1 / 32
    assert values.std() == pytest.approx(1 / 32, rel=0.05)
    slabs = [raw for _, raw in matrix.slabs(7 * matrix.format.size(1024))]
    np.testing.assert_array_equal(np.concatenate(slabs), matrix.raw(slice(0, 64)))
    assert not np.array_equal(RandomMatrix(name, 64, 1024, "y").raw(slice(0, 64)), matrix.raw(slice(0, 64)))


def small(config: ModelConfig) -> ModelConfig:
    """The first layers of every kind."""
    kinds = {type(layer.mixer): number for number, layer in reversed([*enumerate(config.layers)])}
    return replace(config, layers=config.layers[: 1 + max(kinds.values())], vocab_size=300)


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "lfm2-350m", "qwen3.5-0.8b", "minilm-l6"])
def test_a_file_is_the_model_that_it_was_made_for(name: str, tmp_path: Path) -> None:
    config = small(SHAPES[name])
    write(tmp_path / "x.gguf", name, config, "q8_0", None if config.is_encoder else tokenizer_file(tmp_path))
    read, source, _ = model_loaders.load_weights(tmp_path / "x.gguf")
    layers = tuple(replace(layer, mixer=_plain(layer.mixer)) for layer in read.layers)
    assert layers == tuple(replace(layer, mixer=_plain(layer.mixer)) for layer in config.layers)
    assert (read.hidden_size, read.vocab_size, read.max_context) == (config.hidden_size, 300, config.max_context)
    assert source.names() == RandomWeights(config, lambda _: "q8_0").names()
    source.close()


def _plain(mixer: object) -> object:
    """Without what is GGUF's alone: keys of value heads in another order."""
    return replace(mixer, tiled=False) if hasattr(mixer, "tiled") else mixer


def test_the_engine_runs_it(tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    write(path, "random", replace(TINY, vocab_size=300), "q4_k", tokenizer_file(tmp_path))
    types = Counter(tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors)
    # v and down of layer 1, and the head; of layer 0 all matrices are Q4_K.
    assert types == {"Q6_K": 3, "Q4_K": 13, "F32": 5}
    with Engine.load(path, device="cpu", cache_type="f16", ctx_size=128) as engine:
        assert engine.model.config.vocab_size == engine.model.tokenizer.vocab_size == 300
        assert engine.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3
