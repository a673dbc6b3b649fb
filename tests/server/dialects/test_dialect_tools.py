"""Calls of tools and reasoning in every dialect, with the makers' own clients and what is built on them.

The model is random: a call is asked for by `tool_choice`, so that a grammar makes it one.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import ollama
import pytest

from polarlm.engine import Engine
from tests.server.answers.test_http_tools import WEATHER
from tests.server.dialects.test_every_api import TOOLS
from tests.server.http_server import Serving

QUESTION = "How is it?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


# -- Ollama ------------------------------------------------------------------------------------------------------------


def test_ollamas_client_gets_calls_of_a_model_that_wants_to(hermes: Serving, hermes_engine: Engine) -> None:
    """There is no way to ask for a call: the marker is made likely."""
    (marker,) = hermes_engine.tokenize("<tool_call>")
    client = ollama.Client(hermes.url, timeout=60)
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    seen = 0
    for seed in range(4):
        options = {"temperature": 1, "seed": seed, "num_predict": 400, "logit_bias": {str(marker): 12}}
        for stream in (False, True):
            answer = client.chat("any", MESSAGES, tools=tools, options=options, stream=stream)  # type: ignore[call-overload]
            parts = list(answer) if stream else [answer]
            calls = [call for part in parts for call in part.message.tool_calls or ()]
            for call in calls:
                assert call.function.name in ("weather", "time")
                if call.function.name == "weather":  # this client leaves the limits of numbers out
                    assert call.function.arguments["city"] in ("Rome", "Oslo", "Bern")
                    assert isinstance(call.function.arguments.get("days", 1), int)
            seen += len(calls)
    assert seen > 2
    turn = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "time", "arguments": {}}}]}
    result = {"role": "tool", "tool_name": "time", "content": "noon"}
    options = {"num_predict": 4, "ignore_eos": True}
    assert client.chat("any", [*MESSAGES, turn, result], tools=tools, options=options).eval_count


# -- LiteLLM and pydantic-ai -------------------------------------------------------------------------------------------


@pytest.mark.slow  # the client takes seconds to import
@pytest.mark.parametrize(("model", "path", "stream"), [("openai/any", "/v1", True), ("anthropic/any", "", False)])
def test_litellm_gets_a_call(
    hermes: Serving, monkeypatch: pytest.MonkeyPatch, model: str, path: str, stream: bool
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it fetches a list of prices when it is imported
    import litellm

    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    choice = {"type": "function", "function": {"name": "weather"}}
    answer: Any = litellm.completion(
        model,
        MESSAGES,
        api_base=hermes.url + path,
        api_key="any",
        tools=tools,
        tool_choice=choice,
        max_tokens=200,
        temperature=1,
        stream=stream,
        timeout=60,
    )
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, answer.choices[0].finish_reason) == ("weather", "tool_calls")
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


@pytest.mark.slow  # the client takes seconds to import
@pytest.mark.parametrize("number", range(3))
def test_pydantic_ai_calls_tools_and_has_structured_output(hermes: Serving, number: int) -> None:
    from pydantic_ai import Agent

    from tests.server.http.test_clients import Weather, pydantic_models

    model = list(pydantic_models(hermes.url))[number]
    agent = Agent(model, output_type=Weather, model_settings={"temperature": 1, "max_tokens": 300})
    assert isinstance(agent.run_sync(QUESTION).output, Weather)


# -- reasoning ---------------------------------------------------------------------------------------------------------


def test_reasoning_is_turned_on_and_off(thinking: Serving) -> None:
    """The template of this model opens and closes the reasoning itself where there is to be none."""
    pair = len(thinking.engine.tokenize("<think>\n\n</think>\n\n"))

    def messages(**more: Any) -> int:
        body = {"model": "any", "messages": MESSAGES, **more}
        return thinking.post("/v1/messages/count_tokens", body).json()["input_tokens"]

    assert messages(thinking={"type": "disabled"}) - messages(thinking={"type": "enabled", "budget_tokens": 5}) == pair
    assert messages(thinking={"type": "adaptive"}) == messages()

    def responses(effort: str) -> int:
        body = {"input": QUESTION, "reasoning": {"effort": effort}}
        return thinking.post("/v1/responses/input_tokens", body).json()["input_tokens"]

    assert responses("none") - responses("low") == pair

    def chat(think: Any) -> int:
        body = {"messages": MESSAGES, "think": think, "stream": False, "options": {"num_predict": 1}}
        return thinking.post("/api/chat", body).json()["prompt_eval_count"]

    assert chat(False) - chat(True) == pair
    assert chat("high") == chat("max") == chat(True)
    assert chat("none") == chat(False)

    def completions(**more: Any) -> int:
        body = {"messages": MESSAGES, **more}
        return thinking.post("/v1/chat/completions/input_tokens", body).json()["input_tokens"]

    reasons = completions(reasoning_effort="high")
    assert completions(reasoning_effort="none") - reasons == pair
    assert completions(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == reasons
