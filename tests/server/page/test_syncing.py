"""Conversations at the server: the same in every browser, and no browser overwrites another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.page.browser import Browser
from tests.server.page.visitor import done, kept, press_button, says, send_and_wait, shown, text_of, titles
from tests.server.process import Process


@pytest.fixture(scope="module")
def keeper(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("keeper")
    with Process(tiny_path, folder, "--conversations", str(folder / "kept")) as process:
        yield process


@pytest.fixture
def page(visit: Callable[[Process], Browser], keeper: Process) -> Iterator[Browser]:
    """The page of a server that keeps conversations, none yet."""
    for name in at_server(keeper):
        httpx.delete(f"{keeper.url}/conversations/{name}").raise_for_status()
    page = visit(keeper)
    page.until(lambda: page.run("return keeps"))
    yield page
    page.open("about:blank")


def at_server(keeper: Process) -> dict[str, Any]:
    """The conversations that the server has, by id."""
    told = json.loads(keeper.get("/conversations"))["conversations"]
    return {name: change for name, change in told.items() if change["head"] is not None}


def texts(keeper: Process) -> list[str]:
    """Of all messages that the server has."""
    chats = at_server(keeper).values()
    return sorted(message.get("text", "") for chat in chats for message in chat["messages"].values())


def write(keeper: Process, name: str, head: dict[str, Any], messages: dict[str, Any]) -> None:
    """A change as another browser makes it."""
    base = json.loads(keeper.get("/conversations"))["revision"]
    body = {"base": base, "head": head, "messages": messages}
    httpx.post(f"{keeper.url}/conversations/{name}", json=body).raise_for_status()


def look(page: Browser) -> None:
    """Looks for news now, and not only in five seconds."""
    page.run("return sync()")


@pytest.mark.slow
def test_a_browser_that_has_nothing_gets_what_another_one_said(
    page: Browser, keeper: Process, visit: Callable[[Process], Browser]
) -> None:
    assert page.text("#where") == "Conversations are kept at this server, and in this browser."
    says(page, ["one"])
    send_and_wait(page, "first")
    page.until(lambda: texts(keeper) == ["first", "one"])
    visit(keeper)  # a new browser: nothing is kept in it
    page.until(lambda: titles(page) == ["first"])
    page.click("button.chat")
    assert shown(page) == ["first", "one"]
    page.until(lambda: len(kept(page)) == 1)
    says(page, ["two"])
    send_and_wait(page, "second")
    page.until(lambda: texts(keeper) == ["first", "one", "second", "two"])


@pytest.mark.slow
def test_changes_of_two_browsers_both_stay(page: Browser, keeper: Process) -> None:
    says(page, ["one"], ["two"])
    send_and_wait(page, "first")
    page.until(lambda: texts(keeper) == ["first", "one"])
    page.run("return syncing")
    ((name, chat),) = at_server(keeper).items()
    last = next(key for key, message in chat["messages"].items() if message["text"] == "one")
    new = {"id": "c" * 16, "parent": last, "children": [], "shown": 0, "role": "user", "text": "elsewhere"}
    other = chat["messages"][last] | {"children": ["c" * 16]}
    write(keeper, name, chat["head"], {last: other, "c" * 16: new})  # which this page has not seen yet
    send_and_wait(page, "second")
    page.until(lambda: texts(keeper) == ["elsewhere", "first", "one", "second", "two"])
    page.until(lambda: page.run("return Object.values(current.messages).length") == 5)
    page.run("return syncing")
    children = at_server(keeper)[name]["messages"][last]["children"]
    assert len(children) == 2
    assert shown(page) == ["first", "one", "second", "two"]
    press_button(page, "Earlier version", 2)
    assert shown(page)[-1] == "elsewhere"


@pytest.mark.slow
def test_a_deletion_here_and_elsewhere(page: Browser, keeper: Process) -> None:
    says(page, ["one"])
    for text in ("first", "second"):
        send_and_wait(page, text)
        page.click("#new")
    page.until(lambda: len(at_server(keeper)) == 2)
    page.click("#list li:first-child .chat")
    page.click("[data-does=remove]")
    page.until(lambda: texts(keeper) == ["first", "one"])
    page.click("#restore")
    page.until(lambda: len(at_server(keeper)) == 2)
    page.run("return syncing")
    for name in at_server(keeper):
        httpx.delete(f"{keeper.url}/conversations/{name}").raise_for_status()
    look(page)
    assert titles(page) == []
    page.until(lambda: kept(page) == [])
    assert "deleted in another tab or browser" in page.text("#unkept")
    page.reload()
    page.until(lambda: page.run("return keeps"))
    look(page)
    assert (titles(page), at_server(keeper)) == ([], {})


@pytest.mark.slow
def test_what_the_server_does_not_take_stays_in_the_browser_with_a_sentence(page: Browser, keeper: Process) -> None:
    says(page, ["a" * 1_100_000])
    send_and_wait(page, "first")
    page.until(lambda: "larger than 1048576 bytes" in page.text("#unkept"))
    page.until(lambda: len(kept(page)) == 1)
    says(page, ["short"])
    page.click("#new")
    send_and_wait(page, "second")
    page.until(lambda: "short" in texts(keeper))
    assert (done(page), text_of(page)) == (True, "short")


@pytest.mark.slow
def test_what_is_said_while_the_server_is_away_is_sent_when_it_is_back(page: Browser, keeper: Process) -> None:
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
    says(page, ["one"])
    send_and_wait(page, "first")
    page.until(lambda: "The server cannot be reached" in page.text("#unkept"))
    assert texts(keeper) == []
    page.run("window.away = false")
    look(page)
    assert texts(keeper) == ["first", "one"]
    assert page.text("#unkept") == ""


@pytest.mark.slow
def test_a_conversation_from_elsewhere_is_checked_as_a_file_is(page: Browser, keeper: Process) -> None:
    wrong = {"role": "user", "text": 5, "children": "x"}
    fine = {"id": "d" * 16, "parent": None, "children": [], "shown": 9, "role": "user", "text": "<b>fine</b>"}
    head = {"title": ["x"], "settings": {"system": {}}, "children": ["d" * 16, "e" * 16, "f" * 16], "shown": -1}
    write(keeper, "b" * 16, head, {"d" * 16: fine, "e" * 16: wrong})
    look(page)
    assert titles(page) == ["<b>fine</b>"]
    page.click("button.chat")
    assert shown(page) == ["<b>fine</b>"]
