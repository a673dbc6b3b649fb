"""Files of conversations and saved prompts: what is exported comes back, and what is here stays."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.page.browser import ENTER
from tests.server.page.visitor import Page, call, usage

pytestmark = pytest.mark.slow


def messages(page: Page) -> list[str]:
    """All messages of the conversation that is shown, without what an import gives them anew."""
    script = "return Object.values(current.messages).map(({id, parent, children, ...rest}) => rest)"
    kept: list[dict[str, Any]] = page.run(script)
    plain = [{name: value for name, value in message.items() if value is not None} for message in kept]
    return sorted(json.dumps(message, sort_keys=True) for message in plain)


def test_conversations_go_to_a_file_and_come_back(page: Page) -> None:
    cached = {"cached_tokens": 7, "cached_from": {"store": 4, "disk": 3}}
    one = [{"reasoning_content": "hm"}, "one", usage(9, 1, prompt_tokens_details=cached)]
    page.says(one, call(0, "look", "{}"))
    page.send_and_wait("first")
    page.press_button("Edit", 0)
    page.type(".edit textarea", "2" + ENTER)
    page.until(lambda: page.run("return rows[0].message.text") == "first2" and page.done())
    before = messages(page)
    file = page.export()
    assert file["format"] == "polarlm-conversations"
    page.click("[data-does=remove]")
    page.until(lambda: page.kept() == [])
    assert page.import_text(json.dumps(file)) == "1 conversation imported."
    assert page.titles() == ["first2"]
    page.click("button.chat")
    assert messages(page) == before
    assert page.run("return current.children.length") == 2


def test_a_file_of_a_conversation_that_is_here_adds_what_it_has_more(page: Page) -> None:
    page.talk("one", "two")
    file = page.export()
    said = "1 conversation was here already: what the file has more is added."
    page.says(["three"])
    page.send_and_wait("third")  # after the file was written
    assert page.import_text(json.dumps(file)) == said
    assert page.titles() == ["first"]
    assert page.texts() == ["first", "one", "second", "two", "third", "three"]
    for message in file["conversations"][0]["messages"].values():  # as if it had been continued elsewhere
        if message["text"] == "first":
            message["children"].append("00000000000000ff")
            more = {"role": "assistant", "text": "elsewhere", "children": [], "parent": message["id"]}
    file["conversations"][0]["messages"]["00000000000000ff"] = more
    page.import_text(json.dumps(file))
    assert page.texts() == ["first", "one", "second", "two", "third", "three"]
    page.press_button("Later version", 1)
    assert page.texts() == ["first", "elsewhere"]
    page.until(lambda: len(page.kept()) == 1 and "elsewhere" in json.dumps(page.kept()))


def test_a_file_that_turns_a_conversation_around_changes_nothing(page: Page) -> None:
    page.talk("one")
    file = page.export()
    (chat,) = file["conversations"]
    question, reply = sorted(chat["messages"].values(), key=lambda message: message["role"], reverse=True)
    chat["children"], reply["children"], question["children"] = [reply["id"]], [question["id"]], []
    page.import_text(json.dumps(file))
    assert page.texts() == ["first", "one"]
    assert page.run("return Object.values(current.messages).flatMap(({children}) => children).length") == 1


def test_a_file_of_something_else_is_refused_in_a_sentence(page: Page) -> None:
    assert page.import_text("{") == "This file is not JSON."
    for text in (
        "null",
        '{"format": "other", "conversations": []}',
        '{"format": "polarlm-conversations"}',
        '{"format": "polarlm-conversations", "conversations": [7]}',
        '{"format": "polarlm-conversations", "conversations": [{"messages": {}, "children": 1}]}',
    ):
        assert page.import_text(text) == "This file has no conversations of this page in it."
    assert page.titles() == []


def test_a_file_cannot_bring_loops_or_values_of_other_kinds(page: Page) -> None:
    answer = {"role": "assistant", "text": "<b>hi</b>", "children": ["a", "c"], "calls": [None, {"name": 7}]}
    counts = {"prompt": 9, "completion": 1, "cached": 3, "places": {"disk": 3, "ram": "<b>"}}
    hostile = {
        "title": {"a": 1},
        "shown": 99,
        "children": ["a", "a", "__proto__", "gone", 5],
        "settings": {"system": 5, "temperature": "x", "loop_check": False, "other": 1},
        "messages": {
            "a": {"role": "user", "text": ["<b>"], "children": ["b", "a", "d"], "shown": -1},
            "b": answer | {"usage": {"prompt": "x"}},
            "d": {"role": "assistant", "text": "again", "ending": "stop", "usage": counts},
            "c": {"role": "system", "text": "no", "children": []},
        },
    }
    text = json.dumps({"format": "polarlm-conversations", "conversations": [hostile]})
    assert page.import_text(text) == "1 conversation imported."
    page.click("button.chat")
    assert page.roles() == ["user", "assistant"]
    assert page.text_of() == "<b>hi</b>"
    page.press_button("Later version", 1)
    assert page.figures() == "3 of 9 prompt tokens from the cache (3 from disk) · 1 token"
    assert page.run("return current.settings") == {"system": "5", "temperature": "x", "loop_check": False}


# -- saved prompts -----------------------------------------------------------------------------------------------------


def names(page: Page) -> list[str]:
    return page.run("return [...document.querySelectorAll('#prompts .name')].map(({textContent}) => textContent)")


def save(page: Page, name: str) -> None:
    page.run("library.open = true; document.getElementById('prompt-name').value = ''")
    page.type("#prompt-name", name + ENTER)


def test_a_prompt_is_saved_and_used_and_deleted(page: Page) -> None:
    save(page, "nothing")
    assert page.text("#prompt-says") == "Write the prompt first, as the system prompt or as a message."
    page.choose(system="Be <b>brief</b>.")
    save(page, "Short")
    assert (names(page), page.run("return document.getElementById('prompt-name').value")) == (["Short"], "")
    page.run("system.value = ''; system.dispatchEvent(new Event('input', {bubbles: true}))")
    page.reload()
    page.run("library.open = true")
    page.until(lambda: names(page) == ["Short"])
    page.says(["one"])
    page.click("[aria-label='Use Short as the system prompt']")
    page.type("#message", "x ")
    page.click("[aria-label='Write Short into the message']")
    assert page.run("return [message.value, document.activeElement.id]") == ["x Be <b>brief</b>.", "message"]
    page.send_and_wait("")
    assert page.contents() == ["Be <b>brief</b>.", "x Be <b>brief</b>."]
    page.click("[aria-label='Delete Short']")
    assert names(page) == []


def test_prompts_go_to_the_file_of_all_conversations_and_come_back(page: Page) -> None:
    page.choose(system="Be brief.")
    save(page, "Short")
    page.talk("one")
    file = page.export()
    assert file["prompts"] == [{"name": "Short", "text": "Be brief."}]
    page.run("localStorage.removeItem('polarlm.prompts'); drawPrompts()")
    page.import_text(json.dumps(file))
    assert names(page) == ["Short"]
    wrong = file | {"prompts": [{"name": 1, "text": "a"}, {"name": " "}, None, {"name": "b", "text": "c"}]}
    page.import_text(json.dumps(wrong))
    assert names(page) == ["b", "Short"]
