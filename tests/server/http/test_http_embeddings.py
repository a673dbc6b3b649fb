"""Embeddings over HTTP, with OpenAI's own client and in llama-server's shape."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine
from tests.lazily import openai
from tests.pairs import in_turn
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
        answer = embed(shared, input=texts)
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
