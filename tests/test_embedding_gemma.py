"""EmbeddingGemma: layers of Gemma 3 whose tokens see later ones, and products after pooling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, PromptOptions
from polarlm.model_loaders import LoadError, load
from tests.conftest import ENCODERS
from tests.encoders import make_gemma, make_gguf
from tests.server.http_server import serving

# The texts of the fixture, the longest of 64 tokens with windows of 12, and what sentence-transformers makes of them.
REFERENCE = np.load(ENCODERS / "embedding_gemma" / "reference.npz")
TEXTS = [(REFERENCE[f"ids{i}"].tolist(), REFERENCE[f"vector{i}"]) for i in range(4)]
CLOSE = 2e-5  # for vectors of length 1 and weights in float32: see tests/model/test_encoder.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("gemma") / "tiny-gemma")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.load(folder, device="cpu", weight_type="f32") as loaded:
        yield loaded


def test_a_vector_is_what_sentence_transformers_computes(engine: Engine, tmp_path: Path) -> None:
    """Of a folder with its modules, and of a GGUF file with dense_2 and dense_3."""
    path = make_gguf(tmp_path / "model.gguf", "embedding_gemma")
    with Engine.load(path, device="cpu", weight_type="f32") as of_gguf:
        for loaded in (engine, of_gguf):
            found = loaded.embed_each([ids for ids, _ in TEXTS])
            for one, (_, expected) in zip(found, TEXTS, strict=True):
                assert np.abs(one.vector - expected).max() <= CLOSE


def test_a_prompt_of_the_files_goes_before_a_text(engine: Engine) -> None:
    text = "the rain falls"
    for name, before in (("query", "the sea: "), ("document", "a ship: ")):
        named = engine.embed(text, options=PromptOptions(prompt_name=name))
        np.testing.assert_array_equal(named.vector, engine.embed(before + text).vector)
    with pytest.raises(EngineError, match="has no prompt 'title' for texts: it has 'document', 'query'"):
        engine.embed(text, options=PromptOptions(prompt_name="title"))


def test_a_model_may_have_a_prompt_for_texts_without_one(tmp_path: Path, engine: Engine) -> None:
    folder = make_gemma(tmp_path / "model")
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "default_prompt_name": "query"}))
    with Engine.load(folder, device="cpu", weight_type="f32") as loaded:
        query = engine.embed("the rain", options=PromptOptions(prompt_name="query"))
        np.testing.assert_array_equal(loaded.embed("the rain").vector, query.vector)


def test_a_server_takes_the_name_of_a_prompt(engine: Engine) -> None:
    expected = engine.embed("the rain", options=PromptOptions(prompt_name="query")).vector
    with serving(engine) as server:
        answer = server.post("/v1/embeddings", {"input": ["the rain"], "prompt_name": "query"}).json()
        assert np.abs(np.array(answer["data"][0]["embedding"]) - expected).max() <= 1e-6
        for wrong in ("title", 5):
            response = server.post("/v1/embeddings", {"input": ["the rain"], "prompt_name": wrong})
            assert response.status_code == 400
            assert "prompt" in response.json()["error"]["message"]


WRONG = [
    ("2_Dense/config.json", {"activation_function": "torch.nn.ReLU"}, "but only Identity and Tanh"),
    ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "but only 'sentence_embedding' is"),
    ("2_Dense/config.json", {"out_features": 130}, r"has the shape \(128, 64\)"),
    ("3_Dense/config.json", {"bias": True}, r"lacks the tensor model.dense.1.bias"),
    ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "which is not among the prompts"),
    ("config_sentence_transformers.json", {"prompts": {"query": 5}}, "must be a string"),
    ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt is False, but only True is supported"),
]


def test_wrong_modules_are_named(tmp_path: Path) -> None:
    for number, (file, changes, part) in enumerate(WRONG):
        folder = make_gemma(tmp_path / str(number))
        (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **changes}))
        with pytest.raises(LoadError, match=part):
            load(folder)


def test_weights_of_modules_are_found_in_their_own_folders(tmp_path: Path) -> None:
    folder = make_gemma(tmp_path / "model")
    (folder / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"3_Dense has no model\.safetensors"):
        load(folder)
    modules = json.loads((folder / "modules.json").read_text())
    modules[3]["path"] = "../2_Dense"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(LoadError, match="which is not a folder next to it"):
        load(folder)
