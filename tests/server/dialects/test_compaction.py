"""Compaction by the server, with OpenAI's and Anthropic's own clients: the session's prompt is in the cache, and the
summary stands for all before it from then on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarlm.server.http.warnings import HEADER
from polarlm.server.reading.edits import INSTRUCTION, seal, summary_in
from tests import call_templates
from tests.lazily import anthropic
from tests.server.apis import submitted
from tests.server.http_server import Serving, serving
from tests.tool_model import tool_engine

BLOCK = 64  # tokens
LIMIT = 24  # tokens of an answer, and of a summary
PARAMETERS = {"type": "object", "properties": {"path": {"enum": ["a", "b"]}}, "required": ["path"]}
SYSTEM = "You are an agent. " * 8
TASK = "Fix the parser. " * 8
COMPACT = {"type": "compact_20260112"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with (
        tool_engine(tmp_path_factory.mktemp("model"), call_templates.HERMES) as engine,
        serving(engine, max_tokens=LIMIT) as running,
    ):
        yield running


@pytest.fixture
def client(server: Serving) -> Iterator[anthropic.Anthropic]:
    with server.anthropic() as client:
        yield client


def responses(server: Serving, items: list[Any], *, stream: bool = False, **more: Any) -> Any:
    """The response, by OpenAI's client."""
    body = {"model": "any", "instructions": SYSTEM, "input": items, "temperature": 0, **more}
    body["extra_body"] = {"ignore_eos": True}
    body["tools"] = [{"type": "function", "name": "read", "parameters": PARAMETERS, "strict": False}]
    if not stream:
        return server.openai.responses.create(**body)
    *events, last = server.openai.responses.create(**body, stream=True)
    assert [event.sequence_number for event in (*events, last)] == [*range(len(events) + 1)]
    return last.response


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def to_json(items: list[Any]) -> list[Any]:
    return [item.model_dump(exclude_none=True) for item in items]


# -- OpenAI's Responses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_trigger_is_answered_by_a_summary_twice(
    server: Serving, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The prompt of a session and its last answer are in the cache when the summary is written; the conversation goes
    on from the summary, and is compacted again."""
    items: list[Any] = [user(TASK)]
    made = submitted(server.engine, monkeypatch)
    for round in range(2):
        answer = responses(server, items, stream=stream)
        items += to_json(answer.output)
        compacted = responses(server, [*items, {"type": "compaction_trigger"}], stream=stream)
        (item,) = compacted.output
        assert (item.type, item.id[:4], compacted.status) == ("compaction", "cmp_", "completed")
        begun = answer.usage.total_tokens // BLOCK * BLOCK
        assert compacted.usage.input_tokens_details.cached_tokens >= begun - BLOCK > 0
        before, asked = made[-2], made[-1]
        assert asked["prompt"][: len(before["prompt"])] == before["prompt"]
        assert asked["prompt"][-1] == {"role": "user", "content": INSTRUCTION}
        assert asked["options"].tools == before["options"].tools != ()
        summary = summary_in(item.model_dump())
        assert summary
        items = [*items, *to_json([item]), user(f"Go on, {round}.")]
        responses(server, items, stream=stream)
        system, head, question = made[-1]["prompt"]
        assert (system["role"], head["role"], question["content"]) == ("system", "user", f"Go on, {round}.")
        assert head["content"].endswith(f"\n\n{summary}")


def test_a_stream_of_a_compaction_has_the_events_that_codex_reads(server: Serving) -> None:
    body = {"model": "any", "input": [user(TASK), {"type": "compaction_trigger"}], "stream": True}
    events = list(server.openai.responses.create(**body, extra_body={"ignore_eos": True}))
    kinds = ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    assert [event.type.removeprefix("response.") for event in events] == kinds
    assert events[3].item == events[-1].response.output[0]


def test_the_endpoint_of_compactions_returns_the_users_messages_and_the_item(server: Serving) -> None:
    items = [user(TASK), {"role": "assistant", "content": "Done."}, {"role": "user", "content": "And the lexer?"}]
    made = server.openai.responses.compact(
        model="any", instructions=SYSTEM, input=items, extra_body={"ignore_eos": True}
    )
    assert (made.object, made.usage.output_tokens) == ("response.compaction", LIMIT)
    assert [item.type for item in made.output] == ["message", "message", "compaction"]
    assert made.output[1].content == "And the lexer?"


def test_a_prompt_above_a_threshold_is_compacted_before_its_answer(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The item comes first, and the next request, which has it, begins with the prompt that was answered."""
    items: list[Any] = [user(TASK), {"role": "assistant", "content": "Done. " * 20}, user("And the lexer?")]
    tokens = responses(server, items).usage.input_tokens
    for stream in (False, True):
        at = [{"type": "compaction", "compact_threshold": tokens}]
        (message,) = responses(server, items, stream=stream, context_management=at).output
        assert message.type == "message"
        at[0]["compact_threshold"] = tokens - 1  # type: ignore[assignment]
        made = submitted(server.engine, monkeypatch)
        answer = responses(server, items, stream=stream, context_management=at)
        item, message = answer.output
        assert (item.type, message.type) == ("compaction", "message")
        assert [one["content"] for one in made[1]["prompt"]][2] == "And the lexer?"
        assert answer.usage.input_tokens < tokens
        again = responses(server, [*items, *to_json(answer.output), user("Thanks.")], stream=stream)
        assert made[2]["prompt"][:3] == made[1]["prompt"]
        assert again.usage.input_tokens_details.cached_tokens >= answer.usage.input_tokens // BLOCK * BLOCK > 0


def test_a_model_that_reasons_writes_its_summary_without_reasoning(tmp_path: Path) -> None:
    """Even one that would not end it."""
    template = call_templates.QWEN3.replace("<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>\\n' }}")
    body: dict[str, Any] = {"input": [user(TASK)], "max_output_tokens": LIMIT, "temperature": 0, "ignore_eos": True}
    with tool_engine(tmp_path, template) as engine, serving(engine) as running:
        (said,) = running.post("/v1/responses", body).json()["output"]
        assert said["type"] == "reasoning"
        body["input"].append({"type": "compaction_trigger"})
        (item,) = running.post("/v1/responses", body).json()["output"]
        assert "</think>" not in summary_in(item) != ""


def test_a_summary_calls_no_tool(server: Serving) -> None:
    """Not even by a model that wants to, where the request demands a call."""
    body = {"input": [user(TASK), {"type": "compaction_trigger"}], "temperature": 0, "logit_bias": {"<tool_call>": 20}}
    tool = {"type": "function", "name": "read", "parameters": PARAMETERS}
    response = server.post("/v1/responses", body | {"tools": [tool], "tool_choice": "required"}).json()
    (item,) = response["output"]
    assert "<tool_call>" not in summary_in(item)


def test_a_session_that_leaves_no_room_for_a_summary_is_too_long(server: Serving) -> None:
    items = [user("x" * server.engine.context), {"type": "compaction_trigger"}]
    assert responses(server, items, stream=True).error.code == "context_length_exceeded"


# -- Anthropic's Messages ----------------------------------------------------------------------------------------------


def ask(
    client: anthropic.Anthropic, messages: list[Any], edit: dict[str, Any], *, stream: bool = False, **more: Any
) -> Any:
    body: dict[str, Any] = {"model": "any", "system": SYSTEM, "messages": messages, "max_tokens": LIMIT, **more}
    body |= {"betas": ["compact-2026-01-12"], "extra_body": {"temperature": 0, "ignore_eos": True}}
    if edit:
        body["context_management"] = {"edits": [edit]}
    body["tools"] = [{"name": "read", "input_schema": PARAMETERS}]
    if not stream:
        return client.beta.messages.create(**body)
    with client.beta.messages.stream(**body) as events:
        kinds = [(event.type, getattr(getattr(event, "delta", None), "type", "")) for event in events]
        assert kinds.count(("content_block_delta", "compaction_delta")) == (edit != {})
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_conversation_is_compacted_before_its_answer_twice(
    server: Serving, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": TASK}]
    made = submitted(server.engine, monkeypatch)
    edit = {**COMPACT, "trigger": {"type": "input_tokens", "value": 50}, "instructions": "Only the paths."}
    for round in range(2):
        answer = ask(client, messages, edit, stream=stream)
        summary, said = answer.content
        assert (summary.type, said.type) == ("compaction", "text")
        assert made[-2]["prompt"][-1]["content"] == "Only the paths."
        assert made[-1]["prompt"][1]["content"].endswith(summary.content)
        assert made[-1]["prompt"][2:] == [messages[-1]]
        first, second = answer.usage.iterations
        assert (first.type, second.type) == ("compaction", "message")
        assert second.output_tokens == answer.usage.output_tokens
        assert second.input_tokens == answer.usage.input_tokens
        if round:
            assert first.cache_read_input_tokens > 0
        messages += [
            {"role": "assistant", "content": to_json(answer.content)},
            {"role": "user", "content": f"Go on, {round}."},
        ]
        ask(client, messages, {})
        assert made[-1]["prompt"][: len(made[-2]["prompt"])] == made[-2]["prompt"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_compaction_may_pause_before_the_answer(
    client: anthropic.Anthropic, server: Serving, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The block alone, sent back, is answered as the user's last message."""
    made = submitted(server.engine, monkeypatch)
    edit = {**COMPACT, "trigger": {"type": "input_tokens", "value": 1}, "pause_after_compaction": True}
    messages: list[Any] = [{"role": "user", "content": TASK}]
    paused = ask(client, messages, edit, stream=stream)
    assert [block.type for block in paused.content] == ["compaction"]
    assert (paused.stop_reason, paused.usage.output_tokens) == ("compaction", 0)
    (iteration,) = paused.usage.iterations
    assert iteration.output_tokens == LIMIT
    answer = ask(client, [*messages, {"role": "assistant", "content": to_json(paused.content)}], {}, stream=stream)
    assert [block.type for block in answer.content] == ["text"]
    assert [one["role"] for one in made[-1]["prompt"]] == ["system", "user", "user"]
    assert made[-1]["prompt"][2]["content"] == TASK
    short = ask(client, messages, COMPACT)  # Anthropic's own threshold
    assert (short.content[0].type, short.context_management.applied_edits) == ("text", [])


def test_a_request_may_ask_for_a_compaction_alone(server: Serving) -> None:
    body = {"messages": [{"role": "user", "content": TASK}], "compaction": {"type": "summarize"}, "ignore_eos": True}
    answer = server.post("/v1/messages", body).json()
    assert ([block["type"] for block in answer["content"]], answer["stop_reason"]) == (["compaction"], "compaction")


# -- items of past compactions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "item",
    [{"encrypted_content": seal("All is well, é.")}, {"text": "All is well, é."}, {"content": "All is well, é."}],
)
def test_a_summary_stands_for_all_before_it(server: Serving, monkeypatch: pytest.MonkeyPatch, item: Any) -> None:
    made = submitted(server.engine, monkeypatch)
    old, new = ({"type": "compaction", "encrypted_content": seal("Old.")}, {"type": "compaction", **item})
    call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    body = {"input": [user("a"), old, user("b"), call, result, new, call, result], "max_output_tokens": 2}
    response = server.post("/v1/responses", body)
    assert HEADER not in response.headers
    head, asked, called, told = made[0]["prompt"]
    assert head["content"].endswith("\n\nAll is well, é.")
    assert [one["content"] for one in (asked, called, told)] == ["b", "", "x"]


@pytest.mark.parametrize("sealed", ["AAAA", "not base64", "", 5])
def test_a_summary_of_another_server_is_left_out_with_a_warning(server: Serving, sealed: Any) -> None:
    item = {"type": "compaction", "encrypted_content": sealed}
    response = server.post("/v1/responses", {"input": [user("a"), item, user("b")], "max_output_tokens": 2})
    assert response.headers[HEADER] == "parts of messages that have no text are left out, of type 'compaction'"
