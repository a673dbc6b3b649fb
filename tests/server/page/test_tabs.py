"""Two tabs of one browser with the same conversation: what is said in either one stays, and both show it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.page.browser import ENTER
from tests.server.page.visitor import Page

pytestmark = pytest.mark.slow

SLOW: list[Any] = ["half ", {"held": True}, "of it"]


@pytest.fixture
def other(page: Page) -> Iterator[Page]:
    """A second tab with the conversation of the first one, whose question is "first" and whose answer is "one"."""
    page.talk("one")
    page.until(lambda: "one" in json.dumps(page.kept()))
    with page.second() as other:
        other.size(1280, 800)
        other.open(page.run("return location.href"))
        other.until(lambda: other.texts() == ["first", "one"])
        yield other


def paths(page: Page) -> list[list[str]]:
    """The texts of every way through the conversation that is kept, from its beginning to an end."""
    script = """
        const [chat] = arguments;
        const ends = Object.values(chat.messages).filter((message) => !message.children.length);
        const path = (end) => (end ? [...path(chat.messages[end.parent]), end.text] : []);
        return ends.map(path);
    """
    return sorted(page.run(script, *page.kept()))


def texts(page: Page) -> list[str]:
    """The texts of all messages that are kept, in any version."""
    return sorted({text for path in paths(page) for text in path})


def reached(page: Page, text: str) -> bool:
    """Whether a message is shown, or can be with the arrows."""
    return page.run("return Object.values(current.messages).some((message) => message.text === arguments[0])", text)


# -- messages and answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [0, 1])
def test_what_is_sent_in_two_tabs_stays_with_both_answers(page: Page, other: Page, later: float) -> None:
    page.says(["answer to A ", {"wait": 1500}, "ends"])
    other.says(["answer to B ", {"wait": 1500}, "ends"])
    page.send("from A")
    time.sleep(later)
    other.send("from B")
    for tab in (page, other):
        tab.until(tab.done)
    said = ["answer to A ends", "answer to B ends", "first", "from A", "from B", "one"]
    page.until(lambda: texts(page) == said)
    for tab, name in ((page, "A"), (other, "B")):
        tab.until(lambda tab=tab: all(reached(tab, text) for text in said))
        assert tab.texts()[:2] == ["first", "one"]
        assert {f"from {name}", f"answer to {name} ends"} <= set(tab.texts())  # nobody is taken to another version
        tab.reload()
        tab.until(lambda tab=tab: tab.texts()[:2] == ["first", "one"] and all(reached(tab, text) for text in said))


def test_messages_that_two_tabs_put_in_one_place_are_versions_of_it(page: Page, other: Page) -> None:
    page.says(["to A"])
    other.says(["to B"])
    for tab in (page, other):  # neither hears of the other one
        tab.run("otherTabs.close(); otherTabs = null")
    page.send_and_wait("from A")
    other.send_and_wait("from B")
    other.until(lambda: paths(other) == [["first", "one", "from A", "to A"], ["first", "one", "from B", "to B"]])
    assert other.texts() == ["first", "one", "from B", "to B"]
    other.until(lambda: other.text(".arrows span") == "2/2")
    other.press_button("Earlier version", 2)
    assert other.texts() == ["first", "one", "from A", "to A"]


def test_a_message_edited_in_one_tab_while_the_other_answers_is_a_version(page: Page, other: Page) -> None:
    other.begin(SLOW)
    page.says(["another"])
    page.press_button("Edit", 0)
    page.type(".edit textarea", " edited" + ENTER)
    page.until(lambda: page.done() and page.text_of() == "another")
    other.go_on()
    ways = [["first", "one", "go", "half of it"], ["first edited", "another"]]
    page.until(lambda: paths(page) == ways)
    assert page.texts() == ways[1]
    assert other.texts() == ways[0]
    other.until(lambda: other.text(".arrows span") == "1/2")
    other.press_button("Later version", 0)
    assert other.texts() == ways[1]


def test_an_answer_that_two_tabs_go_on_with_has_two_versions(page: Page, other: Page) -> None:
    for tab, more in ((page, " and A"), (other, " and B")):
        tab.run("otherTabs.close(); otherTabs = null")  # neither hears of the other one
        tab.says([more, {"wait": 1500}, "."])
        tab.run("resume(rows.at(-1).message)")  # as Continue does
    for tab, name in ((page, "A"), (other, "B")):
        tab.until(tab.done)
        assert tab.text_of() == f"one and {name}."
    page.until(lambda: paths(page) == [["first", "one and A."], ["first", "one and B."]])
    for tab in (page, other):
        tab.until(lambda tab=tab: tab.text(".arrows span") in ("1/2", "2/2"))


def test_an_answer_that_the_other_tab_goes_on_with_stays_one(page: Page, other: Page) -> None:
    other.says([" and", {"wait": 2200}, " more", {"wait": 2200}, " text"])  # so that it is kept several times
    other.run("resume(rows.at(-1).message)")  # as Continue does
    other.until(other.done)
    page.until(lambda: page.texts() == ["first", "one and more text"])
    page.run("return keepConversation(current)")
    assert paths(page) == [["first", "one and more text"]]


def test_a_tab_that_watches_shows_the_other_ones_answer(page: Page, other: Page) -> None:
    page.says(["**from", {"wait": 2500}, {"held": True}, "** A"])
    page.type("#message", "typed")
    other.type("#message", "typed")
    page.type("#message", ENTER)
    other.until(lambda: other.texts()[-2:] == ["typed", "**from"])
    assert other.text(".notice")  # that it is not all of it
    page.go_on()
    other.until(lambda: other.text(".message:last-child .answer") == "from A")
    assert other.run("return message.value") == "typed"
    assert other.run("return document.querySelector('.message .notice')") is None


# -- the conversation itself -------------------------------------------------------------------------------------


def test_a_name_and_settings_given_while_the_other_tab_answers_stay(page: Page, other: Page) -> None:
    other.begin(SLOW)
    page.rename("Weather" + ENTER)
    page.choose(system="be brief")
    other.go_on()
    other.until(lambda: "of it" in json.dumps(other.kept()))
    (chat,) = other.kept()
    assert (chat["title"], chat["settings"]) == ("Weather", {"system": "be brief"})
    for tab in (page, other):
        tab.until(lambda tab=tab: tab.titles() == ["Weather"])
    other.until(lambda: other.run("return system.value") == "be brief")


def test_a_conversation_deleted_while_the_other_tab_answers_stays_deleted(page: Page, other: Page) -> None:
    other.begin(SLOW, ["again"])
    other.type("#message", "typed")
    page.click("[data-does=remove]")
    other.go_on()
    assert other.text_of() == "half of it"  # who reads it reads it to its end
    other.until(lambda: "deleted in another tab" in other.text("#unkept"))
    other.choose(system="be brief")
    time.sleep(0.3)
    for tab in (page, other):
        assert (tab.kept(), tab.titles()) == ([], [])
    assert other.run("return message.value") == "typed"
    other.type("#message", ENTER)  # a message brings it back
    other.until(lambda: other.done() and other.text_of() == "again")
    other.until(lambda: paths(other) == [["first", "one", "go", "half of it", "typed", "again"]])
    assert other.text("#unkept") == ""
    page.until(lambda: page.titles() == ["first"])


def test_a_deletion_taken_back_has_what_the_other_tab_was_answered_meanwhile(page: Page, other: Page) -> None:
    other.begin(SLOW)
    page.click("[data-does=remove]")
    other.go_on()
    other.until(lambda: "deleted in another tab" in other.text("#unkept"))
    page.click("#restore")
    page.until(lambda: paths(page) == [["first", "one", "go", "half of it"]])
    page.until(lambda: page.texts() == ["first", "one", "go", "half of it"])
    other.until(lambda: other.titles() == ["first"] and other.text("#unkept") == "")


def test_conversations_kept_by_earlier_versions_of_the_page_are_read_and_go_on(page: Page) -> None:
    rest = {"reasoning": "", "calls": [], "ending": "stop", "error": "", "usage": None, "rate": None, "thought": None}
    answer = {"parent": "a", "children": [], "shown": 0, "role": "assistant", **rest}
    old = {
        "id": "0123456789abcdef",
        "title": "Old",
        "changed": 1_700_000_000_000,
        "settings": {"system": "be brief"},
        "children": ["a"],
        "shown": 0,
        "messages": {
            "a": {"id": "a", "parent": None, "children": ["b", "c"], "shown": 1, "role": "user", "text": "question"},
            "b": answer | {"id": "b", "text": "one"},
            "c": answer | {"id": "c", "text": "two"},
        },
    }
    page.until(lambda: page.run("return database !== null"))  # a page opens it a moment after its scripts
    page.run("return resultOf(database.transaction(SHELF, 'readwrite').objectStore(SHELF).put(arguments[0]))", old)
    page.reload()
    page.until(lambda: page.titles() == ["Old"])
    page.click("button.chat")
    assert page.texts() == ["question", "two"]
    page.says(["three"])
    page.send_and_wait("on")
    page.until(lambda: paths(page) == [["question", "one"], ["question", "two", "on", "three"]])
    (chat,) = page.kept()
    assert (chat["title"], chat["settings"]) == ("Old", {"system": "be brief"})
