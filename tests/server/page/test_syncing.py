"""Conversations at the server: the same in every browser, and no browser overwrites another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.page.visitor import Page
from tests.server.process import Process

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """It keeps conversations."""
    folder = tmp_path_factory.mktemp("server")
    with Process(tiny_path, folder, "--conversations", str(folder / "kept"), "--max-body", "65536") as process:
        yield process


@pytest.fixture
def page(page: Page, server: Process) -> Iterator[Page]:
    page.until(lambda: page.run("return serverKeeps"))
    yield page
    page.open("about:blank")
    for name in at_server(server):
        httpx.delete(f"{server.url}/conversations/{name}").raise_for_status()


def at_server(server: Process) -> dict[str, Any]:
    told = json.loads(server.get("/conversations"))["conversations"]
    return {name: change for name, change in told.items() if change["head"] is not None}


def texts(server: Process) -> list[str]:
    chats = at_server(server).values()
    return sorted(message.get("text", "") for chat in chats for message in chat["messages"].values())


def write(server: Process, name: str, head: dict[str, Any], messages: dict[str, Any]) -> None:
    """A change as another browser makes it."""
    base = json.loads(server.get("/conversations"))["revision"]
    body = {"base": base, "head": head, "messages": messages}
    httpx.post(f"{server.url}/conversations/{name}", json=body).raise_for_status()


def look(page: Page) -> None:
    """Looks for news now, and not only in five seconds."""
    page.run("return sync()")


def test_a_browser_that_has_nothing_gets_what_another_one_said(
    page: Page, server: Process, visit: Callable[[Process], Page]
) -> None:
    assert page.text("#where") == "Conversations are kept at this server, and in this browser."
    page.talk("one")
    page.until(lambda: texts(server) == ["first", "one"])
    visit(server)  # a new browser: nothing is kept in it
    page.until(lambda: page.titles() == ["first"])
    page.click("button.chat")
    assert page.texts() == ["first", "one"]
    page.until(lambda: len(page.kept()) == 1)
    page.says(["two"])
    page.send_and_wait("second")
    page.until(lambda: texts(server) == ["first", "one", "second", "two"])


def test_changes_of_two_browsers_both_stay(page: Page, server: Process) -> None:
    page.says(["one"], ["two"])
    page.send_and_wait("first")
    page.until(lambda: texts(server) == ["first", "one"])
    page.run("return lastSync")
    ((name, chat),) = at_server(server).items()
    last = next(key for key, message in chat["messages"].items() if message["text"] == "one")
    new = {"id": "c" * 16, "parent": last, "children": [], "shown": 0, "role": "user", "text": "elsewhere"}
    other = chat["messages"][last] | {"children": ["c" * 16]}
    write(server, name, chat["head"], {last: other, "c" * 16: new})  # which this page has not seen yet
    page.send_and_wait("second")
    page.until(lambda: texts(server) == ["elsewhere", "first", "one", "second", "two"])
    page.until(lambda: page.run("return Object.values(current.messages).length") == 5)
    page.run("return lastSync")
    children = at_server(server)[name]["messages"][last]["children"]
    assert len(children) == 2
    assert page.texts() == ["first", "one", "second", "two"]
    page.press_button("Earlier version", 2)
    assert page.texts()[-1] == "elsewhere"


def test_a_deletion_here_and_elsewhere(page: Page, server: Process) -> None:
    page.says(["one"])
    for text in ("first", "second"):
        page.send_and_wait(text)
        page.click("#new")
    page.until(lambda: len(at_server(server)) == 2)
    page.click("#list li:first-child .chat")
    page.click("[data-does=remove]")
    page.until(lambda: texts(server) == ["first", "one"])
    page.click("#restore")
    page.until(lambda: len(at_server(server)) == 2)
    page.run("return lastSync")
    for name in at_server(server):
        httpx.delete(f"{server.url}/conversations/{name}").raise_for_status()
    look(page)
    assert page.titles() == []
    page.until(lambda: page.kept() == [])
    assert "deleted in another tab or browser" in page.text("#unkept")
    page.reload()
    page.until(lambda: page.run("return serverKeeps"))
    look(page)
    assert (page.titles(), at_server(server)) == ([], {})


def test_what_the_server_does_not_take_stays_in_the_browser_with_a_sentence(page: Page, server: Process) -> None:
    page.says(["a" * 1_100_000])
    page.send_and_wait("first")
    page.until(lambda: "larger than 1048576 bytes" in page.text("#unkept"))
    page.until(lambda: len(page.kept()) == 1)
    page.says(["short"])
    page.click("#new")
    page.send_and_wait("second")
    page.until(lambda: "short" in texts(server))
    assert (page.done(), page.text_of()) == (True, "short")


def test_what_is_said_while_the_server_is_away_is_sent_when_it_is_back(page: Page, server: Process) -> None:
    page.run(
        """
        window.away = true;
        const real = window.fetch;
        window.fetch = async (path, options) => {
          if (window.away && path.startsWith("conversations")) throw new TypeError("away");
          return real(path, options);
        };
        """
    )
    page.talk("one")
    page.until(lambda: "The server cannot be reached" in page.text("#unkept"))
    assert texts(server) == []
    page.run("window.away = false")
    look(page)
    assert texts(server) == ["first", "one"]
    assert page.text("#unkept") == ""


def test_a_conversation_from_elsewhere_is_checked_as_a_file_is(page: Page, server: Process) -> None:
    wrong = {"role": "user", "text": 5, "children": "x"}
    fine = {"id": "d" * 16, "parent": None, "children": [], "shown": 9, "role": "user", "text": "<b>fine</b>"}
    head = {"title": ["x"], "settings": {"system": {}}, "children": ["d" * 16, "e" * 16, "f" * 16], "shown": -1}
    write(server, "b" * 16, head, {"d" * 16: fine, "e" * 16: wrong})
    look(page)
    assert page.titles() == ["<b>fine</b>"]
    page.click("button.chat")
    assert page.texts() == ["<b>fine</b>"]
