"""Results of tools and reasoning that Anthropic's clients have cleared: the prompt is that of a conversation which was
written without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine import PromptOptions
from polarlm.server.reading.edits import Clearing, ClearThinking, ClearToolUses, Compaction, edit
from polarlm.server.reading.messages import read_messages
from tests import call_templates
from tests.server.http_server import Serving, serving
from tests.tiny import forget
from tests.tool_model import tool_engine

GONE = "[This result was cleared to make room.]"
THINKING, TOOLS = "clear_thinking_20251015", "clear_tool_uses_20250919"
NAMES = ("read", "write")
RESULT = "A result. " * 6
TEMPLATE = call_templates.HERMES.replace(  # one that shows the reasoning of all turns
    "{% for m in messages %}",
    "{% for m in messages %}{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '' }}",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with tool_engine(tmp_path_factory.mktemp("model"), TEMPLATE) as engine, serving(engine, max_tokens=8) as running:
        yield running


def turn(number: int, call: str, thought: str, result: str) -> list[dict[str, Any]]:
    """A turn of an agent in Anthropic's shape: a question, a call after a thought, its result. An empty one is none."""
    blocks = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
    uses = [{"type": "tool_use", "id": f"c{number}", "name": call, "input": {"n": number}}] if call else []
    said = [{"type": "text", "text": f"Said {number}."}] if not call else []
    messages = [
        {"role": "user", "content": f"Question {number}."},
        {"role": "assistant", "content": [*blocks, *said, *uses]},
    ]
    results = [{"type": "tool_result", "tool_use_id": f"c{number}", "content": result}] if call else []
    return [*messages, *([{"role": "user", "content": results}] if results else [])]


TURNS = st.lists(st.tuples(st.sampled_from(("", *NAMES)), st.sampled_from(("", "Hm.")), st.just(RESULT)), max_size=6)


def conversation(turns: Sequence[tuple[str, str, str]]) -> list[Any]:
    return [one for number, each in enumerate(turns) for one in turn(number, *each)] + [
        {"role": "user", "content": "Go."}
    ]


def by_hand(turns: Sequence[tuple[str, str, str]], thinking: int, keep: int, excluded: str, inputs: bool) -> list[Any]:
    """The conversation without reasoning but in the last turns that have some, and without the results of all calls but
    the last ones."""
    thoughtful = [number for number, (_, thought, _) in enumerate(turns) if thought][-thinking:]
    calls = [number for number, (call, _, _) in enumerate(turns) if call]
    cleared = [number for number in calls[: max(0, len(calls) - keep)] if turns[number][0] != excluded]
    written = [
        (call, thought if number in thoughtful else "", GONE if number in cleared else result)
        for number, (call, thought, result) in enumerate(turns)
    ]
    messages = conversation(written)
    uses = [block for one in messages for block in one["content"] if isinstance(block, dict)]
    for block in uses:
        if inputs and block["type"] == "tool_use" and int(block["id"][1:]) in cleared:
            block["input"] = {}
    return messages


@settings(max_examples=60, deadline=None)
@given(TURNS, st.integers(1, 3), st.integers(0, 3), st.sampled_from(("", *NAMES)), st.booleans())
def test_an_edited_prompt_is_that_of_the_conversation_written_without_what_is_cleared(
    server: Serving, turns: list[Any], thinking: int, keep: int, excluded: str, inputs: bool
) -> None:
    def ids(prompt: Any) -> list[int]:
        return server.engine.prompt_ids(prompt, PromptOptions())

    each: list[Clearing] = [
        ClearThinking(thinking),
        ClearToolUses(tokens=None, keep=keep, excluded=(excluded,), inputs=inputs),
    ]
    prompt = read_messages(conversation(turns), [])
    edited = edit(prompt, each, lambda messages: len(ids(messages)))
    assert ids(edited.prompt) == ids(read_messages(by_hand(turns, thinking, keep, excluded, inputs), []))
    assert sum(tokens for _, _, tokens in edited.cleared) == len(ids(prompt)) - len(ids(edited.prompt))
    again = edit(edited.prompt, each, lambda messages: len(ids(messages)))
    assert (again.prompt, again.cleared) == (edited.prompt, ())


LONG = conversation([("read", "I look. " * 9, "x" * 400), ("write", "", "y" * 40), ("read", "So it is.", "z" * 40)])


def query(messages: list[Any], *edits: Any, **more: Any) -> dict[str, Any]:
    return {"model": "any", "messages": messages, "max_tokens": 8, "context_management": {"edits": [*edits]}, **more}


def uses(value: int) -> dict[str, Any]:
    return {"type": "tool_uses", "value": value}


def tokens(value: int) -> dict[str, Any]:
    return {"type": "input_tokens", "value": value}


def test_a_response_tells_what_was_cleared(server: Serving) -> None:
    """Whole, in a stream, and in a count of tokens, as Anthropic's client reads them."""
    edits = [{"type": THINKING}, {"type": TOOLS, "trigger": uses(2), "keep": uses(1)}]
    with server.anthropic() as client:
        beta, body = client.beta.messages, query(LONG, *edits, betas=["context-management-2025-06-27"])
        whole = beta.create(**body)
        with beta.stream(**body) as stream:
            streamed = stream.get_final_message()
        del body["max_tokens"]
        counted = beta.count_tokens(**body)
    thinking, results = whole.context_management.applied_edits  # type: ignore[union-attr]
    assert streamed.context_management == whole.context_management
    assert (thinking.type, thinking.cleared_thinking_turns) == (THINKING, 1)  # type: ignore[union-attr]
    assert (results.type, results.cleared_tool_uses) == (TOOLS, 2)  # type: ignore[union-attr]
    usage, count = whole.usage, counted.context_management
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert count.original_input_tokens == len(server.engine.prompt_ids(read_messages(LONG, [])))  # type: ignore[union-attr]
    cleared = thinking.cleared_input_tokens + results.cleared_input_tokens
    assert count.original_input_tokens - counted.input_tokens == cleared > 400  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("edits", "cleared"),
    [
        ([{"type": TOOLS}], []),  # 100,000 tokens
        ([{"type": TOOLS, "trigger": uses(3)}], []),
        ([{"type": TOOLS, "trigger": tokens(400)}], []),  # but three are kept
        ([{"type": TOOLS, "trigger": tokens(400), "keep": uses(0)}], [3]),
        ([{"type": TOOLS, "trigger": tokens(4000), "keep": uses(0)}], []),
        ([{"type": TOOLS, "trigger": uses(2), "keep": uses(0), "clear_at_least": tokens(350)}], [3]),
        ([{"type": TOOLS, "trigger": uses(2), "keep": uses(0), "clear_at_least": tokens(450)}], []),
        ([{"type": TOOLS, "trigger": uses(2), "keep": uses(0), "exclude_tools": ["read"]}], [1]),
        ([{"type": THINKING, "keep": "all"}], []),
        ([{"type": THINKING, "keep": {"type": "thinking_turns", "value": 2}}], []),
    ],
)
def test_edits_clear_as_they_say(server: Serving, edits: list[Any], cleared: list[int]) -> None:
    applied = server.post("/v1/messages", query(LONG, *edits)).json()["context_management"]["applied_edits"]
    assert [one.get("cleared_tool_uses") for one in applied] == cleared


def test_a_conversation_is_compacted_by_its_length_after_other_edits(server: Serving) -> None:
    clear, compact = {"type": TOOLS, "trigger": uses(2), "keep": uses(0)}, {"type": "compact_20260112"}
    count = server.post("/v1/messages/count_tokens", query(LONG, clear)).json()["input_tokens"]
    for threshold, kinds in ((count, ["text"]), (count - 1, ["compaction", "text"])):
        body = query(LONG, clear, {**compact, "trigger": tokens(threshold)}, ignore_eos=True)
        assert [block["type"] for block in server.post("/v1/messages", body).json()["content"]] == kinds


def test_reasoning_that_the_engine_knows_is_cleared_too(thinking: Serving) -> None:
    """The ids of an answer, which the engine puts in place of its text, may begin with reasoning."""
    engine, messages = thinking.engine, conversation([("read", "", RESULT)])[:-1]
    prompt = read_messages(messages, [])
    ids = engine.model.tokenizer.tokenize(f"<think>\n{'Hm. ' * 60}\n</think>\n\nSo.", control=True, continued=True)
    engine._answers.conversation(prompt[:1]).keep_message(prompt[1], ids, reasoned=True)
    messages[1]["content"].insert(0, {"type": "thinking", "thinking": "Hm.", "signature": ""})
    edited = edit(read_messages(messages, []), [ClearThinking(0)], lambda one: len(engine.prompt_ids(one)))
    assert [number for _, number, _ in edited.cleared] == [1]
    for shown, one in ((True, prompt), (False, edited.prompt)):
        assert ("Hm." in engine.detokenize(engine.prompt_ids(one))) is shown


def test_nothing_is_counted_for_edits_that_need_no_count() -> None:
    def count(messages: Any) -> int:
        raise AssertionError("counted")

    prompt = read_messages(LONG, [])
    assert edit(prompt, [ClearThinking(2), ClearToolUses(None, calls=3), Compaction()], count).compaction


@pytest.mark.parametrize("asked_by", ["flag", "field"])
def test_in_place_nothing_is_read_again(server: Serving, asked_by: str) -> None:
    """The client goes on sending everything. Its last turn is what it has to say; exactly, all behind it as well."""
    results = [f"Line {number} of the file. " * 30 for number in range(4)]
    messages = conversation([("read", "", result) for result in results])
    more = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "And then?"}]
    edit_of_uses = {"type": TOOLS, "trigger": uses(3), "keep": uses(1)}
    with serving(server.engine, context_edits="in-place" if asked_by == "flag" else "exact") as running:

        def ask(messages: list[Any], in_place: bool, *edits: Any) -> dict[str, Any]:
            body = query(messages, *edits)
            body["context_management"] |= {} if asked_by == "flag" and in_place else {"in_place": in_place}
            answer: dict[str, Any] = running.post("/v1/messages", body).json()
            assert "warnings" not in answer
            return answer

        forget(server.engine)
        first = ask(messages, True)["usage"]
        read = first["input_tokens"] + first["output_tokens"]
        exact = ask([*messages, *more], False, edit_of_uses)
        holed = ask([*messages, *more], True, edit_of_uses)
        whole = ask([*messages, *more], True)["usage"]
        assert holed["context_management"] == exact["context_management"]
        assert holed["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 3
        usage = holed["usage"]
        prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        left_out = whole["input_tokens"] + whole["cache_read_input_tokens"] - prompt
        assert left_out % 64 == 0
        assert left_out > sum(map(len, results[:3])) - 3 * 2 * 64
        assert usage["input_tokens"] <= prompt - (read - left_out) + 2 * 64
        assert exact["usage"]["input_tokens"] > 2 * usage["input_tokens"]


def test_where_blocks_cannot_be_left_out_a_warning_says_that_all_is_read_again(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(server.engine), "can_leave_out", False)
    body = query(LONG, {"type": TOOLS, "trigger": uses(1), "keep": uses(1)})
    body["context_management"]["in_place"] = True
    answer = server.post("/v1/messages", body).json()
    (told,) = answer["warnings"]
    assert told.startswith("the prompt is read again behind what was cleared: ")
    assert answer["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 2
