"""Cross-encoders, which read a query and a document together: BERT and XLM-R with a head of one label."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from polarlm.engine import Engine, EngineError, PromptOptions
from polarlm.engine.limits import RANK
from polarlm.engine.requests.prompts import pair_ids
from polarlm.model_loaders import LoadError, load
from polarlm.server.http.warnings import HEADER
from tests.conftest import ENCODERS
from tests.encoders import make_gguf, make_reranker
from tests.model.test_encoder import BACKENDS, read_encoder
from tests.server.http_server import Serving, serving

NAMES = ("bert", "modernbert", "xlm_roberta")  # modernbert's head reads the mean of a pair's states
RERANKERS = ENCODERS.with_name("rerankers")
QUERY, DOCUMENTS = "the rain", ["rain falls on the sea", "", "a ship [SEP] ran </s>", "rains " * 20]


@pytest.fixture(scope="module", params=NAMES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = make_reranker(tmp_path_factory.mktemp("reranker") / f"tiny-{request.param}", request.param)
    with Engine.load(folder, device="cpu") as loaded:
        yield loaded


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    found = np.load(RERANKERS / name / "reference.npz")
    texts = [found[f"ids{i}"].tolist() for i in range(3)]
    types = [found[f"types{i}"] for i in range(3)]
    seconds = [int(np.argmax(one)) if one.any() else len(one) for one in types]
    for ops in BACKENDS:
        model = read_encoder(RERANKERS / name, ops)
        states, first = model.encode(texts, seconds), 0
        for i, text in enumerate(texts):
            rows, first = states[first : first + len(text)], first + len(text)
            # A sum of 48 products of states, which differ by 2e-5 of the largest, about 3: see tests/model.
            assert model.relevance(rows) == pytest.approx(float(found[f"score{i}"][0]), abs=1e-4)


def expected_scores(engine: Engine) -> list[float]:
    """What the model says of pairs that the library joins, one at a time."""
    library = tokenizers.Tokenizer.from_file(str(engine.model.path / "tokenizer.json"))
    library.encode_special_tokens = True
    scores = []
    for document in DOCUMENTS:
        pair = library.encode(QUERY, document)
        types = np.minimum(pair.type_ids, engine.model.config.token_types - 1)
        second = int(np.argmax(types)) if types.any() else len(types)
        model = engine._model
        scores.append(1 / (1 + np.exp(-model.relevance(model.encode([pair.ids], [second])))))  # type: ignore[attr-defined]
    return scores


def test_pairs_are_joined_as_the_tokenizers_library_does(engine: Engine) -> None:
    expected = expected_scores(engine)
    assert len({round(one, 6) for one in expected}) == len(DOCUMENTS)
    found = engine.rerank(QUERY, DOCUMENTS)
    assert [float(one.vector[0]) for one in found] == pytest.approx(expected, abs=1e-6)
    assert [float(engine.rerank(QUERY, [one])[0].vector[0]) for one in DOCUMENTS] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_file_ranks_alike(tmp_path: Path, name: str) -> None:
    """As llama.cpp's converter writes XLM-R's."""
    file = make_gguf(tmp_path / "model.gguf", f"rerankers/{name}", pooling=4, unigram=name == "xlm_roberta")
    folder = make_reranker(tmp_path / "folder", name)
    with Engine.load(file, device="cpu") as of_gguf, Engine.load(folder, device="cpu") as of_folder:
        plain = ["rain", "rains the stair", ""]  # whose pieces do not depend on how a file normalizes white space
        found, expected = ([float(one.vector[0]) for one in e.rerank(QUERY, plain)] for e in (of_gguf, of_folder))
        assert found == pytest.approx(expected, abs=2e-5)


def test_a_head_of_which_a_part_is_missing_is_refused(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "model.gguf", "rerankers/bert", pooling=4, leave_out="cls.weight")
    with pytest.raises(LoadError, match=r"without a part of its head \(cls\.weight\)"):
        load(file)


def test_a_reranker_gives_no_vectors_and_no_answers(engine: Engine) -> None:
    for ask in (
        lambda: engine.embed("rain"),
        lambda: engine.generate("rain"),
        lambda: engine.chat([{"role": "user", "content": "rain"}]),
    ):
        with pytest.raises(EngineError, match=r"ranks documents for a query .* and does nothing else"):
            ask()
    with pytest.raises(EngineError, match="reads no instruction"):
        engine.rerank(QUERY, DOCUMENTS, "find ships")
    assert "reranker: queries and documents of up to 64 tokens together" in engine.fit_line()


def test_an_embedding_model_cannot_be_made_to_rank(tmp_path: Path) -> None:
    with Engine.load(make_gguf(tmp_path / "model.gguf", "bert_f32"), device="cpu") as loaded:
        with pytest.raises(EngineError, match="cannot rank documents: load a model such as bge-reranker"):
            loaded.rerank(QUERY, DOCUMENTS)
        with pytest.raises(EngineError, match="is an embedding model"):
            loaded.embed([5], options=PromptOptions(pooling=RANK), pooling=RANK)


OTHERS = [
    ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "but only classifiers with one label"),
    ({"id2label": None}, "but only classifiers with one label"),
    ({"architectures": ["BertModel"]}, ""),
]


def test_other_classifiers_are_refused(tmp_path: Path) -> None:
    for number, (changes, part) in enumerate(OTHERS):
        folder = make_reranker(tmp_path / str(number), "bert")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        if part:
            with pytest.raises(LoadError, match=part):
                load(folder)
        else:
            model = load(folder)  # an embedding model, whose file has a head that it does not use
            model.weights.close()
            assert not model.config.scores_pairs


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Serving]:
    with serving(engine) as running:
        yield running


def test_the_server_ranks(server: Serving) -> None:
    scores = [float(one.vector[0]) for one in server.engine.rerank(QUERY, DOCUMENTS)]
    answer = server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()
    assert [one["index"] for one in answer["results"]] == sorted(range(4), key=lambda index: -scores[index])
    many = [f"rain {'falls ' * (at % 5)}" for at in range(100)]
    results = server.post("/v1/rerank", {"query": QUERY, "documents": many}).json()["results"]
    alone = [float(one.vector[0]) for one in server.engine.rerank(QUERY, many[:5])]
    assert all(one["relevance_score"] == pytest.approx(alone[one["index"] % 5], abs=1e-6) for one in results)
    assert server.post("/api/show", {"model": "any"}).json()["capabilities"] == []


def test_answers_have_the_shape_of_what_is_asked(server: Serving) -> None:
    scores = [float(one.vector[0]) for one in server.engine.rerank(QUERY, DOCUMENTS)]
    order = sorted(range(4), key=lambda index: -scores[index])
    answer = server.post("/v2/rerank", {"model": "m", "query": QUERY, "documents": DOCUMENTS, "top_n": 1}).json()
    assert answer["id"]
    assert answer["results"] == [{"index": order[0], "relevance_score": scores[order[0]]}]
    assert answer["meta"]["tokens"]["input_tokens"] == answer["usage"]["total_tokens"]
    body = {"query": QUERY, "documents": [{"text": one} for one in DOCUMENTS], "top_n": 2, "return_documents": True}
    for path in ("/v1/rerank", "/reranking"):
        best = server.post(path, body).json()["results"]
        assert [(one["index"], one["document"]) for one in best] == [(at, {"text": DOCUMENTS[at]}) for at in order[:2]]
    asked = {"query": QUERY, "texts": DOCUMENTS}
    assert server.post("/rerank", asked).json() == [{"index": at, "score": scores[at]} for at in order]
    raw = server.post("/rerank", {**asked, "raw_scores": True, "return_text": True}).json()
    assert [(one["index"], one["text"]) for one in raw] == [(at, DOCUMENTS[at]) for at in order]
    assert [1 / (1 + np.exp(-one["score"])) for one in raw] == pytest.approx([scores[at] for at in order], abs=1e-6)


def test_pairs_are_scored_in_vllms_shape(server: Serving) -> None:
    """One text with each, or each with the one in its place; under every name that vLLM has had for them."""
    scores = [float(one.vector[0]) for one in server.engine.rerank(QUERY, DOCUMENTS)]
    for path, first, second in (("/score", "text_1", "text_2"), ("/v1/score", "queries", "documents")):
        answer = server.post(path, {first: QUERY, second: DOCUMENTS}).json()
        assert (answer["object"], answer["model"]) == ("list", server.engine.model.name)
        assert answer["data"] == [
            {"index": at, "object": "score", "score": pytest.approx(score, abs=1e-6)} for at, score in enumerate(scores)
        ]
    ranked = server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()
    assert answer["usage"] == ranked["usage"]
    turned = {"data_1": [DOCUMENTS[0], QUERY], "data_2": [QUERY, DOCUMENTS[0]]}
    raw = [one["score"] for one in server.post("/score", {**turned, "use_activation": False}).json()["data"]]
    wanted = [
        float(server.engine.rerank(one, [other])[0].vector[0]) for one, other in zip(*turned.values(), strict=True)
    ]
    assert [1 / (1 + np.exp(-one)) for one in raw] == pytest.approx(wanted, abs=1e-6)
    assert wanted[1] == pytest.approx(scores[0], abs=1e-6)
    cut = server.post("/score", {"text_1": QUERY, "text_2": [DOCUMENTS[0], "rain " * 1000]})
    assert "text_2[1]: only the first" in cut.headers[HEADER]


CUTS = [{}, {"truncate": True}, {"truncation": True}, {"truncate": "END"}, {"truncate_prompt_tokens": -1}]


def test_a_long_document_fails_no_request_and_is_told(server: Serving) -> None:
    document, model = "rain " * 1000, server.engine.model
    ((ids, *_),) = server.engine.rank_jobs(QUERY, [document], truncate=True)
    *whole, closing = pair_ids(QUERY, document, model, 10_000)
    assert ids == [*whole[:63], closing]
    (alone,) = (float(one.vector[0]) for one in server.engine.rerank(QUERY, DOCUMENTS[:1]))
    for more in CUTS:
        response = server.post("/v1/rerank", {"query": QUERY, "documents": [DOCUMENTS[0], document], **more})
        scores = {one["index"]: one["relevance_score"] for one in response.json()["results"]}
        assert scores[0] == pytest.approx(alone, abs=1e-6)
        (told,) = response.json()["warnings"]
        assert told == response.headers[HEADER]
        assert re.fullmatch(r"documents\[1\]: only the first \d+ tokens are read", told)
    texts = server.post("/rerank", {"query": QUERY, "texts": [document]})
    assert 0 < texts.json()[0]["score"] < 1
    assert texts.headers[HEADER].startswith("texts[0]: only")
    bare = len(pair_ids(QUERY, "", model, 64))
    for more, tokens in ({"max_tokens_per_doc": 7}, bare + 7), ({"truncate_prompt_tokens": 20}, 20):
        response = server.post("/v2/rerank", {"query": QUERY, "documents": [document], **more}).json()
        assert response["usage"]["total_tokens"] == tokens
        assert response["warnings"] == [f"documents[0]: only the first {tokens - bare} tokens are read"]


def test_of_two_spellings_one_counts(server: Serving) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "texts": DOCUMENTS, "return_text": True, "top_n": 2}
    same = server.post("/v1/rerank", body)
    assert [len(one["document"]["text"]) > -1 for one in same.json()["results"]] == [True, True]
    assert HEADER not in same.headers
    other = server.post("/v1/rerank", {**body, "texts": ["a"], "top_k": 1}).json()
    assert other["results"] == same.json()["results"]
    assert other["warnings"] == [
        "texts is ignored: documents is given as well",
        "top_k is ignored: top_n is given as well",
    ]


WRONG = [
    ({"texts": ["rain " * 100], "truncate": False}, "exceeds the available context size of 64 tokens"),
    ({"documents": ["rain " * 100], "truncation": False}, "exceeds the available context size of 64 tokens"),
    ({"documents": []}, "documents needs at least one text"),
    ({"documents": ["a"] * 10_000}, "documents has 10,000 texts, but at most 2,048"),
    ({"documents": ["a"], "query": "rain " * 100}, "exceeds the available context size of 64 tokens"),
    ({"documents": ["a", "rain " * 100_000], "truncate": "NONE"}, "exceeds the available context size of 64 tokens"),
    ({"documents": ["a"], "instruction": "find"}, "reads no instruction"),
    ({"query": None, "documents": ["a"]}, '"query"'),
    ({"query": "", "documents": ["a"]}, '"query"'),
    ({}, '"documents"'),
    ({"documents": ["a", 5]}, '"documents[1]"'),
    ({"documents": [{"title": "a"}]}, '"documents[0].text"'),
    ({"documents": ["a"], "top_n": "x"}, '"top_n"'),
    ({"documents": ["a"], "truncate": "LEFT"}, '"truncate"'),
    ({"documents": ["a"], "max_tokens_per_doc": "x"}, '"max_tokens_per_doc"'),
    ({"documents": ["a"], "return_documents": "x"}, '"return_documents"'),
    ({"documents": ["a"], "instruction": 1}, '"instruction"'),
]


PAIRS = [
    ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "one text, or as many as text_2 has, 3"),
    ({"text_1": "a"}, "text_2", "text_2 needs at least one text"),
    ({"text_1": "a", "text_2": []}, "text_2", "text_2 needs at least one text"),
    ({"text_1": "a", "text_2": "b", "use_activation": 5}, "use_activation", "true or false"),
]


def test_wrong_requests_are_refused(server: Serving) -> None:
    for body, param, part in PAIRS:
        error = server.refused("/v1/score", body)
        assert (error["param"], part in error["message"]) == (param, True)
    for body, part in WRONG:
        response = server.post("/v1/rerank", {"query": QUERY, **body})
        assert response.status_code == 400
        assert part in response.text
