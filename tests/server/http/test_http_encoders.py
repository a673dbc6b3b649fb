"""A server of an encoder: vectors in every API's shape, and sentences where answers are asked for."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, PromptOptions
from tests.encoders import make_folder
from tests.server.apis import APIS
from tests.server.http_server import Serving, serving
from tests.server.lines import eventually

TEXTS = ["the rain falls", "a ship on the sea", "he ran"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = make_folder(tmp_path_factory.mktemp("encoder") / "tiny-embed", "bert_wide", "cls")
    with Engine.load(folder, device="cpu") as engine, serving(engine) as running:
        yield running


def close(vector: Any, expected: np.ndarray) -> bool:
    return bool(np.abs(np.asarray(vector, np.float32) - expected).max() <= 1e-6)


def test_openais_shape(shared: Serving) -> None:
    expected = [one.vector for one in shared.engine.embed_each(TEXTS)]
    answer = shared.post("/v1/embeddings", {"input": TEXTS, "model": "any"}).json()
    assert answer["pooling"] == "cls"
    assert all(close(one["embedding"], want) for one, want in zip(answer["data"], expected, strict=True))
    cut = [one.vector for one in shared.engine.embed_each(TEXTS, None, PromptOptions(dimensions=8))]
    body = {"input": TEXTS, "dimensions": 8, "encoding_format": "base64"}
    for one, want in zip(shared.post("/v1/embeddings", body).json()["data"], cut, strict=True):
        assert close(np.frombuffer(base64.b64decode(one["embedding"]), "<f4"), want)
    ids = [shared.engine.prompt_ids(text, shared.engine.embedding_options(None)) for text in TEXTS]
    from_ids = shared.post("/v1/embeddings", {"input": ids}).json()
    assert all(close(one["embedding"], want) for one, want in zip(from_ids["data"], expected, strict=True))
    assert from_ids["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_ollamas_shapes(shared: Serving) -> None:
    older = shared.post("/api/embeddings", {"model": "any", "prompt": TEXTS[0]}).json()
    assert close(older["embedding"], shared.engine.embed(TEXTS[0]).vector)
    (cut,) = shared.post("/api/embed", {"model": "any", "input": TEXTS[0], "dimensions": 3}).json()["embeddings"]
    assert len(cut) == 3
    assert shared.post("/api/show", {"model": "any"}).json()["capabilities"] == ["embedding"]


def test_a_long_text_is_an_error_unless_it_may_be_cut(shared: Serving) -> None:
    """Ollama cuts texts unless it is told not to; OpenAI does not."""
    long = "rain " * 150
    cut = shared.engine.embed(long, options=PromptOptions(truncate=True)).vector
    for path, body in (("/v1/embeddings", {"input": long}), ("/api/embed", {"input": long, "truncate": False})):
        response = shared.post(path, body)
        assert response.status_code == 400
        assert "152 tokens exceeds the available context size of 64 tokens" in response.text
    of_ollama = shared.post("/api/embed", {"input": [long, "rain", long]}).json()
    assert close(of_ollama["embeddings"][0], cut)
    assert of_ollama["warnings"] == ["input[0], input[2]: only the first 63 tokens are read"]  # and the closing one
    for more in ({"truncate": True}, {"truncate_prompt_tokens": -1}):
        answer = shared.post("/v1/embeddings", {"input": long, **more}).json()
        assert close(answer["data"][0]["embedding"], cut)
        assert answer["usage"]["prompt_tokens"] == 64
        assert answer["warnings"] == ["input[0]: only the first 63 tokens are read"]


def test_many_texts_come_in_order(shared: Serving) -> None:
    texts = [f"rain {'falls ' * (at % 7)}" for at in range(300)]
    answer = shared.post("/v1/embeddings", {"input": texts}).json()
    alone = [shared.engine.embed(text).vector for text in texts[:7]]
    assert len(answer["data"]) == 300
    assert all(close(one["embedding"], alone[at % 7]) for at, one in enumerate(answer["data"]))
    eventually(lambda: not shared.busy)


def test_no_answers_are_written(shared: Serving) -> None:
    for api in APIS.values():
        response = shared.post(api.path, api.body("rain"))
        assert response.status_code == 400
        assert "tiny-embed is an embedding model: it gives texts a vector" in response.text


def test_the_state_of_the_server_can_be_asked_for(shared: Serving) -> None:
    stats = shared.http.get("/stats").json()
    assert (stats["context"], stats["blocks"], stats["window"], stats["bits_per_value"]) == (64, 0, None, 0)
    for path in ("/metrics", "/props", "/slots", "/v1/models", "/api/tags", "/api/ps", "/health", "/stats?tokens=9"):
        assert shared.http.get(path).status_code == 200, path
