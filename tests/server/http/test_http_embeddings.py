"""Embeddings over HTTP, with OpenAI's own client and in llama-server's and Ollama's shapes; a server of an encoder."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, PromptOptions
from polarlm.server.http.warnings import HEADER
from tests.encoders import make_folder
from tests.lazily import openai
from tests.pairs import in_turn
from tests.server.apis import APIS, SLIP
from tests.server.http_server import Serving, serving
from tests.server.lines import eventually

TEXT, OTHER = "the rain", "then he ran on and on"


def embed(server: Serving, **more: Any) -> Any:
    return server.openai.embeddings.create(**{"model": "any", "input": TEXT, **more})


@pytest.mark.parametrize(("pooling", "encoding"), [(None, "float"), ("mean", "base64"), ("last", "float")])
def test_a_text_has_the_vector_that_the_engine_gives_it(shared: Serving, pooling: Any, encoding: Any) -> None:
    expected = shared.engine.embed(TEXT, pooling or "mean")
    body = {"input": TEXT, "pooling": pooling, "encoding_format": encoding}
    answer = shared.post("/v1/embeddings", body).json()
    (entry,) = answer["data"]
    vector = entry["embedding"]
    if encoding == "base64":
        vector = np.frombuffer(base64.b64decode(vector), "<f4")
    assert np.asarray(vector, np.float32).tolist() == expected.vector.tolist()
    assert (entry["index"], entry["object"], answer["object"]) == (0, "embedding", "list")
    assert answer["pooling"] == (pooling or "mean")
    tokens = expected.usage.prompt_tokens
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_openais_client_reads_several_vectors(shared: Serving) -> None:
    ids = shared.engine.tokenize(OTHER)
    for texts in ([TEXT, OTHER], [shared.engine.tokenize(TEXT), ids]):
        answer = embed(shared, input=texts, extra_body=SLIP)
        assert answer.model_extra["warnings"] == ["temprature is unknown and ignored"]
        assert [one.index for one in answer.data] == [0, 1]
        for one, text in zip(answer.data, (TEXT, OTHER), strict=True):
            np.testing.assert_array_equal(np.float32(one.embedding), shared.engine.embed(text).vector)
        assert answer.usage.prompt_tokens == len(shared.engine.tokenize(TEXT)) + len(ids)
    assert np.float32(embed(shared, input=ids).data[0].embedding).tolist() == shared.engine.embed(ids).vector.tolist()


@pytest.mark.parametrize(("path", "field"), [("/embedding", "content"), ("/embeddings", "input")])
def test_llama_servers_shape_has_a_list_of_vectors(shared: Serving, path: str, field: str) -> None:
    expected = [shared.engine.embed(text).vector.tolist() for text in (TEXT, OTHER)]
    one = shared.post(path, {field: TEXT, "embd_normalize": 2}).json()
    assert one == [{"index": 0, "embedding": [pytest.approx(expected[0])]}]
    two = shared.post(path, {field: [TEXT, OTHER]}).json()
    assert two == [{"index": at, "embedding": [pytest.approx(vector)]} for at, vector in enumerate(expected)]


@in_turn(
    "body param part",
    [
        ({}, "input", "must be a string or an array"),
        ({"input": []}, "input", "array"),
        ({"input": 5}, "input", "must be a string or an array"),
        ({"input": [TEXT] * 3000}, "input", "3,000 prompts, but at most 2,048"),
        ({"input": [TEXT, None]}, "input[1]", "null"),
        ({"input": TEXT, "encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"input": TEXT, "pooling": "max"}, "pooling", "mean, last or cls"),
        ({"input": TEXT, "truncate_prompt_tokens": 8}, "truncate_prompt_tokens", "to the context alone"),
        ({"input": TEXT, "embd_normalize": -1}, "embd_normalize", "length 1"),
        ({"input": TEXT, "model": 3}, "model", "a string"),
        ({"input": TEXT, "dimensions": -2}, "dimensions", ""),
        ({"input": TEXT, "truncate": 1}, "truncate", "true or false"),
    ],
)
def test_a_wrong_field_is_named(shared: Serving, body: Any, param: str, part: str) -> None:
    for path in ("/v1/embeddings", "/embedding"):
        error = shared.refused(path, body)
        assert error["param"] == param
        assert part in error["message"]


def test_no_text_and_too_much_of_it_are_bad_requests(shared: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match="empty"):
        embed(shared, input="")
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]: The prompt is empty"):
        embed(shared, input=[TEXT, ""])
    with pytest.raises(openai.BadRequestError) as caught:
        embed(shared, input=[TEXT, [7] * 300])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.body["n_prompt_tokens"] == 300  # type: ignore[index]
    eventually(lambda: not shared.busy)


def test_a_client_that_hangs_up_ends_its_request(tiny: Engine) -> None:
    with serving(tiny) as server:
        server.gate.close()
        connection = server.send("/v1/embeddings", {"input": [[7] * 60] * 500})
        eventually(lambda: server.engine.status().waiting)
        connection.close()
        eventually(lambda: server.outcomes().get("cancelled") == 1)
        server.gate.open()
        eventually(lambda: not server.busy)
        assert len(embed(server).data) == 1


# -- an encoder ------------------------------------------------------------------------------------------------

TEXTS = ["the rain falls", "a ship on the sea", "he ran"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = make_folder(tmp_path_factory.mktemp("encoder") / "tiny-embed", "bert_wide", "cls")
    with Engine.load(folder, device="cpu") as engine, serving(engine) as running:
        yield running


def close(vector: Any, expected: np.ndarray) -> bool:
    return bool(np.abs(np.asarray(vector, np.float32) - expected).max() <= 1e-6)


def test_an_encoders_vectors_in_openais_shape(encoder: Serving) -> None:
    expected = [one.vector for one in encoder.engine.embed_each(TEXTS)]
    answer = encoder.post("/v1/embeddings", {"input": TEXTS, "model": "any"}).json()
    assert answer["pooling"] == "cls"
    assert all(close(one["embedding"], want) for one, want in zip(answer["data"], expected, strict=True))
    cut = [one.vector for one in encoder.engine.embed_each(TEXTS, None, PromptOptions(dimensions=8))]
    body = {"input": TEXTS, "dimensions": 8, "encoding_format": "base64"}
    for one, want in zip(encoder.post("/v1/embeddings", body).json()["data"], cut, strict=True):
        assert close(np.frombuffer(base64.b64decode(one["embedding"]), "<f4"), want)
    ids = [encoder.engine.prompt_ids(text, encoder.engine.embedding_options(None)) for text in TEXTS]
    from_ids = encoder.post("/v1/embeddings", {"input": ids}).json()
    assert all(close(one["embedding"], want) for one, want in zip(from_ids["data"], expected, strict=True))
    assert from_ids["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_vectors_and_their_cosines_in_vllms_shapes(encoder: Serving) -> None:
    vectors = [one.vector.astype(np.float64) for one in encoder.engine.embed_each(TEXTS)]
    pooled = encoder.post("/pooling", {"input": TEXTS, "task": "embed"}).json()
    assert [(one["index"], one["object"]) for one in pooled["data"]] == [(at, "pooling") for at in range(3)]
    assert all(close(one["data"], vector) for one, vector in zip(pooled["data"], vectors, strict=True))
    whole = encoder.post("/v1/embeddings", {"input": TEXTS}).json()
    assert (pooled["object"], pooled["usage"]) == ("list", whole["usage"])
    scored = encoder.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()
    wanted = [float(vectors[0] @ one / np.linalg.norm(vectors[0]) / np.linalg.norm(one)) for one in vectors]
    assert [one["score"] for one in scored["data"]] == pytest.approx(wanted, abs=1e-6)
    assert wanted[0] > max(wanted[1:])
    in_place = encoder.post("/v1/score", {"text_1": TEXTS, "text_2": TEXTS[::-1]}).json()
    assert [one["score"] for one in in_place["data"]] == pytest.approx([wanted[2], 1, wanted[2]], abs=1e-6)
    assert encoder.refused("/pooling", {"input": TEXTS, "task": "token_embed"})["param"] == "task"
    pair = {"text_1": TEXTS[0], "text_2": [TEXTS[1], "rain " * 1000]}
    told = encoder.post("/v1/score", pair).headers[HEADER]
    assert "text_2[1]: only the first" in told
    assert "text_1" not in told
    assert encoder.refused("/v1/score", pair | {"truncate_prompt_tokens": 5})["param"] == "truncate_prompt_tokens"


def test_an_encoders_vectors_in_ollamas_shapes(encoder: Serving) -> None:
    older = encoder.post("/api/embeddings", {"model": "any", "prompt": TEXTS[0]}).json()
    assert close(older["embedding"], encoder.engine.embed(TEXTS[0]).vector)
    (cut,) = encoder.post("/api/embed", {"model": "any", "input": TEXTS[0], "dimensions": 3}).json()["embeddings"]
    assert len(cut) == 3
    for nothing in ({"input": ""}, {"input": []}, {"input": None}, {}):
        assert encoder.post("/api/embed", nothing).json()["embeddings"] == []
    assert encoder.post("/api/show", {"model": "any"}).json()["capabilities"] == ["embedding"]


def test_a_long_text_is_an_error_unless_it_may_be_cut(encoder: Serving) -> None:
    """Ollama cuts texts unless it is told not to; OpenAI does not."""
    long = "rain " * 150
    cut = encoder.engine.embed(long, options=PromptOptions(truncate=True)).vector
    for path, body in (("/v1/embeddings", {"input": long}), ("/api/embed", {"input": long, "truncate": False})):
        response = encoder.post(path, body)
        assert response.status_code == 400
        assert "152 tokens exceeds the available context size of 64 tokens" in response.text
    of_ollama = encoder.post("/api/embed", {"input": [long, "rain", long]}).json()
    assert close(of_ollama["embeddings"][0], cut)
    assert of_ollama["warnings"] == ["input[0], input[2]: only the first 63 tokens are read"]  # and the closing one
    for more in ({"truncate": True}, {"truncate_prompt_tokens": -1}):
        answer = encoder.post("/v1/embeddings", {"input": long, **more}).json()
        assert close(answer["data"][0]["embedding"], cut)
        assert answer["usage"]["prompt_tokens"] == 64
        assert answer["warnings"] == ["input[0]: only the first 63 tokens are read"]


def test_many_texts_come_in_order(encoder: Serving) -> None:
    texts = [f"rain {'falls ' * (at % 7)}" for at in range(300)]
    answer = encoder.post("/v1/embeddings", {"input": texts}).json()
    alone = [encoder.engine.embed(text).vector for text in texts[:7]]
    assert len(answer["data"]) == 300
    assert all(close(one["embedding"], alone[at % 7]) for at, one in enumerate(answer["data"]))
    eventually(lambda: not encoder.busy)


def test_an_encoder_writes_no_answers(encoder: Serving) -> None:
    for api in APIS.values():
        response = encoder.post(api.path, api.body("rain"))
        assert response.status_code == 400
        assert "tiny-embed is an embedding model: it gives texts a vector" in response.text


def test_the_state_of_a_server_of_an_encoder_can_be_asked_for(encoder: Serving) -> None:
    stats = encoder.http.get("/stats").json()
    assert (stats["context"], stats["blocks"], stats["window"], stats["bits_per_value"]) == (64, 0, None, 0)
    for path in ("/metrics", "/props", "/slots", "/v1/models", "/api/tags", "/api/ps", "/health", "/stats?tokens=9"):
        assert encoder.http.get(path).status_code == 200, path
