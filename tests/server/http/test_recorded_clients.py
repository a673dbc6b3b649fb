"""What clients sent to a server of the demonstration model, sent again: each gets the answers that it can read.

A file has the requests of a client's run, without texts and descriptions. `forced` names the tool that the run made the
model call, and the request after it has the call and its result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from pydantic import TypeAdapter

from polarlm.server.http.warnings import HEADER
from tests import call_templates
from tests.lazily import openai
from tests.server.http_server import Serving, serving
from tests.tool_model import tool_engine

RUNS = sorted((Path(__file__).resolve().parents[2] / "fixtures" / "clients").glob("*.json"))
OF_OLLAMA: dict[str, type[Any]] = {
    "/api/tags": ollama.ListResponse,
    "/api/ps": ollama.ProcessResponse,
    "/api/show": ollama.ShowResponse,
    "/api/chat": ollama.ChatResponse,
    "/api/generate": ollama.GenerateResponse,
    "/api/embed": ollama.EmbedResponse,
}
Call = tuple[str, str]  # name and arguments


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("model")
    with (
        tool_engine(folder, call_templates.HERMES, ctx_size=16384) as engine,
        serving(engine, max_tokens=400) as running,
    ):
        yield running


def sent(request: dict[str, Any]) -> dict[str, Any]:
    """The body of a request; one that forces a call asks for it as its API does, and the strings in it end soon."""
    body = dict(request["body"])
    if name := request.get("forced"):
        of_responses = request["path"] == "/v1/responses"
        body["tool_choice"] = {"type": "function"} | ({"name": name} if of_responses else {"function": {"name": name}})
    if "tools" in body and request["path"] == "/v1/chat/completions":
        body |= {"logit_bias": {'"': 8}, "temperature": 1, "seed": 1}
    return body


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.stem)
def test_a_client_reads_what_it_is_answered(server: Serving, run: Path) -> None:
    for request in json.loads(run.read_text(encoding="utf-8"))["requests"]:
        path, more = request["path"], {"json": sent(request)} if "body" in request else {}
        answer = server.http.request(request["method"], path, headers=request["headers"], **more)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get(HEADER) == request.get("warning")
        streams = request.get("body", {}).get("stream", False)
        if path == "/v1/chat/completions":
            calls = calls_of_chunks(answer.text, request["body"]) if streams else calls_of_chat(answer.json())
        elif path == "/v1/responses":
            calls = calls_of_events(answer.text) if streams else calls_of_response(answer.json())
        else:
            calls = []
            read_elsewhere(path, answer.text.splitlines() if streams else [answer.text])
        if wanted := request.get("forced"):
            assert [name for name, _ in calls] == [wanted]
            assert isinstance(json.loads(calls[0][1]), dict)


def calls_of_chat(body: dict[str, Any]) -> list[Call]:
    chat = openai.types.chat.ChatCompletion.model_validate(body)
    assert chat.usage is not None
    calls: Any = chat.choices[0].message.tool_calls or ()
    assert (chat.choices[0].finish_reason == "tool_calls") == bool(calls)
    return [(call.function.name, call.function.arguments) for call in calls]


def calls_of_chunks(text: str, body: dict[str, Any]) -> list[Call]:
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunk_type = openai.types.chat.ChatCompletionChunk
    chunks = [chunk_type.model_validate_json(event.removeprefix("data: ")) for event in events]
    assert len({chunk.id for chunk in chunks}) == 1
    if body.get("stream_options", {}).get("include_usage"):
        last = chunks.pop()
        assert (last.choices, last.usage and last.usage.prompt_tokens > 0) == ([], True)
    assert all(chunk.usage is None for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [choices[-1].finish_reason]
    calls: list[Call] = []
    for delta in [delta for choice in choices for delta in choice.delta.tool_calls or ()]:
        assert delta.function is not None
        if delta.id is None:  # the rest of a call that has begun
            assert (delta.index, delta.function.name) == (len(calls) - 1, None)
            calls[-1] = calls[-1][0], calls[-1][1] + (delta.function.arguments or "")
        else:
            assert (delta.index, delta.type) == (len(calls), "function")
            assert delta.function.name is not None
            calls.append((delta.function.name, delta.function.arguments or ""))
    return calls


def calls_of_response(body: dict[str, Any]) -> list[Call]:
    response = openai.types.responses.Response.model_validate(body)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


def calls_of_events(text: str) -> list[Call]:
    frames = [frame.split("\n") for frame in text.split("\n\n") if frame]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    for event in events:
        TypeAdapter(openai.types.responses.ResponseStreamEvent).validate_python(event)
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    return calls_of_response(events[-1]["response"])


def read_elsewhere(path: str, lines: list[str]) -> None:
    read = [json.loads(line) for line in lines]
    if path == "/v1/models":
        assert [model["object"] for model in read[0]["data"]] == ["model"]
    elif path == "/api/version":
        assert tuple(map(int, read[0]["version"].split("."))) >= (0, 13, 4)
    else:
        for one in read:
            OF_OLLAMA[path].model_validate(one)
        assert [one.get("done", True) for one in read] == [False] * (len(read) - 1) + [True]
