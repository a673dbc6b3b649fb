"""Tools in OpenAI's Responses as Codex sends them: functions in namespaces, and tools that are no functions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pairs import in_turn
from tests.server.http_server import Serving


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


@in_turn("kind", ["web_search", "image_generation", "local_shell", "mcp", "custom"])
def test_tools_that_are_no_functions_are_left_out_with_a_warning(hermes: Serving, kind: str) -> None:
    body = {**CODEX, "max_output_tokens": 2, "tools": [function("f"), {"type": kind}, {"type": kind}]}
    response = hermes.post("/v1/responses", body)
    assert response.status_code == 200
    told = response.headers["X-PolarLM-Warning"]
    assert told == f"tools of type '{kind}' are left out: only functions are called"
    alone = hermes.post("/v1/responses", {**body, "tools": [function("f")]})
    assert alone.json()["usage"]["input_tokens"] == response.json()["usage"]["input_tokens"]
    assert "X-PolarLM-Warning" not in alone.headers


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
