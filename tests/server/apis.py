"""Every API that generates, in one table: how a request is written in it, and how its answers are read.

Tests of what all APIs promise ask through `API.ask` and compare replies; what one API alone has is tested by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jiter
import pytest

from polarlm.engine import Completion, Engine, SamplingParams
from polarlm.server.http.dialects import anthropic, llama_server, ollama, responses
from polarlm.server.http.openai.chat import ChatCompletions
from polarlm.server.http.openai.completions import Completions
from tests.server.http_server import Serving
from tests.tiny import forget

Body = dict[str, Any]
SLIP: Body = {"temprature": 0}  # of the pen: the answer is the same, and tells of it
TOLD = ["temprature is unknown and ignored: did you mean temperature?"]


@dataclass
class Reply:
    """An answer, whole or put together from a stream, in words of no API."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[Any]] = field(default_factory=list)  # name and arguments
    reason: str | None = None  # stop, length or tool_calls
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None  # None: not told
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class API:
    """One endpoint. `write` takes messages (or a raw prompt), a limit of tokens, and further fields by our names."""

    path: str
    endpoint: Any
    write: Callable[..., Body]
    whole: Callable[[Any], Reply]
    streamed: Callable[[list[Any]], Reply]
    back: Callable[[Body], list[Any]] = lambda body: []  # an answer sent back, with results of its calls
    is_raw: bool = False  # whether it takes a raw prompt
    has_logprobs: bool = True
    calls_tools: bool = False  # whether a request may demand a call

    def prompt(self, question: str) -> Any:
        return question if self.is_raw else [{"role": "user", "content": question}]

    def body(self, question: Any, *, stream: bool = False, max_tokens: int = 12, **more: Any) -> Body:
        prompt = self.prompt(question) if isinstance(question, str) else question
        return self.write(prompt, max_tokens, more) | {"stream": stream}

    def ask(self, server: Serving, question: Any, *, stream: bool = False, **more: Any) -> Reply:
        """The answer of a server. more: max_tokens, temperature, stop, seed, ignore_eos, logprobs, schema, tools."""
        response = server.post(self.path, self.body(question, stream=stream, **more))
        assert response.status_code == 200, response.text
        return self.streamed(events(response.text)) if stream else self.whole(response.json())


def events(text: str) -> list[Any]:
    """The objects of a stream, in either framing. Where one has a name, it is its type."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line and not line.startswith(("event:", ":"))]
    parts = [json.loads(line) for line in lines if line != "[DONE]"]
    names = re.findall(r"(?m)^event: (.*)\ndata: ", text)
    assert names in ([], [part.get("type") for part in parts])
    return parts


def alone(engine: Engine, prompt: Any, **params: Any) -> Completion:
    """What the engine answers by itself, without anything in its cache before or after."""
    forget(engine)
    answer = engine.generate(prompt, SamplingParams(**params))
    forget(engine)
    return answer


def breaking(engine: Engine, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """After so many steps, every step fails."""
    step, done = engine._model.step, 0

    def failing(*arguments: Any) -> Any:
        nonlocal done
        done += 1
        if done > steps:
            raise RuntimeError("a secret of the engine's")
        return step(*arguments)

    monkeypatch.setattr(engine._model, "step", failing)


def submitted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the engine is asked from now on: each request's prompt and options, and the arguments that have names."""
    made, submit = list[dict[str, Any]](), engine.submit

    def noted(prompt: Any, params: Any, options: Any, **how: Any) -> Any:
        made.append({"prompt": prompt, "options": options, **how})
        return submit(prompt, params, options, **how)

    monkeypatch.setattr(engine, "submit", noted)
    return made


def renamed(more: Mapping[str, Any], names: Mapping[str, str]) -> Body:
    return {names.get(name, name): value for name, value in more.items()}


def joined(replies: list[Reply]) -> Reply:
    """The reply whose pieces are given; a call without a name continues the last one."""
    reply = Reply()
    for piece in replies:
        reply.text += piece.text
        reply.reasoning += piece.reasoning
        for name, arguments in piece.calls:
            if name:
                reply.calls.append([name, arguments])
            else:
                reply.calls[-1][1] += arguments
        reply.logprobs += piece.logprobs
        reply.reason = piece.reason or reply.reason
        if piece.prompt_tokens:
            reply.prompt_tokens, reply.completion_tokens = piece.prompt_tokens, piece.completion_tokens
            reply.cached_tokens = piece.cached_tokens
    return reply


def json_schema(schema: Any) -> Body:
    return {"type": "json_schema", "schema": schema}


# -- OpenAI's older endpoints ------------------------------------------------------------------------------------------


def write_chat(messages: Any, limit: int, more: Body) -> Body:
    body = {"messages": messages, "max_tokens": limit, "stream_options": {"include_usage": True}, **more}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": more["logprobs"]}
    if schema := body.pop("schema", None):
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    if name := body.pop("call", None):
        body["tool_choice"] = {"type": "function", "function": {"name": name}}
    if "tools" in body:
        body["tools"] = [{"type": "function", "function": tool} for tool in more["tools"]]
    return body


def write_raw(prompt: Any, limit: int, more: Body) -> Body:
    return {"prompt": prompt, "max_tokens": limit, "stream_options": {"include_usage": True}, **more}


def usage_of_openai(usage: Body | None) -> Reply:
    if not usage:
        return Reply()
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens")
    return Reply(
        prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"], cached_tokens=cached
    )


def chat_piece(body: Body) -> Reply:
    reply = usage_of_openai(body.get("usage"))
    for choice in body["choices"]:
        message = choice.get("message") or choice.get("delta") or {}
        reply.text = choice.get("text") or message.get("content") or ""
        reply.reasoning = message.get("reasoning_content", "")
        functions = [call["function"] for call in message.get("tool_calls", ())]
        reply.calls = [[function.get("name", ""), function["arguments"]] for function in functions]
        reply.reason = choice["finish_reason"]
        told = choice["logprobs"] or {}
        reply.logprobs = [token["logprob"] for token in told.get("content", ())] or told.get("token_logprobs", [])
    return reply


def chat_pieces(parts: list[Any]) -> Reply:
    return joined([chat_piece(part) for part in parts])


def chat_chunks(parts: list[Any]) -> Reply:
    """Of one answer to a conversation."""
    choices = [choice for part in parts for choice in part["choices"]]
    assert len({part["id"] for part in parts}) == 1
    assert choices[0]["delta"]["role"] == "assistant"
    assert not any(choice["finish_reason"] for choice in choices[:-1])
    assert not any(part.get("usage") for part in parts if part["choices"])
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    begun = -1
    for call in calls:
        begun += "id" in call
        assert (call["index"], call.get("type")) == (begun, "function" if "id" in call else None)
    return chat_pieces(parts)


def back_to_chat(body: Body) -> list[Any]:
    message = body["choices"][0]["message"]
    calls = message.get("tool_calls", ())
    return [message, *({"role": "tool", "tool_call_id": call["id"], "content": "so"} for call in calls)]


# -- Anthropic's Messages ----------------------------------------------------------------------------------------------

_ENDS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def write_messages(messages: Any, limit: int, more: Body) -> Body:
    body = {"messages": messages, "max_tokens": limit, **renamed(more, {"stop": "stop_sequences"})}
    if schema := body.pop("schema", None):
        body["output_config"] = {"format": json_schema(schema)}
    if name := body.pop("call", None):
        body["tool_choice"] = {"type": "tool", "name": name}
    if "tools" in body:
        body["tools"] = [renamed(tool, {"parameters": "input_schema"}) for tool in more["tools"]]
    return body


def message(body: Body) -> Reply:
    blocks, usage = body["content"], body["usage"]
    return Reply(
        text="".join(block["text"] for block in blocks if block["type"] == "text"),
        reasoning="".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        calls=[[block["name"], block["input"]] for block in blocks if block["type"] == "tool_use"],
        reason=_ENDS[body["stop_reason"]],
        prompt_tokens=usage["input_tokens"] + usage["cache_read_input_tokens"],
        completion_tokens=usage["output_tokens"],
        cached_tokens=usage["cache_read_input_tokens"],
    )


def message_events(parts: list[Any]) -> Reply:
    """Arguments that are not complete are read by the function by which Anthropic's own client reads them."""
    blocks: list[Body] = []
    end: Body = {}
    for event in parts:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta["type"]]
            blocks[-1][name] += delta["partial_json" if name == "json" else name]
        elif event["type"] == "message_delta":
            end = event["delta"] | {"usage": event["usage"]}
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = jiter.from_json(written.encode(), partial_mode=True)
    order = [event["type"] for event in parts if event["type"].startswith("content_block_st")]
    assert order == ["content_block_start", "content_block_stop"] * len(blocks)
    return message({"content": blocks, **end})


def back_to_messages(body: Body) -> list[Any]:
    ids = [block["id"] for block in body["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": id, "content": "so"} for id in ids]
    answer = {"role": "assistant", "content": body["content"]}
    return [answer, {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]}]


# -- OpenAI's Responses ------------------------------------------------------------------------------------------------


def write_responses(messages: Any, limit: int, more: Body) -> Body:
    body = {"input": messages, "max_output_tokens": limit, **renamed(more, {"logprobs": "top_logprobs"})}
    if "logprobs" in more:
        body["include"] = ["message.output_text.logprobs"]
    if schema := body.pop("schema", None):
        body["text"] = {"format": {**json_schema(schema), "name": "a"}}
    if name := body.pop("call", None):
        body["tool_choice"] = {"type": "function", "name": name}
    if "tools" in body:
        body["tools"] = [{"type": "function", **tool} for tool in more["tools"]]
    return body


def response(body: Body) -> Reply:
    usage, output = body["usage"], body["output"]
    reply = Reply(
        calls=[[item["name"], item.get("arguments") or item.get("input")] for item in output if "call_id" in item],
        reason="length" if body["status"] == "incomplete" else "stop",
        prompt_tokens=usage["input_tokens"],
        completion_tokens=usage["output_tokens"],
        cached_tokens=usage["input_tokens_details"]["cached_tokens"],
    )
    for part in (part for item in output for part in item.get("content", ())):
        if part["type"] == "output_text":
            reply.text += part["text"]
            reply.logprobs += [token["logprob"] for token in part["logprobs"]]
        else:
            reply.reasoning += part["text"]
    reply.reason = "tool_calls" if reply.calls and reply.reason == "stop" else reply.reason
    return reply


def response_events(parts: list[Any]) -> Reply:
    assert [event["sequence_number"] for event in parts] == [*range(len(parts))]
    deltas = [event["delta"] for event in parts if event["type"] == "response.output_text.delta"]
    reply = response(parts[-1]["response"])
    assert "".join(deltas) == reply.text
    return reply


def back_to_responses(body: Body) -> list[Any]:
    ids = [item["call_id"] for item in body["output"] if item["type"] == "function_call"]
    return [*body["output"], *({"type": "function_call_output", "call_id": id, "output": "so"} for id in ids)]


# -- Ollama ------------------------------------------------------------------------------------------------------------


def write_ollama(messages: Any, limit: int, more: Body) -> Body:
    beside = {"schema": "format", "tools": "tools", "think": "think"}
    options = {name: value for name, value in more.items() if name not in (*beside, "logprobs")}
    body: Body = {beside[name]: value for name, value in more.items() if name in beside}
    body |= {"messages": messages, "options": {"num_predict": limit, **options}}
    if "logprobs" in more:
        body |= {"logprobs": True, "top_logprobs": more["logprobs"]}
    if "tools" in body:
        body["tools"] = [{"type": "function", "function": tool} for tool in more["tools"]]
    return body


def write_generate(prompt: str, limit: int, more: Body) -> Body:
    body = write_ollama([], limit, more)
    del body["messages"]
    return body | {"prompt": prompt, "raw": True}


def line(body: Body) -> Reply:
    content = body.get("message", body)
    calls = [call["function"] for call in content.get("tool_calls", ())]
    return Reply(
        text=content.get("content", "") + content.get("response", ""),
        reasoning=content.get("thinking", ""),
        calls=[[call["name"], call["arguments"]] for call in calls],
        reason=body.get("done_reason"),
        prompt_tokens=body.get("prompt_eval_count", 0),
        completion_tokens=body.get("eval_count", 0),
        logprobs=[token["logprob"] for token in body.get("logprobs", ())],
    )


def lines(parts: list[Any]) -> Reply:
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    return joined([line(part) for part in parts])


def back_to_ollama(body: Body) -> list[Any]:
    results = [{"role": "tool", "content": "so"} for _ in body["message"].get("tool_calls", ())]
    return [body["message"], *results]


# -- llama-server ------------------------------------------------------------------------------------------------------


def write_completion(prompt: str, limit: int, more: Body) -> Body:
    names = {"schema": "json_schema", "logprobs": "n_probs"}
    return {"prompt": prompt, "n_predict": limit, **renamed(more, names)}


def completion(body: Body) -> Reply:
    ends = {"limit": "length", "word": "stop", "eos": "stop"}
    return Reply(
        text=body["content"],
        reason=ends[body["stop_type"]] if body["stop"] else None,
        prompt_tokens=body.get("tokens_evaluated", 0),
        completion_tokens=body["tokens_predicted"],
        cached_tokens=body.get("tokens_cached"),
        logprobs=[token["logprob"] for token in body.get("completion_probabilities", ())],
    )


def completion_events(parts: list[Any]) -> Reply:
    return joined([completion(part) for part in parts])


APIS = {
    "chat": API(
        "/v1/chat/completions", ChatCompletions(), write_chat, chat_piece, chat_chunks, back_to_chat, calls_tools=True
    ),
    "messages": API(
        "/v1/messages",
        anthropic.Messages(),
        write_messages,
        message,
        message_events,
        back_to_messages,
        has_logprobs=False,
        calls_tools=True,
    ),
    "responses": API(
        "/v1/responses",
        responses.Responses(),
        write_responses,
        response,
        response_events,
        back_to_responses,
        calls_tools=True,
    ),
    "ollama": API("/api/chat", ollama.CHAT, write_ollama, line, lines, back_to_ollama),
    "generate": API("/api/generate", ollama.GENERATE, write_generate, line, lines, is_raw=True),
    "completions": API("/v1/completions", Completions(), write_raw, chat_piece, chat_pieces, is_raw=True),
    "completion": API(
        "/completion", llama_server.CompletionEndpoint(), write_completion, completion, completion_events, is_raw=True
    ),
}
CONVERSATIONS = {name: api for name, api in APIS.items() if not api.is_raw}
CALLING = {name: api for name, api in APIS.items() if api.calls_tools}
