"""Decoders that were trained for vectors, as Qwen3-Embedding, and for ranking documents, as Qwen3-Reranker."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError
from tests.conftest import EMBEDDING_DECODERS
from tests.encoders import pooled
from tests.server.http_server import serving
from tests.tiny import make_model, tokenizer_json

QWEN3 = EMBEDDING_DECODERS / "qwen3_embedding"
END = 3  # <|endoftext|> in the vocabulary of the tests
QUERY, DOCUMENTS = "rain", ["the sea", "it rained on the hat", ""]


def with_words(folder: Path) -> None:
    """Give the vocabulary of a folder tokens for yes and no, and a token that closes a text."""
    described = json.loads(tokenizer_json())
    ids = described["model"]["vocab"]
    unused = iter("789")
    for pair in (["n", "o"], ["y", "e"], ["ye", "s"]):
        described["model"]["merges"].append(pair)
        ids["".join(pair)] = ids.pop(next(unused))
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [END], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("qwen3") / "tiny-qwen3"
    shutil.copytree(QWEN3, folder)
    with_words(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true, "include_prompt": true}')
    modules = [{"path": "", "type": "models.Transformer"}, {"path": "1_Pooling", "type": "models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with Engine.load(folder, device="cpu", cache_type="f16", block_size=16) as loaded:
        yield loaded


def test_a_vector_is_the_state_of_the_last_token(engine: Engine) -> None:
    found = np.load(QWEN3 / "reference.npz")
    for number in range(len(found) // 2):
        expected = pooled(found[f"states{number}"], "last")
        vector = engine.embed(found[f"ids{number}"].tolist()).vector
        # A vector of length 1, after two layers whose sums of products are in float32.
        assert np.abs(vector - expected).max() <= 5e-5


def test_a_text_ends_with_the_token_that_closes_it(engine: Engine) -> None:
    ids = engine.tokenize("the rain")
    assert engine.embed("the rain").vector.tolist() == engine.embed([*ids, END]).vector.tolist()
    assert engine.prompt_ids("the rain") == ids  # which generation goes on from


def probability(engine: Engine, document: str) -> float:
    """The probability of yes beside no after the prompt of such models, from the scores of its tokens."""
    (prompt, _, options) = engine.rank_jobs(QUERY, [document])[0]
    ids = engine.prompt_ids(prompt, options)
    yes, no = (
        float(engine.score([*ids, *engine.tokenize(word)]).logprobs[-1].astype(np.float64)) for word in ("yes", "no")
    )
    return 1 / (1 + np.exp(no - yes))


def test_a_document_is_as_relevant_as_yes_is_likely(engine: Engine) -> None:
    with pytest.warns(UserWarning, match="tiny-qwen3 is no reranker by its name"):
        found = engine.rerank(QUERY, DOCUMENTS)
    assert [one.vector.shape for one in found] == [(1,)] * 3
    for one, document in zip(found, DOCUMENTS, strict=True):
        # Scores read keys and values as halves.
        assert float(one.vector[0]) == pytest.approx(probability(engine, document), abs=2e-3)
    other = engine.rerank(QUERY, DOCUMENTS, "documents about hats")
    assert [float(one.vector[0]) for one in other] != [float(one.vector[0]) for one in found]


def test_the_prompt_is_that_of_the_trained_model(engine: Engine) -> None:
    (prompt, _, options) = engine.rank_jobs("q", ["d"])[0]
    system, user = prompt
    assert (system["role"], user["role"]) == ("system", "user")  # type: ignore[index, call-overload]
    assert user["content"].endswith("\n<Query>: q\n<Document>: d")  # type: ignore[index, call-overload]
    assert options.template_variables == {"enable_thinking": False}


def test_models_without_the_words_cannot_rank(tmp_path: Path) -> None:
    with Engine.load(make_model(tmp_path), device="cpu") as loaded, pytest.raises(EngineError, match="for yes and no"):
        loaded.rerank(QUERY, DOCUMENTS)


def test_a_server_ranks_with_it(engine: Engine) -> None:
    scores = [float(one.vector[0]) for one in engine.rerank(QUERY, DOCUMENTS)]
    with serving(engine) as server:
        answer = server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()
        assert server.post("/api/show", {"model": "any"}).json()["capabilities"] == ["embedding"]
        scored = server.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS[0]}).json()
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [one["index"] for one in answer["results"]] == order
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([scores[at] for at in order])
    assert answer["warnings"] == [engine.ranking_note()]  # by its name, it is no reranker
    assert "warnings" not in scored  # which compares vectors, since its files say how


def test_the_beginning_is_read_of_a_document_that_is_too_long(engine: Engine) -> None:
    told = dict[int, str]()
    ((bare, _, options),) = engine.rank_jobs(QUERY, [""])
    tokens = len(engine.prompt_ids(bare, options))
    long = "it rained on the hat € " * 60
    (cut, *_), whole = engine.rank_jobs(QUERY, [long, "the sea"], most=tokens + 16, warn=told.__setitem__)
    assert tokens + 9 < len(engine.prompt_ids(cut, options)) <= tokens + 15
    assert long.startswith(cut[1]["content"].partition("<Document>: ")[2])  # type: ignore[index, call-overload]
    assert whole == engine.rank_jobs(QUERY, ["the sea"])[0]
    assert [*told] == [0]
    (few, *_), *_ = engine.rank_jobs(QUERY, [long], most_of_document=5)
    assert len(engine.prompt_ids(few, options)) == tokens + 5
