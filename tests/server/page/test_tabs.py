"""Two tabs of one browser with the same conversation: what is said in either one stays, and both show it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.page.browser import ENTER, Browser
from tests.server.page.visitor import (
    choose,
    done,
    go_on,
    kept,
    press_button,
    says,
    send,
    send_and_wait,
    shown,
    size,
    text_of,
    titles,
)

SLOW: list[Any] = ["half ", {"held": True}, "of it"]


@pytest.fixture
def other(page: Browser) -> Iterator[Browser]:
    """A second tab with the conversation of the first one, whose question is "first" and whose answer is "one"."""
    says(page, ["one"])
    send_and_wait(page, "first")
    page.until(lambda: "one" in json.dumps(kept(page)))
    with page.second() as other:
        size(other, 1280, 800)
        other.open(page.run("return location.href"))
        other.until(lambda: shown(other) == ["first", "one"])
        yield other


def paths(page: Browser) -> list[list[str]]:
    """The texts of every way through the conversation that is kept, from its beginning to an end."""
    script = """
        const [chat] = arguments;
        const ends = Object.values(chat.messages).filter((message) => !message.children.length);
        const path = (end) => (end ? [...path(chat.messages[end.parent]), end.text] : []);
        return ends.map(path);
    """
    return sorted(page.run(script, *kept(page)))


def texts(page: Browser) -> list[str]:
    """Of every message that is kept, in any version."""
    return sorted({text for path in paths(page) for text in path})


def reached(page: Browser, text: str) -> bool:
    """Whether a message is shown, or can be with the arrows."""
    return page.run("return Object.values(current.messages).some((message) => message.text === arguments[0])", text)


# -- messages and answers ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("later", [0, 0.3, 1])
def test_what_is_sent_in_two_tabs_stays_with_both_answers(page: Browser, other: Browser, later: float) -> None:
    says(page, ["answer to A ", {"wait": 1500}, "ends"])
    says(other, ["answer to B ", {"wait": 1500}, "ends"])
    send(page, "from A")
    time.sleep(later)
    send(other, "from B")
    for tab in (page, other):
        tab.until(lambda tab=tab: done(tab))
    said = ["answer to A ends", "answer to B ends", "first", "from A", "from B", "one"]
    page.until(lambda: texts(page) == said)
    for tab, own in ((page, "A"), (other, "B")):
        tab.until(lambda tab=tab: all(reached(tab, text) for text in said))
        assert shown(tab)[:2] == ["first", "one"]
        assert {f"from {own}", f"answer to {own} ends"} <= set(shown(tab))  # nobody is taken to another version
        tab.reload()
        tab.until(lambda tab=tab: shown(tab)[:2] == ["first", "one"] and all(reached(tab, text) for text in said))


@pytest.mark.slow
def test_messages_that_two_tabs_put_in_one_place_are_versions_of_it(page: Browser, other: Browser) -> None:
    says(page, ["to A"])
    says(other, ["to B"])
    for tab in (page, other):  # neither hears of the other one
        tab.run("otherTabs.close(); otherTabs = null")
    send_and_wait(page, "from A")
    send_and_wait(other, "from B")
    other.until(lambda: paths(other) == [["first", "one", "from A", "to A"], ["first", "one", "from B", "to B"]])
    assert shown(other) == ["first", "one", "from B", "to B"]
    other.until(lambda: other.text(".arrows span") == "2/2")
    press_button(other, "Earlier version", 2)
    assert shown(other) == ["first", "one", "from A", "to A"]


@pytest.mark.slow
def test_a_message_edited_in_one_tab_while_the_other_answers_is_a_version(page: Browser, other: Browser) -> None:
    says(other, SLOW)
    says(page, ["another"])
    send(other, "from B")
    other.until(lambda: text_of(other) == "half ")
    press_button(page, "Edit", 0)
    page.type(".edit textarea", " edited" + ENTER)
    page.until(lambda: done(page) and text_of(page) == "another")
    go_on(other)
    other.until(lambda: done(other))
    ways = [["first", "one", "from B", "half of it"], ["first edited", "another"]]
    page.until(lambda: paths(page) == ways)
    assert shown(page) == ways[1]
    assert shown(other) == ways[0]
    other.until(lambda: other.text(".arrows span") == "1/2")
    press_button(other, "Later version", 0)
    assert shown(other) == ways[1]


@pytest.mark.slow
def test_an_answer_that_two_tabs_go_on_with_has_two_versions(page: Browser, other: Browser) -> None:
    for tab, more in ((page, " and A"), (other, " and B")):
        tab.run("otherTabs.close(); otherTabs = null")  # neither hears of the other one
        says(tab, [more, {"wait": 1500}, "."])
        tab.run("resume(rows.at(-1).message)")  # as Continue does
    for tab, own in ((page, "A"), (other, "B")):
        tab.until(lambda tab=tab: done(tab))
        assert text_of(tab) == f"one and {own}."
    page.until(lambda: paths(page) == [["first", "one and A."], ["first", "one and B."]])
    for tab in (page, other):
        tab.until(lambda tab=tab: tab.text(".arrows span") in ("1/2", "2/2"))


@pytest.mark.slow
def test_an_answer_that_the_other_tab_goes_on_with_stays_one(page: Browser, other: Browser) -> None:
    says(other, [" and", {"wait": 2200}, " more", {"wait": 2200}, " text"])  # so that it is kept several times
    other.run("resume(rows.at(-1).message)")  # as Continue does
    other.until(lambda: done(other))
    page.until(lambda: shown(page) == ["first", "one and more text"])
    page.run("return keepConversation(current)")
    assert paths(page) == [["first", "one and more text"]]


@pytest.mark.slow
def test_a_tab_that_watches_shows_the_other_ones_answer(page: Browser, other: Browser) -> None:
    says(page, ["**from", {"wait": 2500}, {"held": True}, "** A"])
    page.type("#message", "typed")
    other.type("#message", "typed")
    page.type("#message", ENTER)
    other.until(lambda: shown(other)[-2:] == ["typed", "**from"])
    assert other.text(".notice")  # that it is not all of it
    go_on(page)
    page.until(lambda: done(page))
    other.until(lambda: other.text(".message:last-child .answer") == "from A")
    assert other.run("return message.value") == "typed"
    assert other.run("return document.querySelector('.message .notice')") is None


# -- the conversation itself -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_name_given_while_the_other_tab_answers_stays(page: Browser, other: Browser) -> None:
    says(other, SLOW)
    send(other, "from B")
    other.until(lambda: text_of(other) == "half ")
    page.click("[data-does=rename]")
    page.until(lambda: page.run("return document.activeElement.tagName") == "INPUT")
    page.type("#list input", "Weather" + ENTER)
    go_on(other)
    other.until(lambda: done(other))
    other.until(lambda: "of it" in json.dumps(kept(other)))
    assert [chat["title"] for chat in kept(other)] == ["Weather"]
    for tab in (page, other):
        tab.until(lambda tab=tab: titles(tab) == ["Weather"])


@pytest.mark.slow
def test_settings_chosen_while_the_other_tab_answers_stay(page: Browser, other: Browser) -> None:
    says(other, SLOW)
    send(other, "from B")
    other.until(lambda: text_of(other) == "half ")
    choose(page, system="be brief")
    go_on(other)
    other.until(lambda: done(other))
    other.until(lambda: "of it" in json.dumps(kept(other)))
    assert [chat["settings"] for chat in kept(other)] == [{"system": "be brief"}]
    other.until(lambda: other.run("return system.value") == "be brief")


@pytest.mark.slow
def test_a_conversation_deleted_while_the_other_tab_answers_stays_deleted(page: Browser, other: Browser) -> None:
    says(other, SLOW, ["again"])
    send(other, "from B")
    other.until(lambda: text_of(other) == "half ")
    other.type("#message", "typed")
    page.click("[data-does=remove]")
    go_on(other)
    other.until(lambda: done(other) and text_of(other) == "half of it")  # who reads it reads it to its end
    other.until(lambda: "deleted in another tab" in other.text("#unkept"))
    choose(other, system="be brief")
    time.sleep(0.3)
    for tab in (page, other):
        assert (kept(tab), titles(tab)) == ([], [])
    assert other.run("return message.value") == "typed"
    other.type("#message", ENTER)  # a message brings it back
    other.until(lambda: done(other) and text_of(other) == "again")
    other.until(lambda: paths(other) == [["first", "one", "from B", "half of it", "typed", "again"]])
    assert other.text("#unkept") == ""
    page.until(lambda: titles(page) == ["first"])


@pytest.mark.slow
def test_a_deletion_taken_back_has_what_the_other_tab_was_answered_meanwhile(page: Browser, other: Browser) -> None:
    says(other, SLOW)
    send(other, "from B")
    other.until(lambda: text_of(other) == "half ")
    page.click("[data-does=remove]")
    go_on(other)
    other.until(lambda: done(other) and "deleted in another tab" in other.text("#unkept"))
    page.click("#restore")
    page.until(lambda: paths(page) == [["first", "one", "from B", "half of it"]])
    page.until(lambda: shown(page) == ["first", "one", "from B", "half of it"])
    other.until(lambda: titles(other) == ["first"] and other.text("#unkept") == "")


@pytest.mark.slow
def test_conversations_kept_by_earlier_versions_of_the_page_are_read_and_go_on(page: Browser) -> None:
    old = {
        "id": "0123456789abcdef",
        "title": "Old",
        "changed": 1_700_000_000_000,
        "settings": {"system": "be brief"},
        "children": ["a"],
        "shown": 0,
        "messages": {
            "a": {"id": "a", "parent": None, "children": ["b", "c"], "shown": 1, "role": "user", "text": "question"},
            "b": {"id": "b", "parent": "a", "children": [], "shown": 0, "role": "assistant", "text": "one"},
            "c": {"id": "c", "parent": "a", "children": [], "shown": 0, "role": "assistant", "text": "two"},
        },
    }
    rest = {"reasoning": "", "calls": [], "ending": "stop", "error": "", "usage": None, "rate": None, "thought": None}
    for name in ("b", "c"):
        old["messages"][name] |= rest  # type: ignore[index]
    page.until(lambda: page.run("return database !== null"))  # a page opens it a moment after its scripts
    page.run("return granted(database.transaction(SHELF, 'readwrite').objectStore(SHELF).put(arguments[0]))", old)
    page.reload()
    page.until(lambda: titles(page) == ["Old"])
    page.click("button.chat")
    assert shown(page) == ["question", "two"]
    says(page, ["three"])
    send_and_wait(page, "on")
    page.until(lambda: paths(page) == [["question", "one"], ["question", "two", "on", "three"]])
    (chat,) = kept(page)
    assert (chat["title"], chat["settings"]) == ("Old", {"system": "be brief"})
