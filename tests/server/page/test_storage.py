"""Browsers that keep nothing, or nothing more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.server.page.visitor import Page, call

pytestmark = pytest.mark.slow


@contextmanager
def before_its_scripts(page: Page, script: str) -> Iterator[None]:
    """The page again, with a script that runs before the page's script."""
    added = page.protocol("Page.addScriptToEvaluateOnNewDocument", source=script)
    try:
        page.reload()
        yield
    finally:
        page.protocol("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])


def test_a_full_storage_is_said_and_the_conversation_goes_on(page: Page) -> None:
    page.says(["one"], ["two"])
    page.run(
        """
        window.putReally = IDBObjectStore.prototype.put;
        IDBObjectStore.prototype.put = function () { throw new DOMException("no", "QuotaExceededError"); };
        """
    )
    page.send_and_wait("first")
    page.until(lambda: "storage is full" in page.text("#unkept"))
    assert page.texts() == ["first", "one"]
    page.run("IDBObjectStore.prototype.put = window.putReally")
    page.send_and_wait("second")
    page.until(lambda: page.text("#unkept") == "" and len(page.kept()) == 1)


def test_a_browser_that_keeps_nothing_says_so(page: Page) -> None:
    script = "IDBFactory.prototype.open = () => { throw new DOMException('no', 'SecurityError'); };"
    with before_its_scripts(page, script):
        page.until(lambda: "keeps nothing here" in page.text("#unkept"))
        page.size(390, 844)
        assert page.shown("#unkept")  # next to the message, wherever the list is
        page.size(1280, 800)
        page.talk("one")
        page.click("#new")
        page.click("button.chat")
        assert page.texts() == ["first", "one"]


def test_a_browser_that_lets_no_tab_hear_of_another_has_a_page_that_works(page: Page) -> None:
    """As Firefox does where all cookies are blocked."""
    script = "window.BroadcastChannel = class { constructor() { throw new DOMException('no', 'SecurityError'); } };"
    with before_its_scripts(page, script):
        page.talk("one")
        page.until(lambda: len(page.kept()) == 1)
        page.reload()
        page.until(lambda: page.texts() == ["first", "one"])


def test_a_browser_that_forbids_storage_gets_its_answer(page: Page) -> None:
    for storage in ("sessionStorage", "localStorage"):
        page.run(
            f"Object.defineProperty(window, '{storage}', {{get() {{ throw new DOMException('no', 'SecurityError') }}}})"
        )
    page.choose(temperature=0, max_tokens=5)
    page.send_and_wait("the end")
    assert page.answer()


def test_a_setting_that_found_no_room_is_the_last_one_all_the_same(page: Page) -> None:
    page.choose(system="old")
    page.run(
        """
        window.setReally = Storage.prototype.setItem;
        Storage.prototype.setItem = () => { throw new DOMException("no", "QuotaExceededError"); };
        """
    )
    page.choose(system="er")
    page.click("#new")
    assert page.run("return system.value") == "older"
    page.run("Storage.prototype.setItem = window.setReally")
    page.choose(system=" still")
    page.run("localStorage.setItem(SETTINGS, JSON.stringify({system: 'from another tab'}))")
    page.click("#new")
    assert page.run("return system.value") == "from another tab"


def test_results_that_are_being_typed_stay_when_another_tab_changes_the_conversation(page: Page) -> None:
    page.says(call(0, "look", "{}"))
    page.send_and_wait("first")
    page.type(".results textarea", "12 degrees")
    page.change_elsewhere("renamed")
    page.until(lambda: page.titles() == ["renamed"])
    assert page.run("return document.querySelector('.results textarea').value") == "12 degrees"


def test_a_change_in_another_tab_leaves_the_place_that_is_read(page: Page) -> None:
    page.talk("line\n\n" * 100)
    page.run("log.scrollTop = 300")
    page.until(lambda: not page.run("return followsEnd"))
    page.change_elsewhere("renamed")
    page.until(lambda: page.titles() == ["renamed"])
    assert page.run("return [log.scrollTop, followsEnd]") == [300, False]
