"""Clients that agents and applications are built with, against a server of the demonstration model.

For calls of tools, the model is random: `tool_choice` asks for one, so that a grammar makes it one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel

from polarlm.engine import Engine
from tests.server.answers.test_http_tools import WEATHER
from tests.server.http_server import Serving, serving

pytestmark = pytest.mark.slow  # the clients take seconds to import

QUESTION = "What is the capital of France?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    city: Literal["Paris", "London"]
    degrees: Literal[10, 20, 30]
    rain: bool


@pytest.fixture(scope="module")
def server(demo: Engine) -> Iterator[Serving]:
    with serving(demo) as running:
        yield running


# -- LiteLLM -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it fetches a list of prices when it is imported
        import litellm

        yield litellm


@pytest.mark.parametrize(("model", "path"), [("openai/any", "/v1"), ("anthropic/any", ""), ("ollama_chat/any", "")])
def test_litellm_answers_and_streams(litellm: Any, server: Serving, model: str, path: str) -> None:
    fields = {"api_base": server.url + path, "api_key": "any", "temperature": 0, "max_tokens": 16, "timeout": 120}
    whole = litellm.completion(model, MESSAGES, **fields)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.prompt_tokens > 0
    assert whole.usage.completion_tokens > 0
    parts = list(litellm.completion(model, MESSAGES, stream=True, **fields))
    assert "Paris" in "".join(part.choices[0].delta.content or "" for part in parts)


def test_litellm_knows_a_prompt_that_is_too_long(litellm: Any, shared: Serving) -> None:
    """By words that tests/server/dialects/test_every_api.py has."""
    messages = [{"role": "user", "content": "the " * 300}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion("openai/any", messages, api_base=f"{shared.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(("model", "path", "stream"), [("openai/any", "/v1", True), ("anthropic/any", "", False)])
def test_litellm_gets_a_call(litellm: Any, hermes: Serving, model: str, path: str, stream: bool) -> None:
    asked = {
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 200,
        "temperature": 1,
        "stream": stream,
    }
    answer = litellm.completion(model, MESSAGES, api_base=hermes.url + path, api_key="any", timeout=60, **asked)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, answer.choices[0].finish_reason) == ("weather", "tool_calls")
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


# -- LangChain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_answers_streams_and_has_structured_output(server: Serving, responses: bool) -> None:
    from langchain_openai import ChatOpenAI

    url = f"{server.url}/v1"
    model = ChatOpenAI(
        model="any", base_url=url, api_key="any", temperature=0, max_tokens=200, use_responses_api=responses
    )  # type: ignore[call-arg,arg-type]
    assert "Paris" in model.invoke(QUESTION).text
    assert "Paris" in "".join(part.text for part in model.stream(QUESTION))
    structured = model.with_structured_output(Weather, method="json_schema")
    assert isinstance(structured.invoke("The weather in Paris?"), Weather)


# -- pydantic-ai -------------------------------------------------------------------------------------------------------


def pydantic_models(url: str) -> Iterator[Any]:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    yield OpenAIChatModel("any", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="any"))
    yield OpenAIResponsesModel("any", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="any"))
    yield AnthropicModel("any", provider=AnthropicProvider(base_url=url, api_key="any"))


@pytest.mark.parametrize("number", range(3))
def test_pydantic_ai_answers(server: Serving, number: int) -> None:
    pytest.importorskip("pydantic_ai", reason="pydantic-ai needs Python 3.11")
    from pydantic_ai import Agent

    model = list(pydantic_models(server.url))[number]
    settings: Any = {"temperature": 0, "max_tokens": 200}
    answer = Agent(model, model_settings=settings).run_sync(QUESTION)
    assert "Paris" in answer.output


@pytest.mark.parametrize("number", range(3))
def test_pydantic_ai_calls_tools_and_has_structured_output(hermes: Serving, number: int) -> None:
    from pydantic_ai import Agent

    model = list(pydantic_models(hermes.url))[number]
    agent = Agent(model, output_type=Weather, model_settings={"temperature": 1, "max_tokens": 300})
    assert isinstance(agent.run_sync(QUESTION).output, Weather)
