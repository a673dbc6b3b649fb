"""Ollama's own client against the HTTP API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from polarlm.engine import Engine
from tests.random_model import random_model, write_in_parts
from tests.server.http.test_http_openai import alone
from tests.server.http.test_http_streams import breaking
from tests.server.http_server import Serving, serving
from tests.tiny import forget

QUESTION: list[Any] = [{"role": "user", "content": "then he ran on"}]
OPTIONS = {"temperature": 0, "num_predict": 24, "ignore_eos": True, "num_ctx": 4096, "num_thread": 2}


@pytest.fixture
def server(tiny: Engine) -> Iterator[Serving]:
    with serving(tiny) as running:
        yield running


@pytest.fixture
def client(server: Serving) -> ollama.Client:
    return ollama.Client(f"http://127.0.0.1:{server.port}", timeout=60)


def text_of(engine: Engine, prompt: Any, **more: Any) -> str:
    """The engine's own answer of 24 tokens."""
    return alone(engine, prompt, temperature=0, max_tokens=24, ignore_eos=True, **more).text


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered_as_the_engine_does(server: Serving, client: ollama.Client) -> None:
    expected = alone(server.engine, QUESTION, temperature=0, max_tokens=24, ignore_eos=True)
    answer = client.chat("any", QUESTION, options=OPTIONS, keep_alive="5m", think=False)
    assert (answer.message.role, answer.message.content) == ("assistant", expected.text)
    assert (answer.model, answer.done, answer.done_reason) == (server.engine.model.name, True, "length")
    assert answer.prompt_eval_count == expected.usage.prompt_tokens
    assert answer.eval_count == 24
    assert answer.total_duration
    assert answer.prompt_eval_duration
    assert answer.eval_duration
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration
    assert answer.created_at.endswith("Z")


@pytest.mark.slow
def test_a_streamed_chat_is_the_same_in_lines(server: Serving, client: ollama.Client) -> None:
    whole = client.chat("any", QUESTION, options=OPTIONS)
    forget(server.engine)
    *parts, last = client.chat("any", QUESTION, options=OPTIONS, stream=True)
    assert len(parts) > 3
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert not any(part.done for part in parts)
    assert (last.done, last.message.content) == (True, "")
    for field in ("done_reason", "prompt_eval_count", "eval_count", "model"):
        assert last[field] == whole[field]


def test_a_stream_is_the_default_and_has_a_line_for_each_piece(server: Serving) -> None:
    response = server.post("/api/chat", {"messages": QUESTION, "options": OPTIONS})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.content.isascii()
    *lines, rest = response.text.split("\n")
    assert rest == ""
    assert [json.loads(line)["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_generate_asks_a_question_or_continues_a_raw_text(server: Serving, client: ollama.Client, stream: bool) -> None:
    system = {"role": "system", "content": "then on"}
    for given, prompt in (
        ({"prompt": "then he ran on"}, QUESTION),
        ({"prompt": "then he ran on", "system": "then on"}, [system, *QUESTION]),
        ({"prompt": "the rain", "raw": True}, "the rain"),
    ):
        expected = text_of(server.engine, prompt)
        answer = client.generate("any", **given, options=OPTIONS, stream=stream)  # type: ignore[call-overload]
        parts = list(answer) if stream else [answer]
        assert "".join(part.response for part in parts) == expected
        assert parts[-1].done_reason == "length"
        forget(server.engine)


@pytest.mark.slow
def test_options_are_those_of_sampling(server: Serving, client: ollama.Client) -> None:
    text = text_of(server.engine, QUESTION)
    answer = client.chat("any", QUESTION, options={**OPTIONS, "stop": [text[8:10]]})
    assert (answer.message.content, answer.done_reason) == (text[: text.index(text[8:10])], "stop")
    warm = {**OPTIONS, "temperature": 2, "num_predict": -2}
    first, again, other = (
        client.chat("any", QUESTION, options={**warm, "num_predict": 9, "seed": seed}).message.content
        for seed in (7, 7, 8)
    )
    assert first == again != other
    assert client.chat("any", QUESTION, options={**warm, "seed": 7}).eval_count == server.engine.context - (
        client.chat("any", QUESTION, options=OPTIONS).prompt_eval_count or 0
    )


def test_an_answer_is_of_the_format(client: ollama.Client) -> None:
    """The vocabulary of this model has no braces, but digits."""
    schema = {"type": "integer", "minimum": 100, "maximum": 999}
    assert 100 <= int(client.chat("any", QUESTION, format=schema).message.content or "") <= 999


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_engine(server: Serving, client: ollama.Client) -> None:
    expected = alone(server.engine, QUESTION, temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    answer = client.chat("any", QUESTION, options=OPTIONS, logprobs=True, top_logprobs=2)
    assert answer.logprobs is not None
    assert [token.logprob for token in answer.logprobs] == [token.logprob for token in expected.logprobs]
    assert all(len(token.top_logprobs or ()) == 2 for token in answer.logprobs)
    parts = client.chat("any", QUESTION, options=OPTIONS, logprobs=True, top_logprobs=2, stream=True)
    assert sum(len(part.logprobs or ()) for part in parts) == 24


def test_without_a_prompt_the_model_is_loaded_already(client: ollama.Client) -> None:
    chat = client.chat("any", [])
    assert (chat.message.content, chat.done, chat.done_reason) == ("", True, "load")
    generated = client.generate("any", "")
    assert (generated.response, generated.done, generated.done_reason) == ("", True, "load")


# -- the model ---------------------------------------------------------------------------------------------------------


def test_the_model_is_listed_shown_and_running(server: Serving, client: ollama.Client) -> None:
    engine = server.engine
    (listed,) = client.list().models
    assert listed.model == engine.model.name
    assert listed.size == (engine.model.path / "model.safetensors").stat().st_size
    assert listed.digest is not None
    assert len(listed.digest) == 64
    assert (listed.details.format, listed.details.family) == ("safetensors", engine.model.config.family)
    (running,) = client.ps().models
    assert (running.model, running.context_length, running.size_vram) == (engine.model.name, engine.context, 0)
    shown = client.show("any")
    assert shown.template == engine.model.template.source
    assert shown.capabilities == ["completion", "tools", "embedding"]
    assert shown.modelinfo[f"{engine.model.config.family}.context_length"] == engine.context
    assert shown.modelinfo["general.parameter_count"] > 0
    version = server.http.get("/api/version").json()["version"]
    parts = tuple(map(int, version.split(".")))  # as Open WebUI reads it
    assert parts >= (0, 13, 4)  # the least for Codex; Copilot in VS Code needs 0.6.4


def test_the_size_of_a_model_in_parts_is_that_of_all(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    first = write_in_parts(tmp_path / "parts" / "tiny-Q8_0.gguf", random_model(tmp_path), 8)
    with Engine.load(first, device="cpu", ctx_size=128, calibration=False) as engine, serving(engine) as server:
        (listed,) = server.http.get("/api/tags").json()["models"]
    assert listed["size"] == sum(part.stat().st_size for part in first.parent.iterdir())
    assert listed["details"]["format"] == "gguf"


def test_the_model_that_is_there_is_pulled(server: Serving, client: ollama.Client) -> None:
    """Clients pull before they chat."""
    name = server.engine.model.name
    for given in (name, f"{name}:latest"):
        assert client.pull(given).status == "success"
        assert [part.status for part in client.pull(given, stream=True)] == ["success"]
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match=f"pulls no models: it has {name} alone") as caught:
            list(client.pull("llama3.2", stream=stream))
        assert caught.value.status_code == 501


def test_an_embedding_has_an_older_form(server: Serving, client: ollama.Client) -> None:
    found = client.embeddings("any", "the rain")
    assert found.embedding == pytest.approx(client.embed("any", "the rain").embeddings[0])
    assert client.embeddings("any", "").embedding == []
    assert server.post("/api/embeddings", {"prompt": 5}).status_code == 400


def test_embeddings_are_those_of_the_engine(server: Serving, client: ollama.Client) -> None:
    found = client.embed("any", ["the rain", "then"])
    assert [len(vector) for vector in found.embeddings] == [server.engine.model.config.hidden_size] * 2
    expected = server.engine.embed("the rain").vector
    assert list(found.embeddings[0]) == pytest.approx(expected.tolist(), abs=1e-6)
    assert found.prompt_eval_count == len(server.engine.tokenize("the rain")) + len(server.engine.tokenize("then"))
    one = client.embed("any", "the rain")
    assert list(one.embeddings[0]) == pytest.approx(expected.tolist(), abs=1e-6)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "given", "place"),
    [
        ("/api/chat", {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["eA=="]}]}, "messages[0].images"),
        ("/api/chat", {"messages": 5}, "messages"),
        ("/api/chat", {"prompt": "hi"}, "messages"),
        ("/api/chat", {"messages": QUESTION, "options": {"num_predict": "many"}}, "options.num_predict"),
        ("/api/chat", {"messages": QUESTION, "options": {"temperature": -1}}, "options.temperature"),
        ("/api/chat", {"messages": QUESTION, "options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {"messages": QUESTION, "options": 5}, "options"),
        ("/api/chat", {"messages": QUESTION, "format": "xml"}, "format"),
        ("/api/chat", {"messages": QUESTION, "think": "hard"}, "think"),
        ("/api/chat", {"messages": QUESTION, "stream": 5}, "stream"),
        ("/api/generate", {"prompt": 5}, "prompt"),
        ("/api/generate", {"prompt": "a", "images": ["eA=="]}, "images"),
        ("/api/generate", {"prompt": "a", "context": [1, 2]}, "context"),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        ("/api/embed", {"input": 5}, "input"),
        ("/api/embed", {"input": "a", "dimensions": -2}, "dimensions"),
        ("/api/show", {"model": 5}, "model"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_field(
    server: Serving, path: str, given: dict[str, Any], place: str
) -> None:
    response = server.post(path, given)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    assert response.json()["error"].startswith(place)


def test_the_client_raises_errors(server: Serving, client: ollama.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    long = [{"role": "user", "content": "then " * 300}]
    with pytest.raises(ollama.ResponseError, match="exceeds the available context") as caught:
        client.chat("any", long)
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="exceeds the available context"):
        list(client.chat("any", long, stream=True))
    with pytest.raises(ollama.ResponseError) as caught:
        client.pull("another")
    assert caught.value.status_code == 501
    breaking(server.engine, monkeypatch, steps=6)
    with pytest.raises(ollama.ResponseError) as caught:
        list(client.chat("any", QUESTION, options=OPTIONS, stream=True))
    assert "secret" not in str(caught.value)
