"""Where the focus is after something has changed, and what a key or a click does then."""

from __future__ import annotations

import pytest

from tests.server.page.visitor import Page

pytestmark = pytest.mark.slow

SLOW = ["half", {"held": True}, " an answer"]


def two_chats(page: Page) -> None:
    page.talk("one")
    page.click("#new")
    page.send_and_wait("second")


@pytest.mark.parametrize("where", ["message", "system"])
def test_a_click_elsewhere_ends_renaming_and_the_focus_goes_there(page: Page, where: str) -> None:
    two_chats(page)
    page.rename("renamed")
    page.click(f"#{where}")
    assert page.focused() == where
    assert page.text("[aria-current]") == "renamed"


def test_a_click_on_another_conversation_opens_it_while_one_is_renamed(page: Page) -> None:
    two_chats(page)
    page.rename("renamed")
    place = page.run(
        """const {x, y} = document.querySelector('li:last-child .chat').getBoundingClientRect();
        return {x: x + 9, y: y + 9};"""
    )
    button = {"button": "left", "clickCount": 1}
    page.protocol("Input.dispatchMouseEvent", type="mousePressed", **place, **button)
    page.until(lambda: "renamed" in [chat["title"] for chat in page.kept()])  # a finger stays down longer than that
    page.protocol("Input.dispatchMouseEvent", type="mouseReleased", **place, **button)
    page.until(lambda: page.text("[aria-current]") == "first")
    assert page.titles() == ["renamed", "first"]


@pytest.mark.parametrize("which", ["second", "first", "Copy message"])
def test_the_focus_stays_on_a_button_when_an_answer_ends(page: Page, which: str) -> None:
    """In the list of conversations, and below a message."""
    two_chats(page)
    page.begin(SLOW)
    page.run(
        """const buttons = [...document.querySelectorAll(".chat, .user:nth-last-child(2) .foot button")];
        buttons.find((made) => nameOf(made) === arguments[0]).focus();""",
        which,
    )
    page.go_on()
    assert page.focused() == which


def test_an_answer_that_is_edited_cannot_be_saved_while_another_one_comes(page: Page) -> None:
    """It would take the place of all that follows it, the other answer too."""
    page.says(["one"], SLOW)
    page.send_and_wait("first")
    page.press_button("Edit")
    page.type(".edit textarea", "!")
    page.send("second")
    page.until(lambda: page.text_of() == "half")
    page.run("document.querySelector('.edit .row button:nth-child(2)').click()")
    page.go_on()
    assert page.text_of() == "half an answer"
    assert page.run("return document.querySelector('.edit textarea').value") == "one!"
