"""What clients sent to a server of the demonstration model, sent again: each gets the answers that it can read.

A file has the requests of a client's run, without texts and descriptions. `forced` names the tool that the run made the
model call, and the request after it has the call and its result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import TypeAdapter

from polarlm.server.http.warnings import HEADER
from tests import call_templates
from tests.lazily import anthropic, ollama, openai
from tests.server.apis import APIS, events
from tests.server.http_server import Serving, serving
from tests.tool_model import tool_engine

RUNS = sorted((Path(__file__).resolve().parents[2] / "fixtures" / "clients").glob("*.json"))
Ping = dict[Literal["type"], Literal["ping"]]  # an event that Anthropic's clients skip
# What the makers' own clients read: an answer, and a piece of a stream.
TYPES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "/v1/chat/completions": lambda: (openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk),
    "/v1/responses": lambda: (openai.types.responses.Response, openai.types.responses.ResponseStreamEvent),
    "/v1/messages": lambda: (anthropic.types.Message, anthropic.types.RawMessageStreamEvent | Ping),
    "/v1/messages/count_tokens": lambda: (anthropic.types.MessageTokensCount,),
    "/v1/models": lambda: (openai.types.Model,),
    "/api/version": lambda: (dict[str, str],),
    "/api/tags": lambda: (ollama.ListResponse,),
    "/api/ps": lambda: (ollama.ProcessResponse,),
    "/api/show": lambda: (ollama.ShowResponse,),
    "/api/chat": lambda: (ollama.ChatResponse, ollama.ChatResponse),
    "/api/generate": lambda: (ollama.GenerateResponse, ollama.GenerateResponse),
    "/api/embed": lambda: (ollama.EmbedResponse,),
}
READERS = {api.path: api for api in APIS.values()}


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
        choices = {
            "/v1/responses": {"type": "function", "name": name},
            "/v1/messages": {"type": "tool", "name": name},
        }
        body["tool_choice"] = choices.get(request["path"], {"type": "function", "function": {"name": name}})
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
        streams = request.get("body", {}).get("stream") or False
        parts = events(answer.text) if streams else answer.json()["data"] if path == "/v1/models" else [answer.json()]
        assert not streams or path != "/v1/chat/completions" or answer.text.endswith("\n\ndata: [DONE]\n\n")
        part_type = TypeAdapter(TYPES[path]()[streams])
        for part in parts:
            part_type.validate_python(part)
        if path in READERS:
            reply = READERS[path].streamed(parts) if streams else READERS[path].whole(*parts)
            is_cut = reply.reason == "length"  # inside a call, by chance
            assert (reply.reason == "tool_calls") == bool(reply.calls) or is_cut or path == "/api/chat"
            if wanted := request.get("forced"):
                ((called, arguments),) = reply.calls
                assert called == wanted
                is_patch = wanted == "apply_patch" and arguments.startswith("*** Begin Patch\n*** ")
                assert is_patch or isinstance(arguments, dict) or isinstance(json.loads(arguments), dict)
