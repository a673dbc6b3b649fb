"""What every API promises, asked of each in its own words: `tests.server.apis` has the table."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from polarlm.engine import Engine, Usage
from polarlm.engine.parsing.pieces import CallStart, Piece, fold
from polarlm.server.http.generation import ModelInfo
from polarlm.server.http.warnings import HEADER
from tests.pairs import in_turn
from tests.server.answers.test_http_tools import WEATHER
from tests.server.apis import APIS, CALLING, CONVERSATIONS, Reply, alone, breaking, events, submitted
from tests.server.http_server import Serving, serving
from tests.server.lines import eventually
from tests.server.reading.test_http_fuzz import has_shape
from tests.tiny import CONTEXT, forget, held

QUESTION = "then he ran on"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
TOOLS = [
    {"name": "weather", "description": "The weather.", "parameters": WEATHER},
    {"name": "time", "parameters": {"type": "object", "properties": {}}},
]
EACH = pytest.mark.parametrize("name", APIS)


# -- answers -----------------------------------------------------------------------------------------------------------


@EACH
def test_an_answer_is_the_engines_whole_and_streamed(server: Serving, name: str) -> None:
    api = APIS[name]
    expected = alone(server.engine, api.prompt(QUESTION), max_tokens=12, **GREEDY)
    for stream in (False, True):
        forget(server.engine)
        reply = api.ask(server, QUESTION, stream=stream, **GREEDY)
        assert (reply.text, reply.reason) == (expected.text, "length"), stream
        assert (reply.prompt_tokens, reply.completion_tokens) == (expected.usage.prompt_tokens, 12)
        assert not reply.cached_tokens


@EACH
def test_a_stop_string_ends_an_answer(server: Serving, name: str) -> None:
    api = APIS[name]
    text = alone(server.engine, api.prompt(QUESTION), max_tokens=24, **GREEDY).text
    stop = text[8:10]
    for stream in (False, True):
        reply = api.ask(server, QUESTION, stream=stream, max_tokens=24, stop=["no such text", stop], **GREEDY)
        assert (reply.text, reply.reason) == (text[: text.index(stop)], "stop"), stream


@EACH
def test_sampling_is_that_of_the_request(server: Serving, name: str) -> None:
    """An empty cache before each: a prefix that is found may be read as codes, which draws other tokens."""
    api = APIS[name]

    def answer(**more: Any) -> str:
        forget(server.engine)
        return api.ask(server, QUESTION, temperature=2, ignore_eos=True, **more).text

    assert answer(seed=7) == answer(seed=7) != answer(seed=8)
    assert answer(top_k=1) == alone(server.engine, api.prompt(QUESTION), max_tokens=12, **GREEDY).text


@pytest.mark.parametrize("name", [name for name, api in APIS.items() if api.has_logprobs])
def test_log_probabilities_are_those_of_the_engine(server: Serving, name: str) -> None:
    api = APIS[name]
    expected = alone(server.engine, api.prompt(QUESTION), max_tokens=12, logprobs=2, **GREEDY)
    for stream in (False, True):
        forget(server.engine)
        reply = api.ask(server, QUESTION, stream=stream, logprobs=2, **GREEDY)
        assert reply.logprobs == [token.logprob for token in expected.logprobs], stream
    assert api.ask(server, QUESTION, **GREEDY).logprobs == []


@pytest.mark.parametrize("name", [name for name in APIS if name != "completions"])  # which has no such field
def test_an_answer_is_of_the_schema(server: Serving, name: str) -> None:
    """The vocabulary of this model has no braces, but digits."""
    schema = {"type": "integer", "minimum": 100, "maximum": 999}
    reply = APIS[name].ask(server, QUESTION, schema=schema, temperature=1)
    assert 100 <= int(reply.text) <= 999
    assert reply.reason == "stop"


@pytest.mark.parametrize("name", [*CALLING, "ollama"])
def test_a_schema_is_taken_with_nulls_in_it_and_one_that_fails_names_its_tool(hermes: Serving, name: str) -> None:
    api, plain = APIS[name], {"type": "object", "properties": {"a": {"type": "string"}}}
    nulls = {**plain, "type": ["object"], "required": None, "properties": {"a": {"type": "string", "enum": None}}}

    def tokens(**more: Any) -> int:
        return api.ask(hermes, QUESTION, max_tokens=2, **more).prompt_tokens

    def tools(parameters: Any) -> list[Any]:
        return [TOOLS[0], {"name": "broken", "description": None, "parameters": parameters}]

    assert tokens(tools=tools(nulls)) == tokens(tools=tools(plain))
    assert tokens(schema=nulls) == tokens(schema=None)
    for wrong in ({"type": "text"}, {"pattern": "("}, {"$ref": "#/no"}):
        body = api.body(QUESTION, tools=tools({**plain, "properties": {"a": {"type": "string", **wrong}}}))
        told = json.dumps(hermes.refused(api.path, body))
        assert re.search('The parameters of the function broken cannot be used: [^":]*(: [a-z]+)?"', told), told


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_turn_sent_back_finds_its_prefix_and_a_server_may_hide_it(tiny: Engine, name: str) -> None:
    api = CONVERSATIONS[name]
    for hidden in (False, True):
        forget(tiny)
        with serving(tiny, hide_cached_tokens=hidden) as server:
            body = server.post(api.path, api.body(QUESTION, max_tokens=40, **GREEDY)).json()
            history = [*api.prompt(QUESTION), *api.back(body), {"role": "user", "content": "and then"}]
            second = api.ask(server, history, **GREEDY)
            assert server.driver.snapshot().cached_tokens > 0
            if name != "ollama":  # it has no such field
                assert bool(second.cached_tokens) is not hidden
            assert second.prompt_tokens > api.whole(body).prompt_tokens


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_last_message_of_the_assistants_is_continued_but_by_responses(server: Serving, name: str) -> None:
    """There an answer is an item of its own."""
    messages = [*user(QUESTION), {"role": "assistant", "content": "he ran"}]
    written = {"messages": messages, "continue_final_message": name != "responses"}
    ids = server.engine.tokenize(server.post("/apply-template", written).json()["prompt"], control=True)
    expected = alone(server.engine, ids, max_tokens=12, **GREEDY).text
    reply = CONVERSATIONS[name].ask(server, messages, **GREEDY)
    assert (reply.prompt_tokens, reply.text) == (len(ids), expected)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("chat", "/v1/chat/completions/input_tokens"),
        ("messages", "/v1/messages/count_tokens"),
        ("responses", "/v1/responses/input_tokens"),
    ],
)
def test_tokens_can_be_counted_before(server: Serving, name: str, path: str) -> None:
    api = APIS[name]
    counted = server.post(path, api.body(QUESTION)).json()["input_tokens"]
    assert counted == api.ask(server, QUESTION).prompt_tokens
    long = server.post(path, api.body("then " * 5000)).json()["input_tokens"]
    assert long > 5000  # more than the context
    assert server.post(path, api.body([])).status_code == 400


@EACH
def test_openais_slow_tier_is_the_background(shared: Serving, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a request gives way to all others: tests/server/test_batch.py."""
    api, requests = APIS[name], submitted(shared.engine, monkeypatch)
    for tier in ("flex", "default"):
        response = shared.post(api.path, api.body(QUESTION, max_tokens=1) | {"service_tier": tier})
        assert response.status_code == 200
        assert HEADER not in response.headers
    assert [request["in_background"] for request in requests] == [True, False]


# -- errors ------------------------------------------------------------------------------------------------------------


@EACH
def test_an_error_has_a_status_or_is_the_last_event(
    server: Serving, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = APIS[name]
    breaking(server.engine, monkeypatch, steps=6)
    streamed = server.post(api.path, api.body(QUESTION, stream=True, max_tokens=24, **GREEDY))
    assert streamed.status_code == 200
    *_, last = events(streamed.text)
    failed = last["response"] if name == "responses" else last
    assert failed["error"]
    assert name == "responses" or has_shape(api.path, last)
    assert "[DONE]" not in streamed.text
    whole = server.post(api.path, api.body(QUESTION, **GREEDY))
    assert whole.status_code == 500
    assert has_shape(api.path, whole.json())
    assert "secret" not in streamed.text + whole.text


@EACH
def test_a_client_that_leaves_cancels_its_answers(server: Serving, name: str) -> None:
    server.gate.close()
    server.gate.let(40)
    api, count = APIS[name], 3 if name == "completions" else 1
    body = api.body(QUESTION, stream=True, max_tokens=200, **GREEDY) | ({"n": count} if count > 1 else {})
    with server.send(api.path, body) as connection:
        received = b""
        while received.count(b"\n") < 6:
            received += connection.recv(4096)
    eventually(lambda: server.outcomes() == {"cancelled": count})
    eventually(lambda: not server.busy)
    with server.engine._exclusive():
        assert not any(map(any, held(server.engine)))


LONG = "then " * 300
OPENAI = (rf"maximum context length is {CONTEXT} tokens", {"code": "context_length_exceeded", "n_ctx": CONTEXT})
ANTHROPIC = (rf"^prompt is too long: \d+ tokens > {CONTEXT} maximum", {"type": "invalid_request_error"})
LLAMA_SERVER = ("exceeds the available context size", {"type": "exceed_context_size_error", "n_ctx": CONTEXT})
OLLAMA = ("the input length exceeds the context length", {})
OF_VECTORS = {"/api/embed": {"input": LONG, "truncate": False}, "/v1/embeddings": {"input": LONG}}


def test_a_full_context_is_told_in_the_words_of_each_api(shared: Serving) -> None:
    """By which its clients know that they must compact."""
    bodies = {api.path: api.body(LONG) for api in APIS.values()} | OF_VECTORS
    own = {"/v1/messages": ANTHROPIC, "/completion": LLAMA_SERVER}
    for path, body in bodies.items():
        words, fields = OLLAMA if path.startswith("/api/") else own.get(path, OPENAI)
        # A stream of Responses fails with the same code: tests/server/dialects/test_http_responses.py.
        for stream in (False, True) if path != "/v1/responses" else (False,):
            error = shared.refused(path, {**body, "stream": stream})
            message = error if isinstance(error, str) else error["message"]
            assert re.search(words, message), (path, message)
            assert "shorten it" in message, path
            assert fields.items() <= (error if fields else {}).items(), path


def user(*content: Any) -> list[Any]:
    return [{"role": "user", "content": content[0] if len(content) == 1 else list(content)}]


def texts(kind: str, *each: str) -> list[dict[str, Any]]:
    return [{"type": kind, "text": text} for text in each]


HISTORY = [{"role": "system", "content": "then on"}, *user("he ran"), {"role": "assistant", "content": "on"}]
HISTORY += user("and on")
BLOCKS = [
    *user(*texts("text", "he ", "ran")),
    {"role": "assistant", "content": texts("text", "on")},
    {"role": "user", "content": [{**texts("text", "and on")[0], "cache_control": {"type": "ephemeral"}}]},
]
ITEMS = [
    *user(*texts("input_text", "he ", "ran")),
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": texts("output_text", "on"),
    },
    {"type": "message", "role": "user", "content": "and on"},
]
BILLED = texts("text", "x-anthropic-billing-header: cc_version=1; cch=5", "then ", "on")
WRITTEN: list[tuple[str, dict[str, Any], list[Any]]] = [  # in an API, and as messages of the engine
    ("chat", {"messages": [{"role": "developer", "content": texts("text", "then ", "on")}, *HISTORY[1:]]}, HISTORY),
    ("messages", {"system": "then on", "messages": BLOCKS}, HISTORY),
    ("messages", {"system": BILLED, "messages": BLOCKS}, HISTORY),
    ("responses", {"instructions": "then on", "input": ITEMS}, HISTORY),
    ("ollama", {"messages": HISTORY}, HISTORY),
    ("generate", {"system": "then on", "prompt": "he ran", "raw": False}, HISTORY[:2]),
    ("generate", {"prompt": "he ran", "raw": False}, HISTORY[1:2]),
]


@in_turn("name fields messages", WRITTEN)
def test_a_conversation_is_the_engines_however_it_is_written(
    server: Serving, name: str, fields: dict[str, Any], messages: list[Any]
) -> None:
    api = APIS[name]
    expected = alone(server.engine, messages, max_tokens=12, **GREEDY).text
    response = server.post(api.path, api.body(QUESTION, **GREEDY) | fields)
    assert api.whole(response.json()).text == expected


# Values that all APIs read by one function are in tests/server/reading/test_parameters.py.
THRESHOLD = "context_management[0].compact_threshold"
CLEAR = {"type": "clear_tool_uses_20250919"}


def edits(*each: Any) -> dict[str, Any]:
    return {"context_management": {"edits": list(each)}}


WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chat": [
        ({"return_progress": 5}, "return_progress"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
    ],
    "completions": [
        ({"echo": "yes"}, "echo"),
        ({"suffix": "the end"}, "suffix"),
    ],
    "messages": [
        ({"messages": []}, "messages must be an array with at least one message, not an empty array"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": user(5)}, "messages[0].content"),
        ({"messages": user({"type": "image", "source": {}}, "a")}, "messages[0].content[0].type"),
        ({"messages": user({"data": "on"}, "a")}, "messages[0].content[0].type"),
        ({"messages": user({"type": "text", "text": 5}, "a")}, "messages[0].content[0].text"),
        ({"system": 5}, "system must be a string or an array of text blocks, not 5"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop_sequences": "on"}, "stop_sequences"),
        ({"stop_sequences": ["on", 5]}, "stop_sequences[1]"),
        ({"tools": [{"name": "look", "input_schema": [1]}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": 5}}, "output_format.schema"),
        ({"output_config": {"effort": 5}}, "output_config.effort"),
        (edits({"type": "clear_tool_uses"}), "context_management.edits[0].type"),
        (edits({**CLEAR, "trigger": {"type": "days", "value": 1}}), "context_management.edits[0].trigger.type"),
        (edits({**CLEAR, "keep": {"type": "tool_uses", "value": -1}}), "context_management.edits[0].keep.value"),
        (edits({**CLEAR, "exclude_tools": [5]}), "context_management.edits[0].exclude_tools[0]"),
        (edits(CLEAR, {"type": "clear_thinking_20251015"}), "context_management.edits[1]"),
        (edits({"type": "compact_20260112", "trigger": 5}), "context_management.edits[0].trigger"),
        ({"compaction": {"type": "shorten"}}, "compaction.type"),
    ],
    "responses": [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role"),
        ({"input": user(5)}, "input[0].content"),
        ({"input": user({"type": "input_image"}, "a")}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "a"}]}, "input[1]"),
        ({"input": [{"id": "msg_1"}, {"role": "user", "content": "a"}]}, "input[0]"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "strict": 5}}}, "text.format.strict"),
        ({"context_management": [{"type": "truncation"}]}, "context_management[0].type"),
        ({"context_management": [{"type": "compaction", "compact_threshold": 0}]}, THRESHOLD),
        ({"input": [{"type": "compaction_trigger"}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "always"}, "truncation"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"parallel_tool_calls": 5}, "parallel_tool_calls"),
    ],
    "ollama": [
        ({"messages": [{"role": "user", "content": "a", "images": ["eA=="]}]}, "messages[0].images"),
        ({"messages": 5}, "messages"),
        ({"messages": None, "prompt": "hi"}, "messages"),
        ({"options": {"num_predict": "many"}}, "options.num_predict"),
        ({"options": {"min_p": 2}}, "options.min_p"),
        ({"options": 5}, "options"),
        ({"format": "xml"}, "format"),
        ({"think": 5}, "think"),
    ],
    "generate": [
        ({"prompt": 5}, "prompt"),
        ({"images": ["eA=="]}, "images"),
        ({"context": [1, 2]}, "context"),
        ({"template": "{{ .Prompt }}"}, "template"),
    ],
    "completion": [
        ({"return_tokens": 1}, "return_tokens"),
        ({"timings_per_token": "yes"}, "timings_per_token"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt.multimodal_data"),
    ],
}


@in_turn("name wrong", [(name, case) for name, cases in WRONG.items() for case in cases])
def test_a_wrong_value_is_an_error_that_names_the_field(server: Serving, name: str, wrong: Any) -> None:
    fields, place = wrong
    response = server.post(APIS[name].path, APIS[name].body(QUESTION) | fields)
    assert response.status_code == 400
    assert has_shape(APIS[name].path, response.json())
    error = response.json()["error"]
    sentence = error if isinstance(error, str) else error["message"]
    assert sentence.startswith(place)
    if "param" in (error if isinstance(error, dict) else {}):
        assert (error["param"], error["type"]) == (place, "invalid_request_error")


# -- reasoning and calls of tools --------------------------------------------------------------------------------------

USAGE = Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=7, prefill_seconds=1, generation_seconds=2)
PIECES = [
    Piece(reasoning="hm, "),
    Piece(reasoning="so"),
    Piece(text="I look "),
    Piece(text="it up."),
    Piece(call=CallStart(0, "call_a", "look")),
    Piece(arguments='{"word": '),
    Piece(arguments='"rain"}'),
    Piece(call=CallStart(1, "call_b", "now"), arguments="{"),
    Piece(arguments="}"),
    Piece(finish_reason="tool_calls", usage=USAGE),
]
CUT_OFF = [*PIECES[:6], Piece(finish_reason="length", usage=USAGE)]
WHOLE = Reply("I look it up.", "hm, so", [["look", {"word": "rain"}], ["now", {}]], "tool_calls", 9, 7, 4)
CUT_CALLS = {"chat": '{"word": ', "messages": {}, "responses": '{"word": '}  # Ollama's clients get whole calls alone


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_reasoning_text_and_calls_are_told_apart(hermes_engine: Engine, name: str) -> None:
    api = CONVERSATIONS[name]
    about = ModelInfo(hermes_engine.model, "hermes", parse_special=True, tells_cached=True, context=8192)
    for pieces, expected in (
        (PIECES, WHOLE),
        (CUT_OFF, replace(WHOLE, calls=[["look", CUT_CALLS[name]]] if name in CUT_CALLS else [], reason="length")),
    ):
        _, writer = api.endpoint.read(api.body(QUESTION, stream=True), about)
        stream = [event for i, piece in enumerate(pieces) for event in writer.events(0, piece, first=i == 0)]
        streamed = api.streamed([event for event in (*stream, *writer.ending([USAGE])) if event is not None])
        _, writer = api.endpoint.read(api.body(QUESTION), about)
        for reply in (streamed, api.whole(json.loads(json.dumps(writer.whole([fold(pieces)]))))):
            if pieces is PIECES:
                reply.calls = [[name, json.loads(a) if isinstance(a, str) else a] for name, a in reply.calls]
            if name == "ollama":  # it says neither that an answer called a tool nor what was cached
                reply = replace(reply, cached_tokens=4, reason=expected.reason)
            assert reply == expected


@pytest.mark.parametrize("name", CALLING)
def test_a_call_that_is_demanded_is_made_and_a_result_finds_the_prefix(hermes: Serving, name: str) -> None:
    """A call may come back as an object, whose text is written anew: its ids are found all the same."""
    api = CALLING[name]
    more = {"tools": TOOLS, "call": "weather", "max_tokens": 200, "temperature": 1}
    for stream in (False, True):
        reply = api.ask(hermes, "How is it?", stream=stream, seed=3, **more)
        ((called, arguments),) = reply.calls
        assert (called, reply.reason, reply.text) == ("weather", "tool_calls", "")
        jsonschema.validate(json.loads(arguments) if isinstance(arguments, str) else arguments, WEATHER)
    history = api.prompt("How is it?")
    for seed in range(3):
        body = hermes.post(api.path, api.body(history, seed=seed, **more)).json()
        before = api.whole(body)
        history = [*history, *api.back(body)]
        after = api.ask(hermes, history, **more | {"max_tokens": 1})
        assert (after.cached_tokens or 0) >= 0.98 * (before.prompt_tokens + before.completion_tokens), seed


def test_reasoning_is_turned_on_and_off(thinking: Serving) -> None:
    """The template of this model opens and closes the reasoning itself where there is to be none."""
    pair = len(thinking.engine.tokenize("<think>\n\n</think>\n\n"))

    def messages(**more: Any) -> int:
        body = {"model": "any", "messages": user(QUESTION), **more}
        return thinking.post("/v1/messages/count_tokens", body).json()["input_tokens"]

    assert messages(thinking={"type": "disabled"}) - messages(thinking={"type": "enabled", "budget_tokens": 5}) == pair
    assert messages(thinking={"type": "adaptive"}) == messages()

    def responses(effort: str) -> int:
        body = {"input": QUESTION, "reasoning": {"effort": effort}}
        return thinking.post("/v1/responses/input_tokens", body).json()["input_tokens"]

    assert responses("none") - responses("low") == pair

    def chat(think: Any) -> int:
        body = {"messages": user(QUESTION), "think": think, "stream": False, "options": {"num_predict": 1}}
        return thinking.post("/api/chat", body).json()["prompt_eval_count"]

    assert chat(False) - chat(True) == pair
    assert chat("high") == chat("max") == chat(True)
    assert chat("none") == chat(False)

    def completions(**more: Any) -> int:
        body = {"messages": user(QUESTION), **more}
        return thinking.post("/v1/chat/completions/input_tokens", body).json()["input_tokens"]

    reasons = completions(reasoning_effort="high")
    assert completions(reasoning_effort="none") - reasons == pair
    assert completions(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == reasons
