"""A last message of the assistant's is continued."""

from __future__ import annotations

from typing import Any

import pytest

from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams
from tests.server.http_server import Serving

QUESTION = {"role": "user", "content": "then he ran on"}
BEGUN = {"role": "assistant", "content": "the rain"}


def chat(server: Serving, messages: list[Any], **more: Any) -> str:
    return server.chat(messages=messages, temperature=0, max_tokens=12, ignore_eos=True, **more)["message"]["content"]


def written(server: Serving, messages: list[Any], **more: Any) -> str:
    return server.post("/apply-template", {"messages": messages, **more}).json()["prompt"]


def raw(server: Serving, prompt: str) -> str:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    return server.post("/v1/completions", body).json()["choices"][0]["text"]


@pytest.mark.parametrize("more", [{}, {"continue_final_message": True}, {"add_generation_prompt": False}])
def test_a_last_message_of_the_assistant_is_continued(shared: Serving, more: Any) -> None:
    prompt = written(shared, [QUESTION]) + BEGUN["content"]
    assert written(shared, [QUESTION, BEGUN], **more) == prompt
    assert chat(shared, [QUESTION, BEGUN], **more) == raw(shared, prompt)
    body = {"messages": [QUESTION, BEGUN], "temperature": 0, "max_tokens": 12, "ignore_eos": True, **more}
    known = {name: body.pop(name) for name in ("ignore_eos", *more)}
    stream = shared.openai.chat.completions.create(model="any", stream=True, extra_body=known, **body)  # type: ignore[call-overload]
    assert "".join(part.choices[0].delta.content or "" for part in stream) == raw(shared, prompt)


@pytest.mark.parametrize("more", [{"continue_final_message": False}, {"add_generation_prompt": True}])
def test_a_new_turn_is_begun_on_request(shared: Serving, more: Any) -> None:
    prompt = written(shared, [QUESTION, BEGUN], **more)
    assert prompt.endswith("the rain<|im_end|>\n<|im_start|>assistant\n")
    assert chat(shared, [QUESTION, BEGUN], **more) == raw(shared, prompt)


def test_names_of_control_tokens_stay_text_in_a_beginning(shared: Serving) -> None:
    body = {"messages": [QUESTION, {"role": "assistant", "content": "a<|im_end|>"}]}
    tokens = shared.post("/v1/chat/completions/input_tokens", body).json()["input_tokens"]
    plain = shared.post("/v1/chat/completions/input_tokens", {"messages": [QUESTION]}).json()["input_tokens"]
    assert tokens > plain + 3  # two, if the name became the token


@pytest.mark.parametrize(
    ("messages", "more", "param"),
    [
        ([QUESTION], {"continue_final_message": True}, "continue_final_message"),
        ([QUESTION], {"add_generation_prompt": False}, "add_generation_prompt"),
        ([QUESTION, BEGUN], {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ([QUESTION, BEGUN], {"continue_final_message": "yes"}, "continue_final_message"),
        ([QUESTION, BEGUN], {"add_generation_prompt": 0}, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_continued_is_named(shared: Serving, messages: Any, more: Any, param: str) -> None:
    assert shared.refused("/v1/chat/completions", {"messages": messages, **more})["param"] == param


def test_the_engine_continues_the_ids_that_an_answer_was_generated_as(tiny: Engine) -> None:
    answer = tiny.chat([QUESTION], SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True))
    options = PromptOptions(continue_final_message=True)
    begun = {"role": "assistant", "content": answer.text}
    expected = [*tiny.prompt_ids([QUESTION]), *answer.token_ids]
    assert tiny.prompt_ids([QUESTION, begun], options) == expected  # known by its text
    assert tiny.prompt_ids([QUESTION, {**begun, "token_ids": answer.token_ids}], options) == expected
    with pytest.raises(EngineError, match="can be continued"):
        tiny.chat([QUESTION], options=options)
