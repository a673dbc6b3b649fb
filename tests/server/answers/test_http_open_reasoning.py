"""Constrained answers where the template opens reasoning at the end of a prompt: the constraint begins behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.params import OPTIONS
from polarlm.server.running.listening import tcp_socket
from tests.server.answers.test_http_channels import force
from tests.server.apis import APIS
from tests.server.http_server import Serving, serving
from tests.server.lines import Client
from tests.tool_model import tool_engine

OPENS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\nOPEN\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\\nCLOSE\\n\\n' }}{% endif %}{% endif %}"
)
TAGS = {"text": ("<think>", "</think>"), "control tokens": ("<|channel>thought", "<channel|>")}
ASKED: Any = [{"role": "user", "content": "How many?"}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
OFF: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module", params=TAGS)
def close(request: pytest.FixtureRequest) -> str:
    return TAGS[request.param][1]


@pytest.fixture(scope="module")
def engine(close: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    open_tag = next(opening for opening, closing in TAGS.values() if closing == close)
    template = OPENS.replace("OPEN", open_tag).replace("CLOSE", close) + "{# <|turn> #}"
    with tool_engine(tmp_path_factory.mktemp("model"), template) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Serving]:
    with tcp_socket("127.0.0.1", 0) as lines, serving(engine, lines=lines) as server:
        yield server


@pytest.fixture(scope="module")
def bias(engine: Engine, close: str) -> dict[int, float]:
    """Makes the model write a few letters, and close its reasoning."""
    (closing,) = engine.tokenize(close, control=True)
    return {closing: 99.5, engine.tokenize("th")[0]: 100.0}


@pytest.fixture(scope="module")
def body(bias: dict[int, float]) -> dict[str, Any]:
    return {
        "messages": ASKED,
        "temperature": 1,
        "seed": 3,
        "max_tokens": 400,
        "logit_bias": {str(token): value for token, value in bias.items()},
    }


def is_answer(text: str) -> bool:
    return bool(json.loads(text) in ({"n": 1}, {"n": 2}))


CONSTRAINTS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": FORM}, is_answer),
    ({"guided_regex": "[0-9]{2}"}, lambda text: text.isdigit() and len(text) == 2),
    ({"grammar": 'root ::= "a" | "b"'}, lambda text: text in ("a", "b")),
    ({"grammar": '%llguidance {}\nstart: x\nx: "a" | "b"'}, lambda text: text in ("a", "b")),
]


@pytest.mark.parametrize(("constraint", "is_right"), CONSTRAINTS)
def test_the_answer_follows_the_reasoning(
    server: Serving, body: dict[str, Any], constraint: Any, is_right: Any
) -> None:
    choice = server.chat(**body, **constraint)
    assert set(choice["message"]["reasoning_content"]) == {"t", "h"}
    assert is_right(choice["message"]["content"]), choice
    assert choice["finish_reason"] == "stop"
    choice = server.chat(**body, **constraint, **OFF)
    assert "reasoning_content" not in choice["message"]
    assert is_right(choice["message"]["content"]), choice


def test_reasoning_without_an_end_takes_all_tokens(server: Serving, engine: Engine, body: dict[str, Any]) -> None:
    bias = {str(engine.tokenize("th")[0]): 100}
    choice = server.chat(**body | {"response_format": FORM, "logit_bias": bias, "max_tokens": 9})
    assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == ("th" * 9, "length")
    assert not choice["message"]["content"]


def test_calls_follow_the_reasoning(server: Serving, body: dict[str, Any]) -> None:
    function = {"name": "count", "parameters": SCHEMA}
    more = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    choice = server.chat(**body, **more, parallel_tool_calls=False)
    assert set(choice["message"]["reasoning_content"]) == {"t", "h"}
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["count"]


def test_a_raw_prompt_is_constrained_from_its_first_token(server: Serving, close: str, body: dict[str, Any]) -> None:
    prompt = server.post("/apply-template", {"messages": ASKED}).json()["prompt"]
    said = server.post("/completion", {**body, "messages": None, "prompt": prompt, "json_schema": SCHEMA}).json()
    assert is_answer(said["content"])


def test_the_text_of_an_engine_has_the_reasoning_and_its_tag(
    engine: Engine, close: str, bias: dict[int, float]
) -> None:
    params = SamplingParams(schema=SCHEMA, temperature=1, seed=3, logit_bias=bias)
    reasoning, tag, text = engine.chat(ASKED, params).text.partition(close)
    assert set(reasoning.strip()) == {"t", "h"}
    assert tag
    assert is_answer(text)
    assert is_answer(engine.chat(ASKED, params, PromptOptions(template_variables={"enable_thinking": False})).text)


BUDGETS: dict[str, Any] = {  # an endpoint → how its requests name a budget of seven tokens
    "/v1/chat/completions": {"reasoning_budget_tokens": 7},
    "/v1/messages": {"thinking": {"type": "enabled", "budget_tokens": 7}},
    "/v1/responses": {"reasoning": {"max_tokens": 7}},
    "/api/chat": {"options": {"reasoning_budget_tokens": 7}},
}


def test_every_api_has_a_budget_of_reasoning(server: Serving, engine: Engine) -> None:
    """A greedy model that does not end its reasoning: every answer has the same reasoning, and a text after it."""
    found, counts = set(), list[int]()
    for api in APIS.values():
        if api.path in BUDGETS:
            body = api.body("How many?", max_tokens=40, temperature=0, ignore_eos=True)
            more = {name: {**body.get(name, {}), **value} if isinstance(value, dict) else value
                    for name, value in BUDGETS[api.path].items()}  # fmt: skip
            answer = server.post(api.path, body | more).json()
            reply = api.whole(answer)
            assert reply.text
            found.add(reply.reasoning)
            for details in ("completion_tokens_details", "output_tokens_details"):
                if details in answer.get("usage", ()):
                    counts.append(answer["usage"][details]["reasoning_tokens"])
    (reasoning,) = found
    assert set(counts) <= {7, 8}  # OpenAI's two count them, maybe with the line end before the tag
    assert len(counts) == 2
    settings = {"temperature": 0, "ignore_eos": True, "max_tokens": 7}
    assert reasoning == engine.generate(ASKED, SamplingParams(**settings)).text.strip()


def test_a_server_has_a_budget_for_requests_that_name_none(engine: Engine) -> None:
    body = {"messages": ASKED, "temperature": 0, "ignore_eos": True, "max_tokens": 40}
    with serving(engine, reasoning_budget=7) as limited, serving(engine) as free:
        given = free.chat(**body, reasoning_budget_tokens=7)["message"]
        assert limited.chat(**body)["message"] == given
        assert limited.chat(**body, reasoning_budget_tokens=3)["message"] != given


GOES = "so it goes on"
STOPPED: dict[str, tuple[str, str]] = {  # how an answer with a stop string in its reasoning ends, with messages and raw
    "by default": ("so it goes ", "go "),
    "min_tokens": (f"{GOES} and ", f"{GOES} and "),
    "stop_anywhere": ("go ", "go "),
}


@pytest.mark.parametrize("way", STOPPED)
def test_a_stop_string_is_one_of_the_text_in_every_api(
    server: Serving, engine: Engine, close: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    written = f"go on{close}\n\n{GOES} and on!"
    constraint = force(monkeypatch, engine, written)
    to_first = len(engine.tokenize(written[: written.index(" and")], control=True))
    settings: Any = {"min_tokens": to_first + 1} if way == "min_tokens" else {way: True} if way in OPTIONS else {}
    ends = [written[: written.index(end) + len(end)] for end in STOPPED[way]]
    (tokens, shown), raw = [
        (len(engine.tokenize(f"{end}on", control=True)), engine.detokenize(engine.tokenize(end, control=True)))
        for end in ends
    ]
    reasoning, _, text = ends[0].partition(close)
    for name, api in APIS.items():
        for stream in (False, True):
            reply = api.ask(server, "How many?", max_tokens=60, stop=["on"], stream=stream, **settings)
            assert reply.reason == "stop", name
            if api.is_raw:
                assert (reply.completion_tokens, reply.text) == raw, name
            else:
                assert (reply.completion_tokens, reply.text) == (tokens, text.lstrip()), name
                assert reply.reasoning in ("", reasoning.strip()), name  # which some APIs leave out
    asked: Any = {"messages": ASKED, "max_tokens": 60, "stop": ["on"], **settings}
    with Client(server.address) as client:
        assert client.ask(id=1, **asked)[0] == shown
    params = SamplingParams(max_tokens=60, stop=("on",), **settings)
    answer = engine.chat(ASKED, params, constraint=constraint())
    assert (len(answer.token_ids), answer.text, answer.finish_reason) == (tokens, shown, "stop")
