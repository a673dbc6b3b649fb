"""Histories that clients bring along: no part of one ends a conversation, and no later part changes how it is put."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.server.http.dialects import anthropic, ollama, responses
from polarlm.server.http.warnings import HEADER
from polarlm.server.reading.messages import read_messages
from polarlm.server.reading.values import BadRequest
from polarlm.server.running import journal
from tests.pairs import in_turn
from tests.server.http_server import Serving
from tests.server.lines import Client

Piece = Callable[[str, str], list[dict[str, Any]]]  # text, id of a call → messages or items


def user(*content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if len(content) == 1 else list(content), **more}


def assistant(*content: Any, **more: Any) -> dict[str, Any]:
    return {**user(*content, **more), "role": "assistant"}


def typed(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}


def function(name: Any, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def as_json(text: str) -> str:
    return json.dumps({"text": text})


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CHAT: dict[str, Piece] = {
    "text": lambda t, _: [assistant(t, refusal=None, audio=None, function_call=None, annotations=[], extra={"a": 1})],
    "parts": lambda t, _: [assistant(typed("input_text", t), {"type": "refusal", "refusal": t}, cache_control={})],
    "refusal": lambda t, _: [{"role": "assistant", "refusal": t}],
    "reasoning": lambda t, _: [assistant(t, reasoning="hm", reasoning_details=[{}])],
    "empty": lambda t, _: [assistant(None), assistant([]), {"role": "assistant"}, {"role": "system", "content": t}],
    "audio": lambda t, _: [assistant(None, audio={"id": "a"}), {"role": "developer", "content": t, "name": "é"}],
    "image": lambda t, _: [user(typed("text", t), IMAGE, {"type": "input_audio", "input_audio": {"data": "AA"}})],
    "file": lambda t, _: [
        user({"type": "file", "file": {"file_data": "AA"}}, {"type": "new"}, typed("output_text", t))
    ],
    "call": lambda t, id: [assistant(None, tool_calls=[function("f", as_json(t), id=id)])],
    "two calls": lambda t, id: [assistant("", tool_calls=[function("g", {"a": t}, id=id), function("f", "", id="x")])],
    "odd call": lambda t, id: [assistant(t, tool_calls=[function('a "b"\n', '{"cut', id=id), function("", [1])])],
    "custom call": lambda t, id: [
        assistant(None, tool_calls=[{"type": "custom", "id": id, "custom": {"name": "p", "input": t}}])
    ],
    "result": lambda t, id: [{"role": "tool", "tool_call_id": id, "content": t}],
    "parts of a result": lambda t, id: [{"role": "tool", "tool_call_id": id, "content": [typed("text", t), IMAGE]}],
    "odd result": lambda t, id: [{"role": "tool", "tool_call_id": id, "content": {"a": [t]}}],
    "function": lambda t, _: [
        assistant(None, function_call={"name": "f", "arguments": as_json(t)}),
        {"role": "function", "name": "f", "content": t},
    ],
}
RESPONSES: dict[str, Piece] = {
    "text": lambda t, _: [{"type": "message", "id": "m", "status": "completed", **assistant(typed("output_text", t))}],
    "developer": lambda t, _: [{"role": "developer", "content": [typed("input_text", t)]}],
    "image": lambda t, _: [user({"type": "input_image", "image_url": "data:,"}, {"type": "input_file"}, typed("x", t))],
    "call": lambda t, id: [{"type": "function_call", "call_id": id, "name": "f", "arguments": as_json(t)}],
    "call in a namespace": lambda t, id: [
        {"type": "function_call", "call_id": id, "name": "f", "namespace": "n", "arguments": as_json(t)}
    ],
    "result": lambda t, id: [{"type": "function_call_output", "call_id": id, "output": t}],
    "parts of a result": lambda t, id: [
        {"type": "function_call_output", "call_id": id, "output": [typed("input_text", t), {"type": "input_image"}]}
    ],
    "custom call": lambda t, id: [{"type": "custom_tool_call", "call_id": id, "name": "apply_patch", "input": t}],
    "custom result": lambda t, id: [{"type": "custom_tool_call_output", "call_id": id, "output": t}],
    "shell": lambda t, id: [
        {"type": "local_shell_call", "call_id": id, "action": {"type": "exec", "command": ["echo", t]}},
        {"type": "shell_call", "call_id": id, "action": {"commands": [t]}},
    ],
    "shell result": lambda t, id: [{"type": "shell_call_output", "call_id": id, "output": [{"stdout": t}]}],
    "patch": lambda t, id: [
        {"type": "apply_patch_call", "call_id": id, "operation": {"diff": t}, "status": "completed"}
    ],
    "computer": lambda _, id: [
        {"type": "computer_call", "call_id": id, "action": {"type": "click", "x": 1}},
        {"type": "computer_call_output", "call_id": id, "output": {"type": "computer_screenshot", "image_url": "a"}},
    ],
    "search": lambda t, _: [
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": t}},
        {"type": "file_search_call", "queries": ["q"], "results": [{"filename": "f.txt", "text": t, "score": 1}]},
    ],
    "code": lambda t, _: [{"type": "code_interpreter_call", "code": t, "outputs": [{"type": "logs", "logs": t}]}],
    "mcp": lambda t, _: [
        {"type": "mcp_list_tools", "server_label": "s", "tools": [{"name": "f", "input_schema": {}}]},
        {"type": "mcp_approval_request", "name": "f", "arguments": "{}"},
        {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
        {"type": "mcp_call", "name": "f", "arguments": "{}", "output": t, "error": None},
    ],
    "without text": lambda *_: [
        {"type": "image_generation_call", "result": "AAAA"},
        {"type": "compaction", "encrypted_content": "AAAA"},
        {"type": "made_up"},
    ],
    "reasoning": lambda t, _: [
        {"type": "reasoning", "summary": [typed("summary_text", "hm")], "encrypted_content": "AAAA"},
        {"type": "made_up_message", "content": [typed("output_text", t)]},
    ],
}
ANTHROPIC: dict[str, Piece] = {
    "text": lambda t, _: [assistant({**typed("text", t), "citations": [{"type": "web"}], "cache_control": {}})],
    "thinking": lambda t, _: [
        assistant(
            {"type": "thinking", "thinking": "hm", "signature": "AAAA"},
            {"type": "redacted_thinking", "data": "AAAA"},
            typed("text", t),
        )
    ],
    "call": lambda t, id: [assistant(typed("text", t), {"type": "tool_use", "id": id, "name": "f", "input": {"a": t}})],
    "result": lambda t, id: [user([{"type": "tool_result", "tool_use_id": id, "content": t}])],
    "result and text": lambda t, id: [
        user(typed("text", t), {"type": "tool_result", "tool_use_id": id, "content": [{"type": "image", "source": {}}]})
    ],
    "server's tools": lambda t, _: [
        assistant(
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": t}},
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": [{"type": "web_search_result", "title": t, "url": "u", "encrypted_content": "AAAA"}],
            },
            {"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "s", "input": {}},
            {"type": "mcp_tool_result", "tool_use_id": "m", "content": [typed("text", t)]},
            {"type": "container_upload", "file_id": "f"},
        )
    ],
    "documents": lambda t, _: [
        user(
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": t}},
            {"type": "search_result", "source": "u", "title": "a", "content": [typed("text", t)]},
            {"type": "document", "source": {"type": "base64", "data": "AAAA"}},
            {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
        )
    ],
    "system": lambda t, _: [{"role": "system", "content": [typed("text", t)]}],
}
OLLAMA: dict[str, Piece] = {
    "text": lambda t, _: [assistant(t, thinking="hm", images=None)],
    "images": lambda t, _: [user(t, images=["AAAA", "AAAA"])],
    "call": lambda t, _: [assistant("", tool_calls=[{"function": {"name": "f", "arguments": {"a": t}}}])],
    "result": lambda t, _: [{"role": "tool", "tool_name": "f", "content": t}],
    "another result": lambda t, id: [{"role": "tool", "tool_name": "g", "tool_call_id": id, "content": t}],
}
APIS: dict[str, tuple[dict[str, Piece], Callable[[list[Any]], Any]]] = {
    "chat": (CHAT, list),
    "responses": (RESPONSES, lambda history: responses.TABLE.translate({"input": history})["messages"]),
    "anthropic": (ANTHROPIC, lambda history: anthropic.TABLE.translate({"messages": history})["messages"]),
    "ollama": (OLLAMA, lambda history: ollama._conversation({"messages": history})["messages"]),
}


def read(api: str, history: list[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    told: list[tuple[str, str]] = []
    messages = read_messages(APIS[api][1](history), told)
    return messages, [sentence for _, sentence in told]


@pytest.mark.parametrize("api", APIS)
@given(data=st.data())
def test_no_history_is_refused_and_no_turn_changes_an_earlier_one(api: str, data: st.DataObject) -> None:
    """A turn is a question and an answer that begins with a text, and whatever clients put behind it."""
    pieces = APIS[api][0]
    turn = st.lists(st.tuples(st.sampled_from(sorted(pieces)), st.sampled_from(["", "c1", "c2"])), max_size=6)
    history, texts, before = [], [], []
    for number, behind in enumerate(data.draw(st.lists(turn, min_size=1, max_size=4))):
        history.append(user(f"question {number}."))
        prompt, warnings = read(api, history)
        assert prompt[: len(before)] == before
        assert prompt[-1] == history[-1]
        before = prompt
        history.append(assistant(f"answer {number}."))
        for index, (name, id) in enumerate(behind):
            texts.append(f"text {number}, {index}.")
            added = pieces[name](texts[-1], id)
            texts = texts if texts[-1] in json.dumps(added) else texts[:-1]
            history += added
    prompt, warnings = read(api, [*history, user("the last question")])
    written = json.dumps(prompt)
    missing = [text for text in texts if text not in written]
    assert not missing or any("second results" in warning for warning in warnings)
    assert "AAAA" not in written
    assert all(isinstance(message["content"], str) for message in prompt)


CALL = assistant(None, tool_calls=[function("f", "{}", id="a"), function("g", "{}", id="b")])


def result(id: str | None, content: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **({} if id is None else {"tool_call_id": id}), **more}


SYSTEM, ON, NEXT = {"role": "system", "content": "Stay."}, assistant("on"), user("next")


@in_turn(
    "behind expected warning",
    [
        ([result("b", "B"), result("a", "A")], "f=A g=B", None),
        ([SYSTEM, result("a", "A"), user("and"), result("b", "B")], "f=A g=B system=Stay. user=and", None),
        ([result(None, "A"), result("", "B")], "f=A g=B", None),
        ([result("x", "X", name="g"), result("a", "A")], "f=A user=Result of g:\nX", "put as text, .* 'g'"),
        ([result("a", "A"), result("a", "again"), NEXT], "f=A user=next", "second results .* 'f'"),
        ([NEXT, ON, result("b", "B")], "user=next assistant=on user=Result of g:\nB", "put as text, .* 'g'"),
        ([ON, result("a", "A"), result("b", "B")], "f=A g=B assistant=on", None),
        ([result("a", "A"), CALL, result("b", "C")], "f=A call g=C", None),
        ([result("a", "A"), result("b", "B"), result("c", "C")], "f=A g=B user=Result of a tool:\nC", "'a tool'"),
    ],
)
def test_a_result_goes_to_its_call(behind: list[Any], expected: str, warning: str | None) -> None:
    prompt, warnings = read("chat", [user("q"), CALL, *behind])
    heads = ["call" if "tool_calls" in one else f"{one.get('name', one['role'])}={one['content']}" for one in prompt]
    assert " ".join(heads) == f"user=q call {expected}"
    assert not warnings if warning is None else re.search(warning, *warnings)


def test_results_of_calls_without_ids_have_names_or_an_order() -> None:
    calls = assistant(None, tool_calls=[function(name, "{}") for name in ("f", "g", "f")])
    results = [result("x", "G", name="g"), result("", "F", tool_name="f"), result(None, "last")]
    (_, _, *placed), warnings = read("chat", [user("q"), calls, *results])
    assert [(one["tool_call_id"], one["content"]) for one in placed] == [
        ("call_0", "F"),
        ("call_1", "G"),
        ("call_2", "last"),
    ]
    assert not warnings


def test_calls_have_names_and_arguments_that_templates_take() -> None:
    calls = [function('a "b"\n', None), function("天気", '{"cut'), function("", {"a": "é"}), function(5, "")]
    (_, answer), _ = read("chat", [user("q"), assistant(None, tool_calls=calls)])
    assert [(call["id"], *call["function"].values()) for call in answer["tool_calls"]] == [
        ("call_0", "a_b_", "{}"),
        ("call_1", "天気", '{"cut'),
        ("call_2", "unknown", '{"a": "é"}'),
        ("call_3", "unknown", "{}"),
    ]


def test_items_of_other_tools_are_calls_or_lines() -> None:
    items = [item for name in ("custom call", "custom result", "search") for item in RESPONSES[name]("T", "a")]
    (_, call, done, *lines), warnings = read("responses", [user("q"), *items, user("next")])
    assert call["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": '{"input": "T"}'}
    assert (done["role"], done["content"], done["name"]) == ("tool", "T", "apply_patch")
    assert lines[0]["content"] == '[web_search_call]\n{"type": "search", "query": "T"}'
    assert lines[1]["content"] == '[file_search_call]\n["q"]\nf.txt\nT'
    assert warnings == ["parts of messages are put as text, of type 'web_search_call', 'file_search_call'"]


@pytest.mark.parametrize("part", [IMAGE, {"type": "made_up"}, {"type": "document", "source": {"type": "url"}}])
def test_what_is_asked_now_must_be_text(part: dict[str, Any]) -> None:
    for history in ([user(part)], [ON, user("a", part), SYSTEM]):
        with pytest.raises(BadRequest, match="this server takes text alone"):
            read("chat", history)
    for more in ([NEXT], [ON], [CALL, result("a", "A")]):
        prompt, (warning,) = read("chat", [user("a", part), *more])
        assert prompt[0]["content"] in ("a", "a[image left out]", "a[document left out]")
        assert warning == f"parts of messages that have no text are left out, of type '{part['type']}'"


HM = typed("text", "hm")


@in_turn(
    "answer",
    [
        assistant("on", reasoning_details=[typed("reasoning.text", "h"), {"type": "summary", "summary": "m"}]),
        assistant("on", reasoning="hm", reasoning_details=[typed("reasoning.text", "hm")]),
        assistant("on", reasoning_content="", thinking=[{"type": "thinking", "thinking": "hm", "signature": "s"}]),
        assistant({"type": "thinking", "thinking": [typed("text", "h"), typed("text", "m")]}, "on"),
        assistant({"type": "thinking", "thinking": "hm"}, "on", reasoning_content="hm"),
        assistant({**HM, "type": "reasoning"}, "on"),
        assistant({"type": "reasoning", "reasoning": "hm"}, "on"),
        assistant({"type": "reasoning", "summary": [typed("summary_text", "hm")]}, "on"),
        assistant({"type": "reasoning", "summary": [], "content": [typed("reasoning_text", "hm")]}, "on"),
    ],
)
def test_past_reasoning_is_reasoning_in_every_form(answer: dict[str, Any]) -> None:
    (_, shown, _), warnings = read("chat", [user("q"), answer, NEXT])
    assert shown == {"role": "assistant", "reasoning_content": "hm", "content": "on"}
    assert warnings == []


HIDDEN = {"type": "reasoning", "summary": [], "encrypted_content": "AAAA"}
SEALED = {"type": "reasoning.encrypted", "data": "AAAA"}


@in_turn(
    "api items kind",
    [
        ("responses", [HIDDEN, ON], "reasoning"),
        ("responses", [{"type": "reasoning", "content": [HM]}, NEXT, ON], "reasoning without an answer"),
        ("anthropic", [assistant({"type": "redacted_thinking"}, "on")], "redacted_thinking"),
        ("anthropic", [assistant({"type": "thinking", "thinking": "", "signature": "AAAA"}, "on")], "thinking"),
        ("chat", [assistant("on", reasoning_details=[SEALED])], "reasoning.encrypted"),
        ("chat", [assistant("on", reasoning="hm", reasoning_details=[SEALED])], "reasoning.encrypted"),
        ("chat", [assistant({"type": "reasoning", "made_up": "hm"}, "on")], "reasoning"),
    ],
)
def test_past_reasoning_that_is_left_out_is_told(api: str, items: list[Any], kind: str) -> None:
    prompt, (warning,) = read(api, [user("q"), *items, NEXT])
    assert [one["content"] for one in prompt if one["role"] == "assistant"] == ["on"]
    assert warning == f"parts of messages that have no text are left out, of type '{kind}'"


def test_reasoning_beside_an_encrypted_part_is_shown_without_a_warning() -> None:
    shown = HIDDEN | {"content": [typed("reasoning_text", "hm")]}
    assert read("responses", [user("q"), shown, ON, NEXT])[1] == []


def test_a_call_in_both_spellings_is_one_call() -> None:
    call = {**CALL, "function_call": {"name": "f", "arguments": "{}"}}
    assert read("chat", [user("q"), call, NEXT]) == read("chat", [user("q"), CALL, NEXT])


def test_earlier_messages_of_roles_that_no_api_has_are_the_users() -> None:
    history = [{"role": role, "content": role} for role in ("critic", "human", "model", "ai")]
    prompt, (warning,) = read("chat", [*history, NEXT])
    assert [one["role"] for one in prompt] == ["user", "user", "assistant", "assistant", "user"]
    assert warning == "earlier messages are put as the user's, of role 'critic'"
    with pytest.raises(BadRequest, match="one of system, developer, user, assistant, tool"):
        read("chat", history[:1])


# -- over HTTP, and over the socket ------------------------------------------------------------------------------------

OTHERS = {"name": "bash", "type": "bash_20250124"}
WITH_IMAGE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [user(typed("text", "a"), IMAGE), NEXT]},
    "/apply-template": {"messages": [user(typed("text", "a"), IMAGE), NEXT]},
    "/v1/responses": {"input": [user({"type": "input_image"}), NEXT]},
    "/v1/responses/input_tokens": {"input": [user({"type": "input_image"}), NEXT]},
    "/v1/messages": {"messages": [user([{"type": "image", "source": {}}]), NEXT], "max_tokens": 1},
    "/api/chat": {"messages": [user("a", images=["AAAA"]), NEXT], "stream": False, "options": {"num_predict": 1}},
}


@pytest.mark.parametrize("path", WITH_IMAGE)
def test_what_is_left_out_is_told_in_a_header(hermes: Serving, path: str) -> None:
    response = hermes.post(path, {**WITH_IMAGE[path], "max_tokens": 1, "max_output_tokens": 1})
    assert response.status_code == 200
    assert "parts of messages that have no text are left out, of type '" in response.headers[HEADER]
    if path == "/apply-template":
        assert "a[image left out]" in response.json()["prompt"]


def test_the_log_has_what_the_socket_left_out(start: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[journal.Entry] = []
    monkeypatch.setattr(journal.Entry, "line", lambda entry: entries.append(entry) or {})  # type: ignore[func-returns-value]
    with Client(start().address) as client:
        client.send(id=1, messages=[user("the", images=["AAAA"]), NEXT], max_tokens=1, temprature=0)
        _, last = client.rest_of(1)
    assert entries[0].warnings == last["warnings"]
    assert "left out" in last["warnings"][0]
    assert last["warnings"][1] == "temprature is unknown and ignored: did you mean temperature?"


F_OF_ANTHROPIC = {"name": "f", "input_schema": {"type": "object"}}


@in_turn(
    "path tools choice",
    [
        ("/v1/chat/completions", [OTHERS, {"type": "function", "function": {"name": "f"}}], {"type": "bash_20250124"}),
        ("/v1/chat/completions", [{"type": "code_interpreter"}], "required"),
        ("/v1/chat/completions", [OTHERS], {"type": "function", "function": {"name": "bash"}}),
        ("/v1/responses", [OTHERS, {"type": "function", "name": "f"}], {"type": "function", "name": "bash"}),
        ("/v1/responses", [OTHERS, {"type": "mcp"}], {"type": "mcp", "server_label": "s"}),
        (
            "/v1/responses",
            [OTHERS, {"type": "function", "name": "f"}],
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "bash"}]},
        ),
        ("/v1/messages", [OTHERS, F_OF_ANTHROPIC], {"type": "tool", "name": "bash"}),
        ("/v1/messages", [{"type": "mcp_toolset", "mcp_server_name": "s"}], {"type": "any"}),
    ],
)
def test_a_choice_of_a_tool_that_is_left_out_is_auto(hermes: Serving, path: str, tools: Any, choice: Any) -> None:
    body = {"messages": [NEXT], "input": [NEXT], "max_tokens": 2, "max_output_tokens": 16, "tools": tools}
    body.pop("messages" if path == "/v1/responses" else "input")
    response = hermes.post(path, {**body, "tool_choice": choice})
    assert response.status_code == 200, response.text
    assert "are left out: only functions are called; tool_choice is auto" in response.headers[HEADER]


def test_other_tools_of_ollamas_clients_are_left_out(hermes: Serving) -> None:
    body = {"messages": [NEXT], "stream": False, "options": {"num_predict": 1}, "tools": [{"type": "web_search"}]}
    assert "tools of type 'web_search' are left out" in hermes.post("/api/chat", body).headers[HEADER]
