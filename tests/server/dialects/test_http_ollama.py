"""What Ollama's API alone has, with Ollama's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine
from tests.lazily import ollama
from tests.random_model import random_model, write_in_parts
from tests.server.apis import SLIP
from tests.server.dialects.test_every_api import TOOLS
from tests.server.http_server import Serving, serving
from tests.tiny import forget

QUESTION: list[Any] = [{"role": "user", "content": "then he ran on"}]
OPTIONS = {"temperature": 0, "num_predict": 24, "ignore_eos": True, "num_ctx": 4096, "num_thread": 2}
OPTIONS |= SLIP  # its client keeps no field that it does not know: it has to pass over the one that tells of this


@pytest.fixture
def client(server: Serving) -> ollama.Client:
    return ollama.Client(server.url, timeout=60)


# -- answers -----------------------------------------------------------------------------------------------------------


def test_the_client_reads_answers_and_streams(server: Serving, client: ollama.Client) -> None:
    whole = client.chat("any", QUESTION, options=OPTIONS, keep_alive="5m", think=False)
    assert (whole.message.role, whole.model) == ("assistant", server.engine.model.name)
    assert whole.total_duration
    assert whole.prompt_eval_duration
    assert whole.eval_duration
    assert whole.total_duration >= whole.prompt_eval_duration + whole.eval_duration
    assert whole.created_at.endswith("Z")
    forget(server.engine)
    *parts, last = client.chat("any", QUESTION, options=OPTIONS, stream=True)
    assert len(parts) > 3
    assert (last.done, last.message.content) == (True, "")
    for field in ("done_reason", "prompt_eval_count", "eval_count", "model"):
        assert last[field] == whole[field]


def test_a_stream_is_the_default_and_has_a_line_for_each_piece(server: Serving) -> None:
    response = server.post("/api/chat", {"messages": QUESTION, "options": OPTIONS})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.content.isascii()
    assert response.text.endswith("}\n")


def test_without_a_prompt_the_model_is_loaded_already(client: ollama.Client) -> None:
    chat = client.chat("any", [])
    assert (chat.message.content, chat.done, chat.done_reason) == ("", True, "load")
    generated = client.generate("any", "")
    assert (generated.response, generated.done, generated.done_reason) == ("", True, "load")


# -- tools -------------------------------------------------------------------------------------------------------------


def test_ollamas_client_gets_calls_of_a_model_that_wants_to(hermes: Serving, hermes_engine: Engine) -> None:
    """There is no way to ask for a call: the marker is made likely."""
    (marker,) = hermes_engine.tokenize("<tool_call>")
    client = ollama.Client(hermes.url, timeout=60)
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    seen = 0
    for seed in range(4):
        options = {"temperature": 1, "seed": seed, "num_predict": 400, "logit_bias": {str(marker): 12}}
        for stream in (False, True):
            answer = client.chat("any", QUESTION, tools=tools, options=options, stream=stream)  # type: ignore[call-overload]
            parts = list(answer) if stream else [answer]
            calls = [call for part in parts for call in part.message.tool_calls or ()]
            for call in calls:
                assert call.function.name in ("weather", "time")
                if call.function.name == "weather":  # this client leaves the limits of numbers out
                    assert call.function.arguments["city"] in ("Rome", "Oslo", "Bern")
                    assert isinstance(call.function.arguments.get("days", 1), int)
            seen += len(calls)
    assert seen > 2


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
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo[f"{engine.model.config.family}.context_length"] == engine.context
    assert shown.modelinfo["general.parameter_count"] > 0
    assert server.post("/api/show", {"model": 5}).status_code == 400
    version = server.http.get("/api/version").json()["version"]
    parts = tuple(map(int, version.split(".")))  # as Open WebUI reads it
    assert parts >= (0, 13, 4)  # the least for Codex; Copilot in VS Code needs 0.6.4


def test_a_template_that_knows_reasoning_makes_a_capability(thinking: Serving) -> None:
    assert thinking.post("/api/show", {"model": "any"}).json()["capabilities"] == ["completion", "tools", "thinking"]


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
    for asked in (name, f"{name}:latest"):
        assert client.pull(asked).status == "success"
        assert [part.status for part in client.pull(asked, stream=True)] == ["success"]
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match=f"pulls no models: it has {name} alone") as caught:
            list(client.pull("llama3.2", stream=stream))
        assert caught.value.status_code == 501


def test_embeddings_are_those_of_the_engine(server: Serving, client: ollama.Client) -> None:
    response = client.embed("any", ["the rain", "then"])
    assert [len(vector) for vector in response.embeddings] == [server.engine.model.config.hidden_size] * 2
    expected = server.engine.embed("the rain").vector
    assert list(response.embeddings[0]) == pytest.approx(expected.tolist(), abs=1e-6)
    assert response.prompt_eval_count == sum(len(server.engine.tokenize(text)) for text in ("the rain", "then"))
    assert list(client.embed("any", "the rain").embeddings[0]) == pytest.approx(expected.tolist(), abs=1e-6)
    assert client.embeddings("any", "the rain").embedding == pytest.approx(expected.tolist(), abs=1e-6)  # older form
    assert client.embeddings("any", "").embedding == client.embed("any", "").embeddings == []
    for path, wrong in (
        ("/api/embeddings", {"prompt": 5}),
        ("/api/embed", {"input": 5}),
        ("/api/embed", {"input": "a", "dimensions": -2}),
    ):
        assert server.refused(path, wrong).startswith(list(wrong)[-1])
