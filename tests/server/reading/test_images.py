"""Images in requests: every API's own client sends one, and a model that reads images gets its bytes."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from polarlm.server.reading.messages import read_messages
from tests.images.test_forms import frames
from tests.images.test_models import Loaded, picture
from tests.images.test_reading import slow_jpeg
from tests.lazily import ollama
from tests.server.apis import submitted
from tests.server.http_server import Serving, serving
from tests.server.lines import eventually
from tests.tiny import make_model

FILE = picture(1)
DATA = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{DATA}"
IMAGE, TEXT = {"type": "image", "image": FILE}, {"type": "text", "text": "What is it?"}
OPENAI = {"type": "image_url", "image_url": {"url": URL}}
ANIMATED = "messages[0].content[0]: this image is animated, and its first picture alone is read"
ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Of a model that reads images."""
    path = make_model(tmp_path_factory.mktemp("model"), "qwen3_vl_deepstack_tied")
    with Loaded(path) as loaded, serving(loaded.engine, max_body=4096, max_tokens=2) as running:
        yield running


def user(*parts: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def with_anthropic(server: Serving) -> None:
    with server.anthropic() as client:
        client.messages.create(model="any", max_tokens=9, messages=user(ANTHROPIC, TEXT))


CLIENTS: dict[str, Callable[[Serving], Any]] = {
    "chat": lambda it: it.openai.chat.completions.create(model="any", messages=user(OPENAI, TEXT)),
    "responses": lambda it: it.openai.responses.create(
        model="any",
        input=user({"type": "input_image", "image_url": URL, "detail": "auto"}, TEXT | {"type": "input_text"}),
    ),
    "anthropic": with_anthropic,
    "ollama": lambda it: ollama.Client(it.url).chat("any", [BESIDE]),
    "generate": lambda it: ollama.Client(it.url).generate("any", TEXT["text"], images=[FILE]),
}
BESIDE = {"role": "user", "content": TEXT["text"], "images": [FILE]}


@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_sends_an_image(server: Serving, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    requests = submitted(server.engine, monkeypatch)
    CLIENTS[name](server)
    assert [request["prompt"] for request in requests] == [user(IMAGE, TEXT)]


@pytest.mark.parametrize(
    ("path", "body", "field", "sentence"),
    [
        ("/v1/chat/completions", {"messages": user(TEXT, OPENAI | {"image_url": "https://a/b.png"})},
         "messages[0].content[1]", "fetches no addresses"),
        ("/v1/responses", {"input": user({"type": "input_image", "image_url": "data:image/png;base64,é"})},
         "input[0].content[0]", "is not base64"),
        ("/v1/messages", {"messages": user(ANTHROPIC | {"source": {"type": "file"}}), "system": "a", "max_tokens": 1},
         "messages[0].content[0]", "has no image in it"),
        ("/api/chat", {"messages": [BESIDE | {"images": [DATA, "é"]}]}, "messages[0].images[1]", "is not base64"),
        ("/api/generate", {"prompt": "a", "images": ["file:///etc/passwd"]}, "images[0]", "fetches no addresses"),
        ("/api/generate", {"prompt": "a", "raw": True, "images": [DATA]}, "images", "leave out raw"),
        ("/v1/chat/completions", {"messages": user({"type": "input_audio"})}, "messages[0].content[0].type",
         "takes text and images alone"),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": [DATA]}}, "prompt.multimodal_data",
         "in messages alone"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(
    server: Serving, path: str, body: dict[str, Any], field: str, sentence: str
) -> None:
    response = server.post(path, body)
    assert (response.status_code, field in response.text, sentence in response.text) == (400, True, True), response.text


def test_images_of_results_stay_and_earlier_ones_that_cannot_be_read_are_left_out() -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [TEXT, ANTHROPIC, {"type": "image", "data": DATA}]}
    addressed = OPENAI | {"image_url": {"url": "https://a/b.png"}}
    told: list[tuple[str, str]] = []
    history = [*user(addressed, OPENAI), call, *user(result, TEXT), {"role": "assistant", "content": [ANTHROPIC]}]
    question, _, found, *_, answer = read_messages(history, told, reads_images=True)
    assert question["content"] == [{"type": "text", "text": "[image left out]"}, IMAGE]
    assert found["content"] == [TEXT, IMAGE, IMAGE]
    assert answer["content"] == "[image left out]"
    assert [sentence for _, sentence in told] == [
        "parts of messages that have no text are left out, of type 'image_url', 'image'"
    ]


def test_whoever_sends_an_animation_is_told_that_its_first_picture_is_seen(server: Serving) -> None:
    file = frames("GIF", 1, 2, mode="L")
    chat = user(OPENAI | {"image_url": {"url": f"data:;base64,{base64.b64encode(file).decode()}"}})
    for path in ("/v1/chat/completions", "/v1/chat/completions/input_tokens", "/tokenize"):
        warning = server.post(path, {"messages": chat, "max_tokens": 1}).headers["X-PolarLM-Warning"]
        assert warning == ANIMATED, path
    assert server.engine.chat(user(IMAGE | {"image": file}), max_tokens=1).warnings == (ANIMATED,)


def test_prompts_with_images_are_counted_and_shown(server: Serving) -> None:
    chat, message = {"messages": user(OPENAI, TEXT)}, {"messages": user(ANTHROPIC, TEXT), "max_tokens": 1}
    read = server.post("/v1/chat/completions", chat).json()["usage"]["prompt_tokens"]
    assert server.post("/v1/chat/completions/input_tokens", chat).json()["input_tokens"] == read
    assert server.post("/v1/messages/count_tokens", message).json()["input_tokens"] == read
    assert "<__media__>What is it?" in server.post("/apply-template", chat).json()["prompt"]


@pytest.mark.slow
def test_slow_images_of_clients_that_leave_hold_up_nobody(
    server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = iter(range(99))

    def history() -> list[Any]:
        url = f"data:image/jpeg;base64,{base64.b64encode(slow_jpeg(next(slow))).decode()}"
        return [*user(OPENAI | {"image_url": {"url": url}}), {"role": "assistant", "content": "a"}, *user(TEXT)]

    paths = ("/v1/chat/completions", "/v1/messages/count_tokens", "/sessions/save")
    paths += ("/tokenize",) * 4  # as many as there are threads for texts
    workers = server.engine._answers._images._workers
    lines = [worker._line for worker in workers]
    monkeypatch.setattr(workers[0], "_first", [1 << 26, 0.1])  # a shorter turn
    workers[0].close()
    with serving(server.engine, sessions=str(tmp_path)) as running, ExitStack() as connections:
        for path in paths:
            written = history()
            body = {"messages": written, "max_tokens": 1, "name": "a"}
            connection = connections.enter_context(closing(http.client.HTTPConnection("127.0.0.1", running.port)))
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        eventually(lambda: sum(map(len, lines)) == len(paths))
        assert running.post("/tokenize", {"content": "a"}).json()["tokens"]
        assert running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        seen = user(OPENAI | {"image_url": {"url": f"data:;base64,{base64.b64encode(picture(7)).decode()}"}}, TEXT)
        assert running.post("/v1/chat/completions", {"messages": seen, "max_tokens": 1}).status_code == 200
        assert sum(map(len, lines)) == len(paths)
        connections.close()
        eventually(lambda: not any(lines))


def test_clients_are_told_that_the_model_reads_images(server: Serving) -> None:
    assert server.http.get("/props").json()["modalities"]["vision"]
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["architecture"] == {"input_modalities": ["text", "image"], "output_modalities": ["text"]}
    assert "vision" in ollama.Client(server.url).show("any").capabilities


def test_a_request_with_images_may_have_sixteen_times_the_bytes(server: Serving) -> None:
    large = OPENAI | {"image_url": {"url": "data:image/png;base64," + base64.b64encode(picture(1, 80, 60)).decode()}}
    assert len(str(large)) > 4096
    assert server.post("/v1/chat/completions", {"messages": user(large)}).status_code == 200
    assert server.post("/v1/chat/completions", {"messages": user(large, large, large, large)}).status_code == 413
