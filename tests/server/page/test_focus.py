"""Where the focus is after something has changed, and what a key or a click does then."""

from __future__ import annotations

import pytest

from tests.server.page.browser import Browser
from tests.server.page.visitor import done, go_on, kept, press_button, says, send, send_and_wait, text_of

UP = "\ue013"
FOCUSED = "const at = document.activeElement; return at.id || at.getAttribute('aria-label') || at.textContent"


def two_chats(page: Browser) -> None:
    """The second one is shown."""
    says(page, ["one"])
    send_and_wait(page, "first")
    page.click("#new")
    send_and_wait(page, "second")


def rename(page: Browser, name: str) -> None:
    page.click("[data-does=rename]")
    page.until(lambda: page.run("return document.activeElement.tagName") == "INPUT")
    page.type("#list input", name)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["#message", "#system"])
def test_a_click_elsewhere_ends_renaming_and_the_focus_goes_there(page: Browser, where: str) -> None:
    two_chats(page)
    rename(page, "renamed")
    page.click(where)
    assert page.run(FOCUSED) == where.removeprefix("#")
    assert page.text("[aria-current]") == "renamed"


@pytest.mark.slow
def test_a_click_on_another_conversation_opens_it_while_one_is_renamed(page: Browser) -> None:
    two_chats(page)
    rename(page, "renamed")
    place = page.run(
        """const {x, y} = document.querySelector('li:last-child .chat').getBoundingClientRect();
        return {x: x + 9, y: y + 9};"""
    )
    button = {"button": "left", "clickCount": 1}
    page.protocol("Input.dispatchMouseEvent", type="mousePressed", **place, **button)
    page.until(lambda: "renamed" in [chat["title"] for chat in kept(page)])  # a finger stays down longer than that
    page.protocol("Input.dispatchMouseEvent", type="mouseReleased", **place, **button)
    page.until(lambda: page.text("[aria-current]") == "first")
    assert page.run("return [...document.querySelectorAll('.chat')].map((made) => made.textContent)") == [
        "renamed",
        "first",
    ]


@pytest.mark.slow
def test_a_name_that_is_being_typed_stays_when_another_tab_changes_the_conversation(page: Browser) -> None:
    two_chats(page)
    rename(page, "renamed")
    script = """
        const shelf = database.transaction(SHELF, "readwrite").objectStore(SHELF);
        await granted(shelf.put({...structuredClone(current), title: "from another tab", named: Date.now()}));
        new BroadcastChannel("polarlm").postMessage(current.id);
    """
    page.run(f"return (async () => {{ {script} }})()")
    page.until(lambda: page.run("return chats.get(current.id).title") == "from another tab")
    assert page.run("return document.activeElement.value") == "renamed"


@pytest.mark.slow
@pytest.mark.parametrize("which", ["second", "first"])
def test_the_focus_stays_in_the_list_of_conversations_when_an_answer_ends(page: Browser, which: str) -> None:
    two_chats(page)
    says(page, ["half", {"held": True}, " an answer"])
    send(page, "on")
    page.until(lambda: text_of(page) == "half")
    page.run("[...document.querySelectorAll('.chat')].find((made) => made.textContent === arguments[0]).focus()", which)
    go_on(page)
    page.until(lambda: done(page))
    assert page.run(FOCUSED) == which


@pytest.mark.slow
def test_the_focus_stays_below_a_message_when_an_answer_ends(page: Browser) -> None:
    says(page, ["half", {"held": True}, " an answer"])
    send(page, "on")
    page.until(lambda: text_of(page) == "half")
    page.run("document.querySelector('.user .foot [aria-label]').focus()")
    go_on(page)
    page.until(lambda: done(page))
    assert page.run(FOCUSED) == "Copy message"


@pytest.mark.slow
def test_the_focus_is_below_an_answer_that_was_saved(page: Browser) -> None:
    says(page, ["one"])
    send_and_wait(page, "first")
    press_button(page, "Edit")
    page.type(".edit textarea", "!")
    page.click(".edit .row button:nth-child(2)")
    assert text_of(page) == "one!"
    assert page.run(FOCUSED) == "Edit"


@pytest.mark.slow
def test_an_answer_that_is_edited_cannot_be_saved_while_another_one_comes(page: Browser) -> None:
    """It would take the place of all that comes behind it, of the other one too."""
    says(page, ["one"], ["half", {"held": True}, " an answer"])
    send_and_wait(page, "first")
    press_button(page, "Edit")
    page.type(".edit textarea", "!")
    send(page, "second")
    page.until(lambda: text_of(page) == "half")
    page.run("document.querySelector('.edit .row button:nth-child(2)').click()")
    go_on(page)
    page.until(lambda: done(page))
    assert text_of(page) == "half an answer"
    assert page.run("return document.querySelector('.edit textarea').value") == "one!"


@pytest.mark.slow
def test_one_press_of_up_leaves_the_end_of_an_answer_that_comes(page: Browser) -> None:
    says(page, [*["line\n\n"] * 60, *[piece for _ in range(40) for piece in ("more\n\n", {"wait": 20})]])
    send(page, "go on")
    page.until(lambda: text_of(page).count("more") > 3)
    page.run("log.focus()")
    page.press(UP)
    page.until(lambda: done(page))
    assert page.run("return log.scrollHeight - log.scrollTop - log.clientHeight") > 200
    page.run("log.scrollTop = log.scrollHeight")
    send_and_wait(page, "again")
    assert page.run("return log.scrollHeight - log.scrollTop - log.clientHeight") < 2
