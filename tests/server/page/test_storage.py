"""Browsers that keep nothing, or nothing more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.server.page.browser import Browser
from tests.server.page.visitor import choose, press_button, says, send_and_wait, size

TITLES = "return [...document.querySelectorAll('button.chat')].map((made) => made.textContent)"
SHOWN = "return rows.map(({message}) => message.text)"
KEPT = "return granted(database.transaction(SHELF).objectStore(SHELF).getAll()).then((all) => all.length)"

# Another tab gives the conversation that is shown another title.
CHANGE = """
    return (async (title) => {
        const other = {...structuredClone(current), title, named: Date.now()}, tab = new BroadcastChannel("polarlm");
        await granted(database.transaction(SHELF, "readwrite").objectStore(SHELF).put(other));
        tab.postMessage(other.id);
    })(arguments[0]);
"""


@contextmanager
def before_its_scripts(page: Browser, script: str) -> Iterator[None]:
    """The page again, with a script that runs before its own ones."""
    added = page.protocol("Page.addScriptToEvaluateOnNewDocument", source=script)
    try:
        page.reload()
        yield
    finally:
        page.protocol("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])


@pytest.mark.slow
def test_a_full_storage_is_said_and_the_conversation_goes_on(page: Browser) -> None:
    says(page, ["one"], ["two"])
    page.run(
        """
        window.putReally = IDBObjectStore.prototype.put;
        IDBObjectStore.prototype.put = function () { throw new DOMException("no", "QuotaExceededError"); };
        """
    )
    send_and_wait(page, "first")
    page.until(lambda: "storage is full" in page.text("#unkept"))
    assert page.run(SHOWN) == ["first", "one"]
    page.run("IDBObjectStore.prototype.put = window.putReally")
    send_and_wait(page, "second")
    page.until(lambda: page.text("#unkept") == "" and page.run(KEPT) == 1)


@pytest.mark.slow
def test_a_browser_that_keeps_nothing_says_so(page: Browser) -> None:
    script = "IDBFactory.prototype.open = () => { throw new DOMException('no', 'SecurityError'); };"
    with before_its_scripts(page, script):
        page.until(lambda: "keeps nothing here" in page.text("#unkept"))
        size(page, 390, 844)
        assert page.shown("#unkept")  # beside the message, wherever the list is
        size(page, 1280, 800)
        says(page, ["one"])
        send_and_wait(page, "first")
        assert page.run(TITLES) == ["first"]
        page.click("#new")
        page.click("button.chat")
        assert page.run(SHOWN) == ["first", "one"]


@pytest.mark.slow
def test_a_browser_that_lets_no_tab_hear_of_another_has_a_page_that_works(page: Browser) -> None:
    """As Firefox does where all cookies are blocked."""
    script = "window.BroadcastChannel = class { constructor() { throw new DOMException('no', 'SecurityError'); } };"
    with before_its_scripts(page, script):
        says(page, ["one"])
        send_and_wait(page, "first")
        assert page.run(SHOWN) == ["first", "one"]
        page.until(lambda: page.run(KEPT) == 1)
        page.reload()
        page.until(lambda: page.run(SHOWN) == ["first", "one"])


@pytest.mark.slow
def test_a_setting_that_found_no_room_is_the_last_one_all_the_same(page: Browser) -> None:
    choose(page, system="old")
    page.run(
        """
        window.setReally = Storage.prototype.setItem;
        Storage.prototype.setItem = () => { throw new DOMException("no", "QuotaExceededError"); };
        """
    )
    choose(page, system="er")
    page.click("#new")
    assert page.run("return system.value") == "older"
    page.run("Storage.prototype.setItem = window.setReally")
    choose(page, system=" still")
    page.run("localStorage.setItem(SETTINGS, JSON.stringify({system: 'from another tab'}))")
    page.click("#new")
    assert page.run("return system.value") == "from another tab"


@pytest.mark.slow
def test_results_that_are_being_typed_stay_when_another_tab_changes_the_conversation(page: Browser) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": "{}"}}
    says(page, [{"tool_calls": [call]}])
    send_and_wait(page, "first")
    page.type(".results textarea", "12 degrees")
    page.run(CHANGE, "renamed")
    page.until(lambda: page.run(TITLES) == ["renamed"])
    assert page.run("return document.querySelector('.results textarea').value") == "12 degrees"
    page.run("document.querySelector('.results textarea').value = ''")
    page.run(CHANGE, "again")
    page.until(lambda: page.run("return current.title") == "again")
    press_button(page, "Send results")


@pytest.mark.slow
def test_a_change_in_another_tab_leaves_the_place_that_is_read(page: Browser) -> None:
    says(page, ["line\n\n"] * 100)
    send_and_wait(page, "first")
    page.run("log.scrollTop = 300")
    page.until(lambda: not page.run("return following"))
    page.run(CHANGE, "renamed")
    page.until(lambda: page.run(TITLES) == ["renamed"])
    assert page.run("return log.scrollTop") == 300
    page.until(lambda: not page.run("return following"))
