"""What OpenAI's Responses alone have, with OpenAI's own client; tools as Codex sends them: functions in namespaces, and
tools that are no functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polarlm.engine.parsing.pieces import fold
from polarlm.server.http.dialects._response_events import ResponseWriter
from polarlm.server.http.warnings import HEADER
from polarlm.server.running import stored_responses
from tests.pairs import in_turn
from tests.server.apis import SLIP
from tests.server.dialects.test_every_api import CUT_OFF
from tests.server.http_server import Serving, serving
from tests.tiny import forget, load_tiny

QUESTION = "then he ran on"


def arguments(**more: Any) -> dict[str, Any]:
    return {"model": "any", "input": QUESTION, "temperature": 0, "max_output_tokens": 24, **more}


def endless(**more: Any) -> dict[str, Any]:
    return arguments(extra_body={"ignore_eos": True, **SLIP}, **more)


# -- answers -----------------------------------------------------------------------------------------------------------


def test_an_answer_at_its_limit_is_incomplete_and_one_that_stops_is_complete(server: Serving) -> None:
    """Whole, and in events. With a field that the client does not know."""
    whole = server.openai.responses.create(**endless())
    (item,) = whole.output
    assert (item.type, item.status) == ("message", "incomplete")
    assert (whole.object, whole.status, whole.model) == ("response", "incomplete", server.engine.model.name)
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.total_tokens == 24 + whole.usage.input_tokens
    stop = whole.output_text[8:10]
    with server.openai.responses.stream(**arguments(extra_body={"ignore_eos": True, "stop": stop})) as stream:
        assert "response.completed" in {event.type for event in stream}
        complete = stream.get_final_response()
    assert (complete.status, complete.incomplete_details) == ("completed", None)
    forget(server.engine)
    events = list(server.openai.responses.create(**endless(stream=True)))
    kinds = [event.type.removeprefix("response.") for event in events]
    middle = kinds.count("output_text.delta")
    assert middle > 3
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * middle,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    last = events[-1]
    assert last.type == "response.incomplete"
    same = ("status", "model", "incomplete_details", "temperature", "max_output_tokens", "tool_choice", "text", "usage")
    for field in same:
        assert getattr(last.response, field) == getattr(whole, field), field


def test_an_item_that_is_cut_off_is_incomplete() -> None:
    whole = ResponseWriter("m", True, {"parallel_tool_calls": True, "tool_choice": "auto"}, None, {})
    items = whole.whole([fold(CUT_OFF)])["output"]
    assert [item["status"] for item in items] == ["completed", "completed", "incomplete"]


def test_what_a_request_says_is_repeated(server: Serving) -> None:
    schema = {"type": "integer", "minimum": 100, "maximum": 999}
    format: Any = {"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}}
    more = {"metadata": {"a": "b"}, "user": "me", "store": False, "top_p": 0.5, "instructions": "on", "text": format}
    response = server.openai.responses.create(**arguments(**more, include=["reasoning.encrypted_content"]))
    assert (response.metadata, response.top_p, response.instructions) == ({"a": "b"}, 0.5, "on")
    assert (response.temperature, response.max_output_tokens, response.store) == (0, 24, False)  # type: ignore[attr-defined]
    assert response.text.to_dict() == format
    assert server.openai.responses.input_tokens.count(model="any", input=QUESTION).object == "response.input_tokens"


# -- errors ------------------------------------------------------------------------------------------------------------


def test_keywords_that_are_not_supported_are_refused_where_a_format_is_strict(server: Serving) -> None:
    format = {"type": "json_schema", "schema": {"type": "integer", "not": {"const": 3}}}
    assert server.post("/v1/responses", arguments(text={"format": format})).status_code == 200
    error = server.refused("/v1/responses", arguments(text={"format": {**format, "strict": True}}))
    assert error["param"] == "text.format"
    assert '"not"' in error["message"]


def test_wishes_are_ignored_with_a_warning(server: Serving) -> None:
    response = server.post("/v1/responses", arguments(text={"verbosity": "low"}, truncation="auto"))
    assert response.status_code == 200
    warning = response.headers[HEADER]
    assert warning.startswith("text.verbosity is ignored: ")
    assert warning.endswith("; truncation is ignored: this server cuts no prompt")


def test_a_stream_of_a_prompt_that_is_too_long_has_failed(server: Serving) -> None:
    """Codex compacts a conversation after such a stream alone."""
    first, *_, last = server.openai.responses.create(**arguments(input="then " * 300), stream=True)
    assert (first.type, last.type, last.response.status) == ("response.created", "response.failed", "failed")
    assert last.response.error.code == "context_length_exceeded"
    assert "maximum context length" in last.response.error.message


# -- tools -------------------------------------------------------------------------------------------------------------


def function(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"id": {"enum": ["a", "b"]}}, "required": ["id"]}
    return {"type": "function", "name": name, "description": "does it", "strict": False, "parameters": schema}


CODEX: dict[str, Any] = {  # the shape of its request
    "model": "any",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are an agent."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say hi"}]},
    ],
    "tools": [
        function("exec_command"),
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Agents.",
            "tools": [function("close_agent"), function("exec_command")],
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a",
    "client_metadata": {"session_id": "a"},
    "temperature": 1,
    "seed": 2,
    "max_output_tokens": 200,
}


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_a_namespace_are_called_and_taken_back(hermes: Serving, stream: bool) -> None:
    """A function outside may have the same name."""
    choice = {"type": "function", "namespace": "multi_agent_v1", "name": "exec_command"}
    body = {**CODEX, "tool_choice": choice}
    if stream:
        with hermes.openai.responses.stream(**_without_seed(body)) as events:
            done = [event for event in events if event.type == "response.output_item.done"]
            response = events.get_final_response()
        assert [event.item.id for event in done] == [item.id for item in response.output]
        assert response.status == "completed"
    else:
        response = hermes.openai.responses.create(**_without_seed(body))
    (call,) = response.output
    assert (call.type, call.name, call.namespace) == ("function_call", "exec_command", "multi_agent_v1")
    assert response.tool_choice.model_dump()["namespace"] == "multi_agent_v1"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "closed"}
    again = {**CODEX, "input": [*CODEX["input"], call.model_dump(exclude_none=True), result], "max_output_tokens": 2}
    second = hermes.post("/v1/responses", again)
    assert second.status_code == 200, second.text
    cached = second.json()["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= 0.98 * response.usage.total_tokens


def _without_seed(body: dict[str, Any]) -> dict[str, Any]:
    extra = {"seed": body["seed"], "client_metadata": body["client_metadata"]}
    return {name: value for name, value in body.items() if name not in extra} | {"extra_body": extra}


def test_a_function_outside_of_a_namespace_has_none(hermes: Serving) -> None:
    response = hermes.openai.responses.create(
        **_without_seed({**CODEX, "tool_choice": {"type": "function", "name": "exec_command"}})
    )
    (call,) = response.output
    assert (call.name, call.namespace) == ("exec_command", None)


def test_some_of_the_functions_are_allowed(hermes: Serving) -> None:
    named = {"type": "function", "namespace": "multi_agent_v1", "name": "exec_command"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named, {"type": "web_search"}]}
    response = hermes.openai.responses.create(**_without_seed({**CODEX, "tool_choice": choice}))
    assert {(call.name, call.namespace) for call in response.output} == {("exec_command", "multi_agent_v1")}
    assert response.tool_choice.model_dump() == {**choice, "tools": [named]}


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"mode": "never", "tools": [function("exec_command")]}, "tool_choice.mode"),
        ({"mode": "auto", "tools": [function("none")]}, "tool_choice.tools[0]"),
        ({"mode": "auto", "tools": []}, "tool_choice.tools"),
        ({"mode": "auto"}, "tool_choice.tools"),
    ],
)
def test_a_wrong_choice_of_functions_is_a_bad_request(hermes: Serving, choice: dict[str, Any], param: str) -> None:
    body = {**CODEX, "tool_choice": {"type": "allowed_tools", **choice}}
    assert hermes.refused("/v1/responses", body)["param"] == param


@in_turn("kind", ["web_search", "image_generation", "local_shell", "mcp"])
def test_tools_that_are_no_functions_are_left_out_with_a_warning(hermes: Serving, kind: str) -> None:
    body = {**CODEX, "max_output_tokens": 2, "tools": [function("f"), {"type": kind}, {"type": kind}]}
    response = hermes.post("/v1/responses", body)
    assert response.status_code == 200
    assert response.headers[HEADER] == f"tools of type '{kind}' are left out: only functions are called"
    functions_alone = hermes.post("/v1/responses", {**body, "tools": [function("f")]})
    assert functions_alone.json()["usage"]["input_tokens"] == response.json()["usage"]["input_tokens"]
    assert HEADER not in functions_alone.headers


@in_turn(
    "tools field",
    [
        ([{"type": "namespace", "name": "a", "tools": [function('"')]}], "tools[0].tools[0].name"),
        ([{"type": "web_search"}, function("f"), function('"')], "tools[2].name"),
        ([{"type": "namespace", "name": 5, "tools": [function("f")]}], "tools[0].name"),
        ([{"type": "namespace", "name": "a", "tools": [5]}], "tools[0].tools[0]"),
        ([{"type": "namespace", "name": "a", "tools": 5}], "tools[0].tools"),
        ([{"type": "namespace", "name": "a" * 120, "tools": [function("f" * 64)]}], "tools[0].tools[0].name"),
        ([{"type": 5}], "tools[0].type"),
    ],
)
def test_a_wrong_tool_is_named_by_its_place(hermes: Serving, tools: Any, field: str) -> None:
    assert hermes.refused("/v1/responses", {**CODEX, "tools": tools})["param"] == field


# -- earlier responses -------------------------------------------------------------------------------------------------


def test_with_a_disk_a_request_goes_on_from_a_response_by_its_id(tmp_path: Path, tiny_path: Path) -> None:
    """Also after a restart, and from one that went on itself; the prompt is that of the items sent by hand."""
    disk = {"cache_disk": "64M", "cache_disk_folder": str(tmp_path / "disk")}
    keys = tmp_path / "keys"
    keys.write_text("anna sk-anna-0123456789\nben sk-ben-0123456789\n")
    sent: list[Any] = []
    previous: str | None = None
    for streamed in (False, True, False):
        with load_tiny(tiny_path, device="cpu", **disk) as engine, serving(engine, api_key_file=str(keys)) as server:
            client = server.openai.with_options(api_key="sk-anna-0123456789")
            question, told = {"role": "user", "content": f"and {len(sent)}"}, {"instructions": "be brief"}
            ask = arguments(max_output_tokens=9, previous_response_id=previous, **told, input=[question])
            answer: Any = client.responses.create(**ask, stream=streamed)
            answer = [*answer][-1].response if streamed else answer
            assert (answer.store, answer.previous_response_id) == (True, previous)
            sent.append(question)
            by_hand = client.responses.create(**arguments(max_output_tokens=9, **told, input=sent, store=False))
            assert answer.usage.input_tokens == by_hand.usage.input_tokens
            sent += [item.model_dump(exclude_none=True) for item in answer.output]
            previous = answer.id
            ask = {"input": "a", "previous_response_id": by_hand.id}
            for key, id in (("anna", by_hand.id), ("ben", previous)):  # not stored, and another's
                server.http.headers["Authorization"] = f"Bearer sk-{key}-0123456789"
                told_error = server.refused("/v1/responses", {"input": "a", "previous_response_id": id})
                assert f"{id} is not kept here" in told_error["message"]


def test_the_oldest_responses_leave_first_and_a_broken_file_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stored_responses, "_MOST_BYTES", 100)
    stored = stored_responses.StoredResponses(tmp_path)
    for number in range(9):
        stored.keep(f"r{number}", "", f"r{number - 1}" if number % 3 else None, ["x" * 20, number])
    assert stored.items("r8", "") == [item for number in (6, 7, 8) for item in ("x" * 20, number)]
    assert [stored.items(f"r{number}", "") for number in range(6)] == [None] * 6
    assert stored.items("r8", "another") is None
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / stored_responses.FILE).write_bytes(b"no database" * 99)
    broken = stored_responses.StoredResponses(tmp_path / "broken")
    broken.keep("r", "", None, [1])
    assert broken.items("r", "") == [1]  # until the restart
    assert "responses are kept in memory alone" in caplog.text
