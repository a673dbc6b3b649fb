"""Engines of encoders: vectors of texts, and what such an engine refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from polarlm.engine import Engine, EngineError, PromptOptions
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.loading import assembly
from polarlm.engine.loading.checks import settle
from polarlm.model_loaders import LoadError, load
from tests.conftest import ENCODERS
from tests.encoders import (
    CLS,
    SEP,
    UNIGRAM,
    make_folder,
    make_gemma,
    make_gguf,
    pieces,
    pooled,
    reference,
    tokenizer_json,
)
from tests.server.http_server import serving

TEXT = "The rain falls on a sea."
CLOSE = 2e-5  # for vectors of length 1 and weights in float32: see tests/model/test_encoder.py
# Texts for EmbeddingGemma, the longest of 64 tokens with windows of 12, and their vectors by sentence-transformers.
REFERENCE = np.load(ENCODERS / "embedding_gemma" / "reference.npz")
GEMMAS_TEXTS = [(REFERENCE[f"ids{i}"].tolist(), REFERENCE[f"vector{i}"]) for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("encoder") / "tiny-embed", "bert_wide", "cls")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.load(folder, device="cpu", weight_type="f32") as loaded:
        yield loaded


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_vector_is_what_sentence_transformers_computes(engine: Engine, pooling: str) -> None:
    texts = reference("bert_wide")
    for (ids, states), found in zip(texts, engine.embed_each([ids for ids, _ in texts], pooling), strict=True):
        assert np.abs(found.vector - pooled(states, pooling)).max() <= CLOSE
        assert found.usage.prompt_tokens == len(ids)


def test_the_pooling_is_that_of_the_files(tmp_path: Path, engine: Engine) -> None:
    ids, states = reference("bert_wide")[2]
    assert np.abs(engine.embed(ids).vector - pooled(states, "cls")).max() <= CLOSE
    for name, made, pooling in (
        ("plain", lambda path: make_folder(path, "bert_wide", None), "mean"),
        ("last", lambda path: make_folder(path, "bert_wide", "last"), "last"),
        ("cls.gguf", lambda path: make_gguf(path, "bert_wide", pooling=2), "cls"),
        ("none.gguf", lambda path: make_gguf(path, "bert_wide", pooling=None), "mean"),
    ):
        with Engine.load(made(tmp_path / name), device="cpu", weight_type="f32") as other:
            assert np.abs(other.embed(ids).vector - pooled(states, pooling)).max() <= CLOSE


@pytest.mark.parametrize(
    ("name", "dtype", "error"),
    [
        *((name, "F32", CLOSE) for name in ("bert_f32", "xlm_roberta", "nomic_bert", "modernbert")),
        ("bert_wide", "F16", 2e-3),  # halves are 2^-11 of a number apart
        ("bert_wide", "Q8_0", 3e-2),  # codes of 8 bits, 1/127 of the largest of 32
    ],
)
def test_a_gguf_file_gives_the_same_vectors(tmp_path: Path, name: str, dtype: str, error: float) -> None:
    with Engine.load(make_gguf(tmp_path / "model.gguf", name, dtype), device="cpu") as loaded:
        for ids, states in reference(name):
            assert np.abs(loaded.embed(ids).vector - pooled(states, "mean")).max() <= error


def test_texts_are_tokenized_as_the_library_does(tmp_path: Path, engine: Engine) -> None:
    library = tokenizers.Tokenizer.from_str(tokenizer_json())
    options = engine.embedding_options(None)
    with Engine.load(make_gguf(tmp_path / "model.gguf", "bert_wide"), device="cpu") as of_gguf:
        for text in (TEXT, "", "RÄIN rains,raining  [SEP] 日本", "ship " * 5, "[unused3]"):
            library.encode_special_tokens = True
            wanted = library.encode(text).ids
            assert engine.prompt_ids(text, options) == wanted
            assert of_gguf.prompt_ids(text, options) == wanted
    assert engine.prompt_ids("x [SEP]", PromptOptions(pooling="mean", parse_special=True))[-2:] == [SEP, SEP]
    ids = engine.tokenize(TEXT)
    assert engine.detokenize(ids).strip() == "the rain falls on a sea ."


def test_an_xlm_r_vocabulary_gives_the_most_likely_pieces(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.Unigram(UNIGRAM, unk_id=3))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    with Engine.load(make_gguf(tmp_path / "model.gguf", "xlm_roberta", unigram=True), device="cpu") as loaded:
        for text in ("the rain", "rains", "stair", "the  rain!"):
            wanted = library.encode(" ".join(text.split())).ids
            assert loaded.prompt_ids(text, loaded.embedding_options(None)) == [0, *wanted, 2]


def test_texts_that_wait_together_are_computed_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each gets the vector that it has alone."""
    batches: list[int] = []
    encode = engine._model.encode  # type: ignore[attr-defined]
    monkeypatch.setattr(engine._model, "encode", lambda texts, seconds: batches.append(len(texts)) or encode(texts))
    texts = [TEXT[: 2 + at] for at in range(20)]
    together = engine.embed_each(texts)
    assert batches == [20]
    for text, one in zip(texts, together, strict=True):
        assert np.abs(engine.embed(text).vector - one.vector).max() <= 1e-6


def test_dimensions_cut_a_vector(engine: Engine) -> None:
    ids, states = reference("bert_wide")[3]
    for dimensions in (1, 10, 64):
        found = engine.embed(ids, "mean", PromptOptions(dimensions=dimensions)).vector
        assert found.shape == (dimensions,)
        assert np.abs(found - pooled(states, "mean", dimensions)).max() <= 1e-4
    with pytest.raises(EngineError, match="dimensions is 65, but vectors of tiny-embed have 64"):
        engine.embed(ids, options=PromptOptions(dimensions=65))


def test_a_long_text_is_refused_or_cut(engine: Engine) -> None:
    assert engine.context == 64
    assert "embedding model: vectors of 64, texts of up to 64 tokens" in engine.fit_line()
    assert len(engine.embed(reference("bert_wide")[3][0]).vector) == 64  # the whole context
    text = "rain " * 100
    with pytest.raises(
        EngineError, match="102 tokens exceeds the available context size of 64 tokens: shorten it"
    ) as e:
        engine.embed(text)
    assert e.value.code == "context_length_exceeded"
    cut = engine.embed(text, options=PromptOptions(truncate=True))
    assert cut.usage.prompt_tokens == 64
    rain = pieces().index("rain")
    np.testing.assert_array_equal(cut.vector, engine.embed([CLS, *[rain] * 62, SEP]).vector)


def test_an_embedding_model_writes_no_answers(engine: Engine) -> None:
    for ask in (
        lambda: engine.generate(TEXT),
        lambda: engine.chat([{"role": "user", "content": TEXT}]),
        lambda: engine.embed([{"role": "user", "content": TEXT}]),
    ):
        with pytest.raises(EngineError, match="tiny-embed is an embedding model: it gives texts a vector"):
            ask()
    with pytest.raises(EngineError, match="tiny-embed is an embedding model: it has no probabilities of tokens"):
        engine.score([5, 6, 7])


@pytest.mark.parametrize(("name", "kind"), [("bert_f32", "an embedding model"), ("rerankers/bert", "a reranker")])
def test_a_gpu_leaves_encoders_to_the_cpu(tmp_path: Path, name: str, kind: str) -> None:
    ops, said = type("Device", (NativeOps,), {"backend": "cuda"})(1), list[str]()
    config = settle(make_gguf(tmp_path / "model.gguf", name), None, {})
    with Engine(assembly.assemble(config, said.append, ops=ops)) as loaded:
        assert f"model is {kind}, which runs on the CPU." in said
        assert loaded._model.ops is not ops
        assert loaded.context == 64


def test_a_damaged_model_fails_its_texts(tmp_path: Path) -> None:
    with Engine.load(make_gguf(tmp_path / "model.gguf", "bert_f32"), device="cpu") as loaded:
        loaded._model._encoder_layers[0]._sum_norms[0][0][:] = np.nan  # type: ignore[attr-defined]
        with pytest.raises(EngineError, match="not finite") as caught:
            loaded.embed(TEXT)
        assert caught.value.code == "model_damaged"


def make_bert(folder: Path) -> Path:
    return make_folder(folder, "bert_wide")


# Changes of a file, or a text in its place; None: it is removed.
WRONG: list[tuple[Callable[[Path], Path], str, Any, str]] = [
    (make_bert, "config.json", {"hidden_act": "relu"}, "hidden_act is 'relu', but only gelu is supported"),
    (make_bert, "config.json", {"position_embedding_type": "relative_key"}, "only absolute positions"),
    (make_bert, "config.json", {"is_decoder": True}, "only an encoder"),
    (make_bert, "config.json", {"num_attention_heads": 5}, "must be a multiple of 10"),
    (make_bert, "config.json", {"max_position_embeddings": 70}, r"embeddings.weight has the shape \(64, 64\)"),
    (make_bert, "config.json", {"architectures": ["BertForQuestionAnswering"]}, "architectures"),
    (make_bert, "modules.json", "[1]", "should hold a list of objects"),
    (make_bert, "modules.json", "{", "is not valid JSON"),
    (make_bert, "1_Pooling/config.json", None, "config.json is missing"),
    (make_bert, "1_Pooling/config.json", "{}", "asks for no pooling"),
    (make_bert, "1_Pooling/config.json", '{"pooling_mode": "max"}', "pooling_mode is 'max'"),
    (make_gemma, "2_Dense/config.json", {"activation_function": "torch.nn.ReLU"}, "but only Identity and Tanh"),
    (make_gemma, "2_Dense/config.json", {"module_input_name": "token_embeddings"}, "but only 'sentence_embedding' is"),
    (make_gemma, "2_Dense/config.json", {"use_residual": True}, "use_residual is True, but only False is supported"),
    (make_gemma, "config_sentence_transformers.json", {"truncate_dim": 64}, "but vectors are whole here"),
    (make_gemma, "2_Dense/config.json", {"out_features": 130}, r"has the shape \(128, 64\)"),
    (make_gemma, "3_Dense/config.json", {"bias": True}, r"lacks the tensor model.dense.1.bias"),
    (make_gemma, "config_sentence_transformers.json", {"default_prompt_name": "x"}, "which is not among the prompts"),
    (make_gemma, "config_sentence_transformers.json", {"prompts": {"query": 5}}, "must be a string"),
    (
        make_gemma,
        "1_Pooling/config.json",
        {"include_prompt": False},
        "include_prompt is False, but only True is supported",
    ),
    (make_gemma, "3_Dense/model.safetensors", None, r"3_Dense has no model\.safetensors"),
]


def test_wrong_files_are_named(tmp_path: Path) -> None:
    for number, (make, name, changes, part) in enumerate(WRONG):
        folder = make(tmp_path / str(number))
        file = folder / name
        if changes is None:
            file.unlink()
        else:
            file.write_text(changes if isinstance(changes, str) else json.dumps(json.loads(file.read_text()) | changes))
        with pytest.raises(LoadError, match=part):
            load(folder)
    for pooling, modules, what in (("max", {}, "pooling_mode_max_tokens"), ("mean", {"CNN": "2"}, "module 'CNN'")):
        with pytest.raises(LoadError, match=what):
            load(make_folder(tmp_path / pooling, "bert_wide", pooling, **modules))
    folder = make_gemma(tmp_path / "beside")
    modules = json.loads((folder / "modules.json").read_text())
    modules[3]["path"] = "../2_Dense"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(LoadError, match="which is not a folder next to it"):
        load(folder)


def test_keys_that_nobody_knows_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, files = make_gemma(tmp_path / "gemma"), ("1_Pooling/config.json", "config_sentence_transformers.json")
    load(folder).close()
    assert not caplog.messages
    for name in files:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | {"new_key": 1}))
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["kwargs"] = ["task"]
    (folder / "modules.json").write_text(json.dumps(modules))
    load(folder).close()
    told = {"modules.json": "kwargs", **dict.fromkeys(files, "new_key")}
    assert sorted(caplog.messages) == sorted(
        f"{folder / file} has keys that are unknown here and ignored: {key!r}" for file, key in told.items()
    )


def test_the_context_is_at_most_the_table_of_positions(folder: Path) -> None:
    said: list[str] = []
    with Engine.load(folder, device="cpu", ctx_size=2_000_000, verbose=said.append) as engine:
        assert engine.context == engine.model.config.positions
        with pytest.raises(EngineError) as caught:
            engine.embed([5] * (engine.context + 1))
    assert caught.value.code == "context_length_exceeded"
    assert [line for line in said if "no more positions" in line]


# -- EmbeddingGemma: layers of Gemma 3 whose tokens see later ones, and products after pooling -------------------------


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = make_gemma(tmp_path_factory.mktemp("gemma") / "tiny-gemma")
    with Engine.load(folder, device="cpu", weight_type="f32") as loaded:
        yield loaded


def test_a_vector_of_gemma_is_what_sentence_transformers_computes(gemma: Engine, tmp_path: Path) -> None:
    """Of a folder with its modules, and of a GGUF file with dense_2 and dense_3."""
    path = make_gguf(tmp_path / "model.gguf", "embedding_gemma")
    with Engine.load(path, device="cpu", weight_type="f32") as of_gguf:
        for loaded in (gemma, of_gguf):
            found = loaded.embed_each([ids for ids, _ in GEMMAS_TEXTS])
            for one, (_, expected) in zip(found, GEMMAS_TEXTS, strict=True):
                assert np.abs(one.vector - expected).max() <= CLOSE


def test_a_prompt_of_the_files_goes_before_a_text(gemma: Engine) -> None:
    text = "the rain falls"
    for name, before in (("query", "the sea: "), ("document", "a ship: ")):
        named = gemma.embed(text, options=PromptOptions(prompt_name=name))
        np.testing.assert_array_equal(named.vector, gemma.embed(before + text).vector)
    with pytest.raises(EngineError, match="has no prompt 'title' for texts: it has 'document', 'query'"):
        gemma.embed(text, options=PromptOptions(prompt_name="title"))


def test_a_model_may_have_a_prompt_for_texts_without_one(tmp_path: Path, gemma: Engine) -> None:
    folder = make_gemma(tmp_path / "model")
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "default_prompt_name": "query"}))
    with Engine.load(folder, device="cpu", weight_type="f32") as loaded:
        query = gemma.embed("the rain", options=PromptOptions(prompt_name="query"))
        np.testing.assert_array_equal(loaded.embed("the rain").vector, query.vector)


def test_a_server_takes_the_name_of_a_prompt(gemma: Engine) -> None:
    expected = gemma.embed("the rain", options=PromptOptions(prompt_name="query")).vector
    with serving(gemma) as server:
        answer = server.post("/v1/embeddings", {"input": ["the rain"], "prompt_name": "query"}).json()
        assert np.abs(np.array(answer["data"][0]["embedding"]) - expected).max() <= 1e-6
        for wrong in ("title", 5):
            response = server.post("/v1/embeddings", {"input": ["the rain"], "prompt_name": wrong})
            assert response.status_code == 400
            assert "prompt" in response.json()["error"]["message"]
