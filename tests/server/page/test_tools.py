"""Tools, reasoning and schemas on the page."""

from __future__ import annotations

import json

import pytest

from tests.server.page.visitor import Page, call

pytestmark = pytest.mark.slow

TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


# -- tools -----------------------------------------------------------------------------------------------------


def test_a_call_is_folded_and_goes_on_with_a_result(page: Page) -> None:
    page.says(call(0, "get_weather", '{"city"', ':"Oslo"}'), ["It ", "rains."])
    page.choose(tools=json.dumps([TOOL]))
    page.send_and_wait("weather?")
    assert page.request_body()["tools"] == [{"type": "function", "function": TOOL}]
    assert page.text(".call summary") == "Called get_weather"
    assert not page.run("return document.querySelector('.call').open")
    page.click(".call summary")
    assert json.loads(page.text(".call pre")) == {"city": "Oslo"}
    assert page.text("#status") == "It waits for results."
    page.type(".results textarea", "12 degrees, rain")
    page.click(".results .main")
    page.until(lambda: page.text_of() == "It rains." and page.done())
    assert page.roles() == ["user", "assistant", "tool", "assistant"]
    function = {"name": "get_weather", "arguments": '{"city":"Oslo"}'}
    assert page.request_body()["messages"][1:] == [
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
    assert page.focused() == "message"


def test_several_calls_have_a_field_each_and_results_can_be_edited(page: Page) -> None:
    page.says(["I look.", *call(0, "one", "{}"), *call(1, "two", "{}")], ["first"], ["second"])
    page.send_and_wait("go")
    assert page.answer() == "I look."
    assert page.count(".results textarea") == 2
    page.click(".results .main")
    page.until(lambda: page.text_of() == "first" and page.done())
    assert page.contents()[2:] == ["", ""]
    page.press_button("Edit", 2)
    page.type(".tool .results textarea", "7")
    page.click(".tool .results .main")
    page.until(lambda: page.text_of() == "second" and page.done())
    assert page.contents()[2:] == ["7", ""]
    assert page.text(".tool .arrows span") == "2/2"
    page.reload()
    page.until(lambda: page.text_of() == "second")
    folds = page.run("return [...document.querySelectorAll('.fold summary')].map((made) => made.textContent)")
    assert folds == ["Called one", "Called two", "Result of one", "Result of two"]


def test_a_call_under_way_says_so(page: Page) -> None:
    page.says([*call(0, "look", '{"a": ['), {"wait": 60000}])
    page.send("go")
    page.until(lambda: page.text(".call summary") == "Calling look …")
    assert not page.shown(".results")
    page.click("#stop")
    page.until(page.done)
    assert page.text(".call summary") == "Called look"


@pytest.mark.parametrize(
    ("field", "text", "wrong"),
    [("tools", "[{", "not JSON"), ("tools", "{}", "a JSON array"), ("schema", "[]", "a JSON object")],
)
def test_what_is_no_tools_or_no_schema_is_not_sent(page: Page, field: str, text: str, wrong: str) -> None:
    page.choose(**{field: text})
    assert wrong in page.text(f"#{field}-wrong")
    page.says(["one"])
    page.send("go")
    assert page.run("return [asked.length, message.value, document.activeElement.id]") == [0, "go", field]


@pytest.mark.parametrize(("field", "text"), [("tools", '[{"name": "no name!"}]'), ("schema", '{"type": "nothing"}')])
def test_the_servers_complaint_is_shown_at_the_field(page: Page, field: str, text: str) -> None:
    """The real server's, on a small screen too."""
    page.choose(**{field: text})
    page.size(390, 844)
    page.send("go")
    page.until(lambda: page.text(".message .notice") and page.done())
    assert page.text(f"#{field}-wrong") == page.text(".message .notice") != ""
    assert page.run("return document.getElementById(arguments[0]).ariaInvalid", field) == "true"
    page.size(1280, 800)
    page.type(f"#{field}", " ")
    assert page.text(f"#{field}-wrong") == ""


# -- reasoning -------------------------------------------------------------------------------------------------


def test_reasoning_is_folded_with_its_time(page: Page) -> None:
    thought = [{"reasoning_content": "Let me "}, {"reasoning_content": "think."}, {"wait": 300}, {"held": True}]
    page.says([*thought, "Yes", {"wait": 300}, "."], ["No."])
    page.send("sure?")
    page.until(lambda: page.text(".thinking summary").startswith("Thinking …"))
    page.go_on()
    seconds = float(page.text(".thinking summary").removeprefix("Thought for ").removesuffix(" s"))
    assert seconds >= 0.3
    assert not page.run("return document.querySelector('.thinking').open")
    assert (page.text(".thoughts"), page.answer()) == ("Let me think.", "Yes.")
    page.send_and_wait("really?")
    assert page.request_body()["messages"][1]["reasoning_content"] == "Let me think."
    page.reload()
    page.until(lambda: page.text(".thoughts") == "Let me think.")
    assert page.text(".thinking summary") == f"Thought for {seconds} s"


def test_an_answer_that_was_stopped_while_it_thought_begins_anew(page: Page) -> None:
    page.says([{"reasoning_content": "Let me "}, {"wait": 60000}], ["Yes."])
    page.send("sure?")
    page.until(lambda: page.text(".thoughts"))
    page.click("#stop")
    page.until(page.done)
    page.press_button("Retry")
    page.until(lambda: page.text_of() == "Yes." and page.done())
    assert not page.shown(".thinking")
    assert [message["role"] for message in page.request_body()["messages"]] == ["user"]
