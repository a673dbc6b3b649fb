"""Tools, reasoning and schemas on the page."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.page.browser import Browser
from tests.server.page.visitor import (
    answer,
    asked,
    choose,
    done,
    go_on,
    press_button,
    roles,
    says,
    send,
    send_and_wait,
    size,
    text_of,
)

TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def call(index: int, name: str, *arguments: str) -> list[dict[str, Any]]:
    """The deltas of a call."""
    first = {"index": index, "id": f"call-{index}", "function": {"name": name, "arguments": ""}}
    more = [{"index": index, "function": {"arguments": piece}} for piece in arguments]
    return [{"tool_calls": [delta]} for delta in (first, *more)]


# -- tools -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_call_is_folded_and_goes_on_with_a_result(page: Browser) -> None:
    says(page, call(0, "get_weather", '{"city"', ':"Oslo"}'), ["It ", "rains."])
    choose(page, tools=json.dumps([TOOL]))
    send_and_wait(page, "weather?")
    assert asked(page)["tools"] == [{"type": "function", "function": TOOL}]
    assert page.text(".call summary") == "Called get_weather"
    assert not page.run("return document.querySelector('.call').open")
    page.click(".call summary")
    assert json.loads(page.text(".call pre")) == {"city": "Oslo"}
    assert page.text("#status") == "It waits for results."
    page.type(".results textarea", "12 degrees, rain")
    page.click(".results .main")
    page.until(lambda: text_of(page) == "It rains." and done(page))
    assert roles(page) == ["user", "assistant", "tool", "assistant"]
    function = {"name": "get_weather", "arguments": '{"city":"Oslo"}'}
    assert asked(page)["messages"][1:] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call-0", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call-0", "content": "12 degrees, rain"},
    ]
    assert page.text(".tool summary") == "Result of get_weather"
    assert page.text(".tool pre") == "12 degrees, rain"
    assert not page.shown(".results")
    assert page.run("return document.activeElement.id") == "message"


@pytest.mark.slow
def test_several_calls_have_a_field_each_and_results_can_be_edited(page: Browser) -> None:
    says(page, ["I look.", *call(0, "one", "{}"), *call(1, "two", "{}")], ["first"], ["second"])
    send_and_wait(page, "go")
    assert answer(page) == "I look."
    assert page.run("return document.querySelectorAll('.results textarea').length") == 2
    page.click(".results .main")
    page.until(lambda: text_of(page) == "first" and done(page))
    assert [message["content"] for message in asked(page)["messages"][2:]] == ["", ""]
    press_button(page, "Edit", 2)
    page.type(".tool .results textarea", "7")
    page.click(".tool .results .main")
    page.until(lambda: text_of(page) == "second" and done(page))
    assert [message["content"] for message in asked(page)["messages"][2:]] == ["7", ""]
    assert page.text(".tool .arrows span") == "2/2"
    page.reload()
    page.until(lambda: text_of(page) == "second")
    folds = page.run("return [...document.querySelectorAll('.fold summary')].map((made) => made.textContent)")
    assert folds == ["Called one", "Called two", "Result of one", "Result of two"]


@pytest.mark.slow
def test_a_call_under_way_says_so(page: Browser) -> None:
    says(page, [*call(0, "look", '{"a": ['), {"wait": 60000}])
    send(page, "go")
    page.until(lambda: page.text(".call summary") == "Calling look …")
    assert not page.shown(".results")
    page.click("#stop")
    page.until(lambda: done(page))
    assert page.text(".call summary") == "Called look"


@pytest.mark.slow
@pytest.mark.parametrize(("text", "wrong"), [("[{", "not JSON"), ("{}", "a JSON array")])
def test_tools_that_are_none_are_not_sent(page: Browser, text: str, wrong: str) -> None:
    choose(page, tools=text)
    assert wrong in page.text("#tools-wrong")
    says(page, ["one"])
    send(page, "go")
    assert page.run("return [asked.length, message.value, document.activeElement.id]") == [0, "go", "tools"]


@pytest.mark.slow
def test_the_servers_complaint_is_shown_at_the_field(page: Browser) -> None:
    """By the real server."""
    choose(page, tools='[{"name": "no name!"}]')
    send(page, "go")
    page.until(lambda: page.text(".message .notice") and done(page))
    assert "tools" in page.text("#tools-wrong")
    assert page.run("return tools.getAttribute('aria-invalid')") == "true"
    page.type("#tools", " ")
    assert page.text("#tools-wrong") == ""


# -- schemas ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_answer_is_of_the_schema(page: Browser) -> None:
    """By the real server."""
    choose(page, schema='{"type": "boolean"}', max_tokens=60)
    send_and_wait(page, "true?")
    assert json.loads(text_of(page)) in (True, False)


@pytest.mark.slow
def test_a_schema_that_nothing_fulfils_is_said_at_the_field_on_a_small_screen_too(page: Browser) -> None:
    """By the real server."""
    choose(page, schema='{"type": "nothing"}')
    size(page, 390, 844)
    send(page, "go")
    page.until(lambda: page.text(".message .notice") and done(page))
    assert page.text("#schema-wrong") == page.text(".message .notice") != ""


@pytest.mark.slow
def test_a_schema_is_an_object(page: Browser) -> None:
    choose(page, schema="[]")
    assert "a JSON object" in page.text("#schema-wrong")


# -- reasoning -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reasoning_is_folded_with_its_time(page: Browser) -> None:
    thought = [{"reasoning_content": "Let me "}, {"reasoning_content": "think."}, {"wait": 300}, {"held": True}]
    says(page, [*thought, "Yes", {"wait": 300}, "."], ["No."])
    send(page, "sure?")
    page.until(lambda: page.text(".thinking summary").startswith("Thinking …"))
    go_on(page)
    page.until(lambda: done(page))
    seconds = float(page.text(".thinking summary").removeprefix("Thought for ").removesuffix(" s"))
    assert seconds >= 0.3
    assert not page.run("return document.querySelector('.thinking').open")
    assert (page.text(".thoughts"), answer(page)) == ("Let me think.", "Yes.")
    send_and_wait(page, "really?")
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me think."}
    assert asked(page)["messages"][1] == message
    page.reload()
    page.until(lambda: page.text(".thoughts") == "Let me think.")
    assert page.text(".thinking summary") == f"Thought for {seconds} s"


@pytest.mark.slow
def test_an_answer_that_was_stopped_while_it_thought_begins_anew(page: Browser) -> None:
    says(page, [{"reasoning_content": "Let me "}, {"wait": 60000}], ["Yes."])
    send(page, "sure?")
    page.until(lambda: page.text(".thoughts"))
    page.click("#stop")
    page.until(lambda: done(page))
    press_button(page, "Retry")
    page.until(lambda: text_of(page) == "Yes." and done(page))
    assert not page.shown(".thinking")
    assert [message["role"] for message in asked(page)["messages"]] == ["user"]
