"""Files of conversations: what is exported comes back, and what is here stays."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.page.browser import ENTER, Browser
from tests.server.page.visitor import (
    done,
    figures,
    kept,
    press_button,
    roles,
    says,
    send_and_wait,
    shown,
    text_of,
    titles,
)

READ_BACK = """
    window.exported = null;
    URL.createObjectURL = (blob) => { blob.text().then((text) => { window.exported = text; }); return "#"; };
"""


def tree(page: Browser) -> list[Any]:
    """The conversation that is shown, without the ids of its messages."""
    script = """
        const behind = (holder) => holder.children.map((id) => {
            const {id: _, parent, children, shown, drafts, ...message} = current.messages[id];
            return [message, behind(current.messages[id])];
        });
        return behind(current);
    """
    return page.run(script)


def import_text(page: Browser, text: str) -> str:
    script = """
        const files = new DataTransfer();
        files.items.add(new File([arguments[0]], "chats.json"));
        document.getElementById("shelf-says").textContent = "";
        file.files = files.files;
        file.dispatchEvent(new Event("change"));
    """
    page.run(script, text)
    page.until(lambda: page.text("#shelf-says"))
    return page.text("#shelf-says")


@pytest.mark.slow
def test_conversations_go_to_a_file_and_come_back(page: Browser) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": "{}"}}
    cached = {"cached_tokens": 7, "cached_from": {"store": 4, "disk": 3}}
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10, "prompt_tokens_details": cached}
    one = [{"reasoning_content": "hm"}, "one", {"event": {"choices": [], "usage": usage}}]
    says(page, one, [{"tool_calls": [call]}])
    send_and_wait(page, "first")
    press_button(page, "Edit", 0)
    page.type(".edit textarea", "2" + ENTER)
    page.until(lambda: page.run("return rows[0].message.text") == "first2" and done(page))
    before = page.run(
        "return [current.children.length, Object.values(current.messages).map(({id, parent, children, ...m}) => m)]"
    )
    page.run(READ_BACK)
    page.click("#export-all")
    page.until(lambda: page.run("return window.exported"))
    text = page.run("return window.exported")
    assert json.loads(text)["format"] == "polarlm-conversations"
    page.click("[data-does=remove]")
    page.until(lambda: kept(page) == [])
    assert import_text(page, text) == "1 conversation imported."
    assert titles(page) == ["first2"]
    page.click("button.chat")
    after = page.run(
        "return [current.children.length, Object.values(current.messages).map(({id, parent, children, ...m}) => m)]"
    )
    key = json.dumps
    assert after[0] == before[0] == 2
    plain = [
        sorted(key({n: v for n, v in m.items() if v is not None}, sort_keys=True) for m in side)
        for side in (before[1], after[1])
    ]
    assert plain[0] == plain[1]


@pytest.mark.slow
def test_a_file_of_a_conversation_that_is_here_adds_what_it_has_more(page: Browser) -> None:
    says(page, ["one"], ["two"], ["three"])
    send_and_wait(page, "first")
    send_and_wait(page, "second")
    page.run(READ_BACK)
    page.click("#export-all")
    page.until(lambda: page.run("return window.exported"))
    file = json.loads(page.run("return window.exported"))
    said = "1 conversation was here already: what the file has more is added."
    assert import_text(page, json.dumps(file)) == said
    assert titles(page) == ["first"]
    send_and_wait(page, "third")  # after the file was written
    assert import_text(page, json.dumps(file)) == said
    assert shown(page) == ["first", "one", "second", "two", "third", "three"]
    for message in file["conversations"][0]["messages"].values():  # as if it had been continued elsewhere
        if message["text"] == "first":
            message["children"].append("00000000000000ff")
            more = {"role": "assistant", "text": "elsewhere", "children": [], "parent": message["id"]}
    file["conversations"][0]["messages"]["00000000000000ff"] = more
    import_text(page, json.dumps(file))
    assert shown(page) == ["first", "one", "second", "two", "third", "three"]
    press_button(page, "Later version", 1)
    assert shown(page) == ["first", "elsewhere"]
    page.until(lambda: len(kept(page)) == 1 and "elsewhere" in json.dumps(kept(page)))


@pytest.mark.slow
def test_a_file_that_turns_a_conversation_around_changes_nothing(page: Browser) -> None:
    says(page, ["one"])
    send_and_wait(page, "first")
    page.run(READ_BACK)
    page.click("#export-all")
    page.until(lambda: page.run("return window.exported"))
    file = json.loads(page.run("return window.exported"))
    (chat,) = file["conversations"]
    question, reply = (
        next(m for m in chat["messages"].values() if m["role"] == role) for role in ("user", "assistant")
    )
    chat["children"], reply["children"], question["children"] = [reply["id"]], [question["id"]], []
    import_text(page, json.dumps(file))
    assert shown(page) == ["first", "one"]
    assert page.run("return Object.values(current.messages).flatMap(({children}) => children).length") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": "polarlm-conversations"}',
        '{"format": "polarlm-conversations", "conversations": [7]}',
        '{"format": "polarlm-conversations", "conversations": [{"messages": {}, "children": 1}]}',
        '{"format": "other", "conversations": []}',
    ],
)
def test_a_file_of_something_else_is_refused_in_a_sentence(page: Browser, text: str) -> None:
    assert import_text(page, text) in ("This file is not JSON.", "This file has no conversations of this page in it.")
    assert titles(page) == []


@pytest.mark.slow
def test_a_file_cannot_bring_loops_or_values_of_other_kinds(page: Browser) -> None:
    hostile = {
        "title": {"a": 1},
        "shown": 99,
        "children": ["a", "a", "__proto__", "gone", 5],
        "settings": {"system": 5, "temperature": "x", "loop_check": False, "other": 1},
        "messages": {
            "a": {"role": "user", "text": ["<b>"], "children": ["b", "a", "d"], "shown": -1},
            "b": {
                "role": "assistant",
                "text": "<b>hi</b>",
                "children": ["a", "c"],
                "calls": [None, {"name": 7}],
                "usage": {"prompt": "x"},
            },
            "d": {
                "role": "assistant",
                "text": "again",
                "ending": "stop",
                "usage": {"prompt": 9, "completion": 1, "cached": 3, "places": {"disk": 3, "ram": "<b>"}},
            },
            "c": {"role": "system", "text": "no", "children": []},
        },
    }
    text = json.dumps({"format": "polarlm-conversations", "conversations": [hostile]})
    assert import_text(page, text) == "1 conversation imported."
    page.click("button.chat")
    assert roles(page) == ["user", "assistant"]
    assert text_of(page) == "<b>hi</b>"
    press_button(page, "Later version", 1)
    assert figures(page) == "3 of 9 prompt tokens from the cache (3 from disk) · 1 token"
    assert page.run("return current.settings") == {"system": "5", "temperature": "x", "loop_check": False}
