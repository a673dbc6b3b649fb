"""What a screen reader is given to say."""

from __future__ import annotations

import pytest

from tests.server.page.visitor import Page

pytestmark = pytest.mark.slow

LISTEN = """
    window.heard = [];
    const watch = (element) => new MutationObserver(() => window.heard.push(element.textContent))
        .observe(element, {childList: true, characterData: true, subtree: true});
    for (const element of document.querySelectorAll("[role=status], [aria-live=polite]")) watch(element);
"""


def heard(page: Page) -> list[str]:
    """The texts that a screen reader was given after LISTEN had run."""
    return [text for text in page.run("return window.heard") if text]


def test_a_screen_reader_is_given_the_answer_once_and_no_tokens(page: Page) -> None:
    page.run(LISTEN)
    page.says(["one ", "two ", "three ", *["more "] * 200])
    page.send_and_wait("count")
    assert sum(text.startswith("one two three") for text in heard(page)) == 1
    assert len(heard(page)) < 8
    assert page.count(".turns [aria-live]") == 0


def test_blocks_are_spoken_apart_and_buttons_are_no_part_of_an_answer(page: Page) -> None:
    page.talk("# Title\none\n\n- two $x$\n- three\n\n| a | b |\n|---|---|\n| 4 | 5 |\n\n```python\nx = 1\n```\n")
    assert page.text("#said").split("\n") == ["Title", "one", "two $x$", "three", "a", "b", "4", "5", "x = 1"]


def test_what_was_said_is_not_found_on_the_page_a_second_time(page: Page) -> None:
    """By somebody who reads on, searches, or copies all of it."""
    page.run(
        """
        const real = window.setTimeout;
        window.setTimeout = (does, after) => real(does, after > 5000 ? 0 : after);
        """
    )
    page.run(LISTEN)
    page.talk("one")
    page.until(lambda: "one" in heard(page))
    page.until(lambda: page.text("#said") == "")


def test_how_far_the_prompt_is_can_be_seen_and_is_not_spoken_each_time(page: Page) -> None:
    progress = [
        {"event": {"choices": [], "prompt_progress": {"total": 640, "cache": 0, "processed": 64 * part}}}
        for part in range(10)
    ]
    page.run(LISTEN)
    page.says([*progress, {"held": True}, "one", {"wait": 300}])
    page.send("count")
    page.until(lambda: page.text("#progress") == "576 of 640 tokens")
    assert page.request_body()["return_progress"] is True
    page.go_on()
    assert page.text("#progress") == ""
    assert sorted(heard(page)) == ["Answered.", "Answering …", "Reading the prompt …", "one"]


def test_an_error_is_an_alert_when_it_happens_and_not_when_it_is_read_again(page: Page) -> None:
    page.says([{"status": 400, "error": {"message": "no"}}])
    page.send_and_wait("count")
    assert page.text(".message [role=alert]") == "no."
    page.reload()
    page.until(lambda: page.text(".message .notice") == "no.")
    assert not page.shown("[role=alert]")


def test_a_warning_that_nothing_is_kept_has_a_place_before_it_comes(page: Page) -> None:
    """Text in an element that was not there before is not spoken by all screen readers."""
    statuses = """
        const shown = [...document.querySelectorAll("[role=status]")].filter((made) => made.checkVisibility());
        return shown.map(({id}) => id);
    """
    assert {"unkept", "none", "said", "status", "shelf-says"} <= set(page.run(statuses))
    assert page.run("return unkept.getBoundingClientRect().height") == 0
