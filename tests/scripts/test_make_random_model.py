"""Models with random weights: their matrices, and that the engine runs them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from polarlm.bench.gpu.weights import has_larger_types
from polarlm.engine import Engine, SamplingParams
from scripts.make_random_model import write
from scripts.random_models.blocks import random_blocks
from scripts.random_models.shapes import SHAPES, Shape
from tests.random_model import TINY, random_model, tokenizer_file


@pytest.mark.parametrize("type", [Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q6_K, Type.IQ4_XS, Type.BF16])
def test_random_blocks_are_a_matrix_that_keeps_the_size_of_its_inputs(type: Type, rng: np.random.Generator) -> None:
    values = gguf.quants.dequantize(random_blocks(rng, 64, 1024, type), type)
    assert values.shape == (64, 1024)
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 0.1 / 32
    assert values.std() == pytest.approx(1 / 32, rel=0.05)


def test_about_half_of_the_layers_have_better_matrices() -> None:
    for shape in SHAPES.values():
        better = sum(has_larger_types(layer, shape.layers) for layer in range(shape.layers))
        assert better / shape.layers == pytest.approx(0.5, abs=0.1)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("tied", "qkv_bias", "arch"), [(False, False, "llama"), (True, True, "qwen2")])
def test_the_engine_runs_it(tied: bool, qkv_bias: bool, arch: str, tmp_path: Path) -> None:
    shape = Shape(arch, 2, 256, 512, 4, 2, 300, 256, tied=tied, qkv_bias=qkv_bias)
    path = tmp_path / "random.gguf"
    write(path, "random", shape, "q4_k", tokenizer_file(tmp_path))
    found = Counter(tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors)
    # v and down of layer 1, and the head; of layer 0 all matrices are Q4_K.
    assert found == {"Q6_K": 3, "Q4_K": 12 + (not tied), "F32": 5 + 6 * qkv_bias}
    with Engine.load(path, device="cpu", cache_type="f16", ctx_size=128) as engine:
        assert engine.model.config.vocab_size == engine.model.tokenizer.vocab_size == 300
        assert engine.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3


def test_the_tokenizer_is_copied(tmp_path: Path) -> None:
    tokenizer, model = tokenizer_file(tmp_path), random_model(tmp_path)
    old, new = (gguf.GGUFReader(path).fields for path in (tokenizer, model))
    copied = {name: field.contents() for name, field in new.items() if name.startswith("tokenizer.")}
    assert copied == {name: field.contents() for name, field in old.items() if name.startswith("tokenizer.")}
    assert len(copied["tokenizer.ggml.tokens"]) == TINY.vocabulary
