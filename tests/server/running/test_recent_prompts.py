"""Why a prompt was read again, as a response, the log, /stats and Anthropic's diagnostics say it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from polarlm import ps
from polarlm.engine import Engine
from tests import call_templates
from tests.server.http_server import Serving, serving
from tests.tiny import forget
from tests.tool_model import tool_engine

CHAT = "/v1/chat/completions"
TAIL = "and behind it stands what both requests have in common, word for word. "
TOOLS = [
    {"type": "function", "function": {"name": name, "description": TAIL, "parameters": {"type": "object"}}}
    for name in ("read", "write", "find")
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Today is 30 November. " + TAIL},
    {"role": "user", "content": "What does a.py do? " + TAIL},
    {"role": "assistant", "content": "", "reasoning_content": "I have to read it first.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "import os\n" + TAIL},
]
REQUEST: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 2, "temperature": 0}


Change = Callable[[dict[str, Any]], None]  # of a request's body


def keep(body: dict[str, Any]) -> None: ...


def system(text: str) -> Change:
    return lambda body: body["messages"][0].update(content=text + TAIL)


def billing(number: str) -> Change:
    return system(f"x-anthropic-billing-header: cc_version=2.1.332; cch={number}; ")


def effort(name: str) -> Change:
    return lambda body: body.update(chat_template_kwargs={"reasoning_effort": name})


def reorder(body: dict[str, Any]) -> None:
    body["tools"].reverse()


def drop_thinking(body: dict[str, Any]) -> None:
    del body["messages"][2]["reasoning_content"]


def change_result(body: dict[str, Any]) -> None:
    body["messages"][3]["content"] = "[cut]\n" + TAIL


# Name → what the first and the second request change, what is named, and words of both.
BREAKERS: dict[str, tuple[Any, Any, str, str, str]] = {
    "a date": (keep, system("Today is 1 December. "), "messages[0].content (system)", "30 Nov", "1 Dec"),
    "tools in another order": (keep, reorder, "tools[0]", "read", "find"),
    "thinking dropped": (keep, drop_thinking, "messages[2].reasoning_content (assistant)", "<think>", "<tool_ca"),
    "a changed result": (keep, change_result, "messages[3].content (tool)", "import o", "[cut]"),
    "another template option": (effort("low"), effort("high"), "the template option reasoning_effort", "low", "high"),
    "a billing header": (billing("1f2e"), billing("9a0b"), "messages[0].content (system)", "1f2e", "9a0b"),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model that reasons, and is told with which effort."""
    template = "{{ 'Effort: ' + reasoning_effort | default('none') }}" + call_templates.QWEN3
    with tool_engine(tmp_path_factory.mktemp("model"), template) as engine:
        yield engine


@pytest.fixture
def server(engine: Engine) -> Iterator[Serving]:
    forget(engine)
    with serving(engine) as running:
        yield running


def ask(server: Serving, *changes: Change, **more: Any) -> dict[str, Any] | None:
    body = deepcopy(REQUEST) | more
    for change in changes:
        change(body)
    found: dict[str, Any] | None = server.post(CHAT, body).json()["usage"]["prompt_tokens_details"].get("reread")
    return found


@pytest.mark.parametrize("name", BREAKERS)
def test_what_breaks_a_prompt_is_named_with_the_words_on_both_sides(server: Serving, name: str) -> None:
    first, second, place, before, now = BREAKERS[name]
    assert ask(server, first) is None
    assert ask(server, first) is None
    reread = ask(server, second)
    assert reread is not None
    assert reread["places"] == [place]
    assert before in reread["before"]
    assert now in reread["now"]
    assert len(TAIL) <= reread["tokens"] < 2000


def test_a_template_that_drops_thoughts_and_a_store_that_lost_its_blocks_are_named(server: Serving) -> None:
    """The first of them drops the reasoning of earlier turns, once the user says something new."""
    longer = [*MESSAGES, {"role": "assistant", "content": "It imports os."}, {"role": "user", "content": TAIL}]
    assert ask(server) is None
    reread = ask(server, messages=longer)
    assert reread is not None
    assert (reread["places"], "<think>" in reread["before"]) == (["the chat template"], True)
    forget(server.engine)
    lost = ask(server, messages=longer)
    assert lost is not None
    assert (lost["places"], lost["before"], lost["cached"]) == ([], "", 0)


def test_the_log_has_the_place_alone_and_a_key_hears_of_its_own_prompts(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words on both sides are words of prompts: the log has them with --log-prompts alone."""
    file, changes = tmp_path / "keys", {"anna": keep, "ben": system("It is May. "), "carl": system("It is June. ")}
    file.write_text("".join(f"{name} sk-{name}-0123456789\n" for name in changes))
    for logs in (False, True):
        forget(engine)
        caplog.clear()
        with serving(engine, api_key_file=str(file), log_prompts=logs) as server, caplog.at_level(logging.INFO):
            for name, change in [*changes.items(), ("carl", system("It is July. "))]:
                body = deepcopy(REQUEST)
                change(body)
                server.http.headers["Authorization"] = f"Bearer sk-{name}-0123456789"
                reread = server.post(CHAT, body).json()["usage"]["prompt_tokens_details"].get("reread")
                assert (reread is None) is (change in changes.values()), name
            stats = server.http.get("/stats").json()
            monkeypatch.setenv("POLARLM_API_KEY", "sk-carl-0123456789")
            (shown,) = ps._rereads(f"127.0.0.1:{server.port}", [engine.model.name])
        lines = [record.__dict__["line"] for record in caplog.records if hasattr(record, "line")]
        (told,) = [line["reread"] for line in lines if "reread" in line]
        assert ([*told["places"]], told.get("before")) == (reread["places"], reread["before"] if logs else None)
        sentence = f"{reread['tokens']:,} prompt tokens read again (other than before: messages[0].content (system))"
        assert (stats["reread_tokens"], stats["rereads"]) == (reread["tokens"], [sentence])
        assert shown.endswith(f", {engine.model.name}, in the last hour: {sentence}\n")


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropics_diagnostics_compare_with_the_message_that_the_client_names(server: Serving, streamed: bool) -> None:
    tools = [{"name": name, "description": TAIL, "input_schema": {"type": "object"}} for name in ("read", "write")]
    first = [{"role": "user", "content": "What does a.py do? " + TAIL}]
    longer = [*first, {"role": "assistant", "content": "It imports os."}, {"role": "user", "content": "And b.py?"}]
    plain: dict[str, Any] = {"model": "any", "max_tokens": 2, "system": "Be brief.", "tools": tools}

    with server.anthropic() as client:

        def diagnose(messages: Any, previous: str | None, **more: Any) -> tuple[str, Any]:
            ask = {**plain, "messages": messages, "diagnostics": {"previous_message_id": previous}, **more}
            if not streamed:
                message = client.beta.messages.create(**ask)
                return message.id, message.diagnostics and message.diagnostics.cache_miss_reason
            with client.beta.messages.stream(**ask) as stream:
                (message,) = [event.message for event in stream if event.type == "message_start"]
                return message.id, message.diagnostics and message.diagnostics.cache_miss_reason

        id, reason = diagnose(first, None)
        assert reason is None
        id, reason = diagnose(longer, id)
        assert reason is None
        for more, kind in (
            ({"system": "Be brief, it is May."}, "system_changed"),
            ({"tools": tools[::-1]}, "tools_changed"),
            (
                {"messages": [{"role": "user", "content": "What does c.py do? " + TAIL}, *longer[1:]]},
                "messages_changed",
            ),
        ):
            _, reason = diagnose(**{"messages": longer, "previous": id, **more})
            assert reason.type == kind
            assert 20 < reason.cache_missed_input_tokens < 2000
        assert diagnose(longer, "msg_of_another_server")[1].type == "previous_message_not_found"
