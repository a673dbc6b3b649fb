"""Engines of encoders: vectors of texts, and what such an engine refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from polarlm.engine import Engine, EngineError, PromptOptions
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.loading import assembly
from polarlm.engine.loading.checks import settle
from polarlm.model_loaders import LoadError, load
from tests.encoders import CLS, SEP, UNIGRAM, make_folder, make_gguf, pieces, pooled, reference, tokenizer_json

TEXT = "The rain falls on a sea."
CLOSE = 2e-5  # for vectors of length 1 and weights in float32: see tests/model/test_encoder.py


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


@pytest.mark.parametrize("name", ["bert_f32", "xlm_roberta", "nomic_bert"])
def test_a_gguf_file_gives_the_same_vectors(tmp_path: Path, name: str) -> None:
    with Engine.load(make_gguf(tmp_path / "model.gguf", name), device="cpu") as loaded:
        for ids, states in reference(name):
            assert np.abs(loaded.embed(ids).vector - pooled(states, "mean")).max() <= CLOSE


@pytest.mark.parametrize(("dtype", "error"), [("F16", 2e-3), ("Q8_0", 3e-2)])
def test_packed_weights_give_nearly_the_same_vectors(tmp_path: Path, dtype: str, error: float) -> None:
    """Halves are 2^-11 of a number apart; codes of 8 bits, 1/127 of the largest of 32."""
    with Engine.load(make_gguf(tmp_path / "model.gguf", "bert_wide", dtype), device="cpu") as loaded:
        for ids, states in reference("bert_wide"):
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


def test_what_an_engine_says_of_an_encoder(engine: Engine) -> None:
    assert "embedding model: vectors of 64, texts of up to 64 tokens" in engine.fit_line()
    status = engine.status()
    assert (status.blocks, status.running, status.waiting) == (0, 0, 0)
    assert engine.cache_stats().tokens == 0


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


WRONG = [
    ({"hidden_act": "relu"}, "hidden_act is 'relu', but only gelu is supported"),
    ({"position_embedding_type": "relative_key"}, "only absolute positions"),
    ({"is_decoder": True}, "only an encoder"),
    ({"num_attention_heads": 5}, "must be a multiple of 10"),
    ({"max_position_embeddings": 70}, r"embeddings.weight has the shape \(64, 64\)"),
    ({"architectures": ["BertForQuestionAnswering"]}, "architectures"),
]


def test_a_wrong_configuration_is_named(tmp_path: Path) -> None:
    for number, (changes, part) in enumerate(WRONG):
        path = make_folder(tmp_path / str(number), "bert_wide") / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        with pytest.raises(LoadError, match=part):
            load(path.parent)


MODULES = [
    (lambda folder: (folder / "modules.json").write_text("[1]"), "should hold a list of objects"),
    (lambda folder: (folder / "modules.json").write_text("{"), "is not valid JSON"),
    (lambda folder: (folder / "1_Pooling" / "config.json").unlink(), "config.json is missing"),
    (lambda folder: (folder / "1_Pooling" / "config.json").write_text("{}"), "asks for no pooling"),
    (
        lambda folder: (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}'),
        "pooling_mode is 'max'",
    ),
]


def test_wrong_modules_are_named(tmp_path: Path) -> None:
    for number, (change, part) in enumerate(MODULES):
        folder = make_folder(tmp_path / str(number), "bert_wide")
        change(folder)
        with pytest.raises(LoadError, match=part):
            load(folder)
    for pooling, modules, what in (("max", {}, "pooling_mode_max_tokens"), ("mean", {"CNN": "2"}, "module 'CNN'")):
        with pytest.raises(LoadError, match=what):
            load(make_folder(tmp_path / pooling, "bert_wide", pooling, **modules))


def test_the_context_is_at_most_the_table_of_positions(folder: Path) -> None:
    said: list[str] = []
    with Engine.load(folder, device="cpu", ctx_size=2_000_000, verbose=said.append) as engine:
        assert engine.context == engine.model.config.positions
        with pytest.raises(EngineError) as caught:
            engine.embed([5] * (engine.context + 1))
    assert caught.value.code == "context_length_exceeded"
    assert [line for line in said if "no more positions" in line]
