"""Fields that nobody knows are ignored, with a warning that names the field that was probably meant."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from starlette.responses import Response

from polarlm.engine import Engine
from polarlm.engine.requests.request import WARNINGS
from polarlm.server.http.app import create_app
from polarlm.server.http.warnings import HEADER, warn
from polarlm.server.running import journal
from tests.lazily import anthropic, ollama, openai
from tests.pairs import in_turn
from tests.server.apis import APIS, CALLING, events
from tests.server.http_server import Serving, serving
from tests.tool_model import tool_engine

QUESTION = {"role": "user", "content": "then he ran on"}
BODIES = {api.path: api.body("then", max_tokens=2) for api in APIS.values()}


def warning(server: Serving, path: str, **more: Any) -> str | None:
    """What the header says, and the field, once."""
    response = server.post(path, {**BODIES[path], **more})
    assert response.status_code == 200, response.text
    body = {**BODIES[path], **more}
    parts = events(response.text) if body["stream"] else [response.json()]
    places = [*parts, *(part["response"] for part in parts if isinstance(part.get("response"), dict))]
    told = [sentence for place in places for sentence in place.get("warnings", ())]
    assert "; ".join(told) == response.headers.get(HEADER, "")
    return response.headers.get(HEADER)


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_told_with_the_nearest_one(server: Serving, path: str) -> None:
    for stream in (False, True):
        assert warning(server, path, stream=stream) is None, stream
        if path.startswith("/api/"):
            more: dict[str, Any] = {"options": {"num_predict": 2, "temprature": 0, "num_ctx": 5}}
            expected = "options.temprature is unknown and ignored: did you mean options.temperature?"
        else:
            more, expected = {"temprature": 0}, "temprature is unknown and ignored: did you mean temperature?"
        assert warning(server, path, stream=stream, **more) == expected, stream
        unlike = warning(server, path, stream=stream, nothing_like_it=1)
        assert unlike == "nothing_like_it is unknown and ignored", stream
        assert warning(server, path, stream=stream, nothing_like_it=None) is None, stream


@pytest.mark.parametrize("path", BODIES)
def test_a_sampler_of_other_programs_is_told_by_its_name(server: Serving, path: str) -> None:
    place, told = "options." if path.startswith("/api/") else "", []
    for name in ("mirostat", "typical_p", "dynatemp_range"):
        more: dict[str, Any] = {"options": {"num_predict": 2, name: 0.5}} if place else {name: 0.5}
        told.append(warning(server, path, **more))
        assert told[-1] == f"{place}{name} is ignored: this server has no such sampler"


_CHAT = {"messages": [QUESTION]}
OF_NO_ANSWERS: list[tuple[str, dict[str, Any]]] = [
    *(("/tokenize", body) for body in ({"content": "a"}, {"prompt": "a"}, _CHAT)),
    ("/detokenize", {"tokens": [5]}),
    ("/v1/embeddings", {"input": "a"}),
    ("/pooling", {"input": "a"}),
    ("/api/show", {"model": "any"}),
    ("/api/embed", {"input": "a"}),
    ("/api/embeddings", {"prompt": "a"}),
    ("/apply-template", _CHAT),
    ("/v1/chat/completions/input_tokens", _CHAT),
    ("/v1/messages/count_tokens", _CHAT),
    ("/v1/responses/input_tokens", {"input": "a"}),
]


@in_turn("path body", OF_NO_ANSWERS)
def test_endpoints_without_answers_tell_as_well(server: Serving, path: str, body: Any) -> None:
    assert HEADER not in server.post(path, body).headers
    response = server.post(path, {**body, "temprature": 0})
    assert response.json()["warnings"] == [response.headers[HEADER]]
    assert response.headers[HEADER].startswith("temprature is unknown and ignored")


def test_sessions_tell_as_well(tiny: Engine, tmp_path: Path) -> None:
    with serving(tiny, sessions=str(tmp_path / "sessions")) as server:
        server.post("/v1/completions", {"prompt": "then he ran", "max_tokens": 2})
        for path, body in (
            ("/sessions/save", {"name": "a", "prompt": "then he ran"}),
            ("/sessions/load", {"name": "a"}),
        ):
            assert HEADER not in server.post(path, body).headers
            response = server.post(path, {**body, "cache_slat": "x"})
            assert response.headers[HEADER] == "cache_slat is unknown and ignored: did you mean cache_salt?"


def test_several_are_told_in_a_header_of_bounded_length(server: Serving) -> None:
    path = "/v1/completions"
    told = str(warning(server, path, **{f"x{number}" + "y" * 500: 1 for number in range(1000)}))
    assert told.count("is unknown") == 5
    assert told.endswith("; 995 more fields are unknown")
    assert len(told) < 500
    assert "\n" not in told


@in_turn("name", ["a\r\nSet-Cookie: x=1", "é\x00\x7f", "\N{SNOWMAN}", "", "\ud800"])
def test_no_name_leaves_the_header(server: Serving, name: str) -> None:
    data = json.dumps({**BODIES["/v1/completions"], name: 1}).encode()
    response = server.http.post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
    assert response.status_code == 200
    assert "set-cookie" not in response.headers
    assert all(" " <= character <= "~" for character in response.headers[HEADER])


def test_the_log_has_the_warning_in_the_line_of_the_request() -> None:
    with journal.entry("127.0.0.1:4000", "POST /v1/completions") as entry:
        warn(Response(), ["temprature is unknown and ignored"])
        warn(Response(), [])
    assert entry.line()["warnings"] == ["temprature is unknown and ignored"]
    assert "warning: temprature is unknown" in journal._in_words(entry.line() | {"prompt_tokens": 0})


def test_a_header_is_shorter_than_the_field_and_an_array_has_the_header_alone() -> None:
    sentences = [f"{number}: " + "é" * 300 for number in range(9)]
    for body, field in (("{}", sentences), ('{"a":1}', sentences), ("[{}]", None)):
        response = warn(Response(body), [*sentences, *sentences])
        content = json.loads(bytes(response.body))
        assert (content.get("warnings") if isinstance(content, dict) else None) == field
        assert response.headers["content-length"] == str(len(response.body))
        assert response.headers[HEADER].endswith("; and 3 more")
        assert response.headers[HEADER].isascii()
        assert len(response.headers[HEADER]) < 1300


_HELD_IN_PART = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!a)b"}}, "not": {"const": 3}}


@pytest.mark.parametrize("name", [*CALLING, "ollama"])
def test_what_of_a_constraint_does_not_hold_is_told_each_time(hermes: Serving, name: str) -> None:
    api = APIS[name]
    tools = [{"name": "f", "parameters": _HELD_IN_PART}]
    of_tool = "the parameters of the function f hold in part: the pattern '^(?!a)b' looks around"
    of_both = 'the constraint holds in part: these keywords are not supported: "not"'
    for more, expected in (
        ({"tools": tools}, {of_tool, of_both}),
        ({"schema": _HELD_IN_PART}, {of_both, "the constraint holds in part: the pattern '^(?!a)b' looks around"}),
    ):
        for _ in range(2):
            response = hermes.post(api.path, api.body([QUESTION], max_tokens=2, **more))
            assert {*response.json()["warnings"]} == expected


def test_a_program_that_calls_the_engine_finds_it_in_its_log_once(
    hermes_engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WARNINGS, "disabled", False)  # which a server's log has turned off
    for _ in range(2):
        hermes_engine.generate("the", schema={"type": "string", "format": "logged"}, max_tokens=1)
    assert [one[-22:] for one in caplog.messages if "logged" in one] == ["Unknown format: logged"]


def fields(*types: Any) -> set[str]:
    return {name for one in types for name in get_type_hints(one)}


def models(*types: Any) -> set[str]:
    return {name for one in types for name in one.model_fields}


def messages_answers() -> set[str]:
    types = anthropic.types.message_create_params, anthropic.types.beta.message_create_params
    return fields(*(one.MessageCreateParamsBase for one in types))


def responses_answers() -> set[str]:
    known = fields(openai.types.responses.response_create_params.ResponseCreateParamsBase)
    return known | {"client_metadata"}  # Codex sends it


CLIENTS: dict[str, Callable[[], set[str]]] = {  # OpenAI's older endpoints: tests/server/reading/test_fields.py
    "/v1/responses": responses_answers,
    "/v1/messages": messages_answers,
    "/api/chat": lambda: models(importlib.import_module("ollama._types").ChatRequest),
    "/api/generate": lambda: models(importlib.import_module("ollama._types").GenerateRequest),
}


@pytest.mark.parametrize("path", CLIENTS)
def test_what_the_makers_own_clients_send_is_known(server: Serving, path: str) -> None:
    """A field without an effect here is no slip of the pen."""
    app = create_app(server.driver, server.driver.config)
    app_routes = {route.path: route.endpoint for route in app.routes if hasattr(route, "endpoint")}
    endpoint = app_routes[path].__self__._endpoint
    assert endpoint.warnings(dict.fromkeys(CLIENTS[path]() - {"tools", "options"}, 1)) == []
    options = dict.fromkeys(ollama.Options.model_fields, 1)
    assert endpoint.warnings({"options": options} if path.startswith("/api/") else {}) == []


_LATE = [QUESTION, {"role": "assistant", "content": "so"}, {"role": "system", "content": "be brief"}, QUESTION]
_REFUSING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('the first alone') }}"
    "{% endif %}{% if 'fail' in m.content %}{{ raise_exception('always') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
)


def test_what_a_template_refuses_is_told_once_and_its_file_never(tmp_path: Path) -> None:
    late = {
        "/v1/chat/completions": {"messages": _LATE},
        "/v1/messages": {"messages": _LATE, "system": "be kind"},
        "/v1/responses": {"input": _LATE, "instructions": "be kind"},
        "/api/chat": {"messages": _LATE},
    }
    expected = (
        "this model's chat template refuses system messages after the first one: they are joined to it, or put as "
        "the user's"
    )
    with tool_engine(tmp_path, _REFUSING) as engine, serving(engine) as server:
        for path, body in late.items():
            for stream in (False, True):
                assert warning(server, path, **{**body, "stream": stream}) == expected, path
        assert "be brief" in server.post("/apply-template", {"messages": _LATE}).json()["prompt"]
        failed = server.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": "fail"}]})
        assert failed["message"] == "The model's chat template failed: always."
