"""Conversations: they branch, and the browser keeps them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.page.browser import ENTER, ESCAPE, Browser
from tests.server.page.visitor import (
    asked,
    buttons,
    choose,
    done,
    press_button,
    roles,
    says,
    send,
    send_and_wait,
    text_of,
)

SHOWN = "return rows.map(({message}) => message.text)"


def titles(page: Browser) -> list[str]:
    return page.run("return [...document.querySelectorAll('button.chat')].map((made) => made.textContent)")


def kept(page: Browser) -> list[dict[str, Any]]:
    """The conversations in the browser's database."""
    return page.run("return granted(database.transaction(SHELF).objectStore(SHELF).getAll())")


def messages(page: Browser) -> list[str]:
    return [message["content"] for message in asked(page)["messages"]]


# -- branches --------------------------------------------------------------------------------------------------


def test_a_message_is_edited_and_both_answers_stay(page: Browser) -> None:
    says(page, ["one"], ["two"], ["three"])
    send_and_wait(page, "first")
    send_and_wait(page, "second")
    press_button(page, "Edit", 0)
    assert page.run("return document.activeElement.value") == "first"
    page.type(".edit textarea", " edited" + ENTER)
    page.until(lambda: page.run(SHOWN) == ["first edited", "three"] and done(page))
    assert messages(page) == ["first edited"]
    assert page.text(".arrows span") == "2/2"
    press_button(page, "Earlier version", 0)
    assert page.run(SHOWN) == ["first", "one", "second", "two"]
    assert page.text(".arrows span") == "1/2"
    assert page.run("return document.activeElement.getAttribute('aria-label')") == "Later version"
    page.reload()
    page.until(lambda: page.run(SHOWN) == ["first", "one", "second", "two"])
    press_button(page, "Later version", 0)
    assert page.run(SHOWN) == ["first edited", "three"]


def test_an_answer_is_generated_again_and_both_stay(page: Browser) -> None:
    says(page, ["one"], ["two"])
    send_and_wait(page, "first")
    press_button(page, "Regenerate")
    page.until(lambda: page.run(SHOWN) == ["first", "two"] and done(page))
    assert messages(page) == ["first"]
    assert page.run("return document.activeElement.id") == "message"
    press_button(page, "Earlier version")
    assert page.run(SHOWN) == ["first", "one"]
    send_and_wait(page, "on")
    assert messages(page) == ["first", "one", "on"]


def test_an_answer_is_edited_and_the_server_goes_on_with_it(page: Browser) -> None:
    says(page, ["The sky is green."], [" and", " white."])
    send_and_wait(page, "sky?")
    press_button(page, "Edit")
    page.run("document.activeElement.value = 'The sky is **blue'")
    page.click(".edit .main")
    page.until(lambda: text_of(page) == "The sky is **blue and white." and done(page))
    assert asked(page)["messages"][-1] == {"role": "assistant", "content": "The sky is **blue"}
    assert page.text(".answer") == "The sky is **blue and white."
    assert page.run("return rows.length") == 2
    press_button(page, "Earlier version")
    assert text_of(page) == "The sky is green."


def test_the_real_server_goes_on_with_an_answer(page: Browser) -> None:
    choose(page, temperature=0, max_tokens=12)
    send_and_wait(page, "a")
    whole = text_of(page)
    page.run("max_tokens.value = 5; max_tokens.dispatchEvent(new Event('input', {bubbles: true}))")
    press_button(page, "Regenerate")
    page.until(lambda: done(page) and 0 < len(text_of(page)) < len(whole))
    assert "Continue" in buttons(page)
    part = text_of(page)
    assert whole.startswith(part)
    press_button(page, "Continue")
    page.until(lambda: done(page) and len(text_of(page)) > len(part))
    assert text_of(page).startswith(part)


def test_an_edited_answer_is_kept_without_asking(page: Browser) -> None:
    says(page, ["one"])
    send_and_wait(page, "first")
    press_button(page, "Edit")
    page.run("document.activeElement.value = 'my own'")
    press_button(page, "Save")
    assert page.run(SHOWN) == ["first", "my own"]
    assert page.run("return asked.length") == 1


def test_up_in_an_empty_field_edits_the_last_message_and_escape_leaves_it(page: Browser) -> None:
    says(page, ["one"])
    send_and_wait(page, "first")
    page.press("\ue013")  # Up
    assert page.run("return document.activeElement.value") == "first"
    page.press(ESCAPE)
    assert page.run("return document.activeElement.textContent") == "Edit"
    assert page.run(SHOWN) == ["first", "one"]
    page.type("#message", "x")
    page.press("\ue013")
    assert not page.shown(".edit")


# -- several conversations -------------------------------------------------------------------------------------


def test_conversations_survive_a_reload(page: Browser) -> None:
    says(page, ["one"], ["two"])
    choose(page, system="be brief")
    send_and_wait(page, "first")
    page.click("#new")
    page.run("system.value = ''; system.dispatchEvent(new Event('input', {bubbles: true}))")
    send_and_wait(page, "second")
    assert titles(page) == ["second", "first"]
    assert page.run("return document.title") == "second – PolarLM"
    page.reload()
    page.until(lambda: titles(page) == ["second", "first"])
    page.until(lambda: page.run(SHOWN) == ["second", "two"])
    page.click("li:last-child .chat")
    assert page.run(SHOWN) == ["first", "one"]
    assert page.run("return system.value") == "be brief"
    page.run("history.back()")
    page.until(lambda: page.run(SHOWN) == ["second", "two"])
    assert page.run("return system.value") == ""


def test_what_has_come_of_an_answer_survives_a_reload(page: Browser) -> None:
    says(page, ["half ", {"wait": 2500}, "an answer", {"wait": 60000}])
    send(page, "first")
    page.until(lambda: text_of(page) == "half an answer")
    page.until(lambda: kept(page)[0]["messages"] and "half an answer" in json.dumps(kept(page)))
    page.reload()
    page.until(lambda: text_of(page) == "half an answer")
    assert "Continue" in buttons(page)


def test_leaving_a_conversation_ends_its_answer_and_keeps_what_has_come(page: Browser) -> None:
    says(page, ["half", {"wait": 60000}], ["two"])
    send(page, "first")
    page.until(lambda: text_of(page) == "half")
    page.click("#new")
    assert page.run("return window.signal.aborted")
    send_and_wait(page, "second")
    page.click("li:last-child .chat")
    assert page.run(SHOWN) == ["first", "half"]
    page.until(lambda: page.run("return rows.at(-1).message.ending") in ("stopped", "error"))


def test_search_finds_words_in_titles_and_texts(page: Browser) -> None:
    says(page, ["Rain in SPAIN"], ["snow"])
    send_and_wait(page, "first")
    page.click("#new")
    send_and_wait(page, "second")
    page.type("#search", "spain")
    assert titles(page) == ["first"]
    page.type("#search", "x")
    assert titles(page) == []
    assert page.text("#none") == "No conversation has these words in it."
    page.run("search.value = ''; search.dispatchEvent(new Event('input'))")
    assert len(titles(page)) == 2


def test_a_conversation_is_renamed(page: Browser) -> None:
    says(page, ["one"])
    send_and_wait(page, "first")
    page.click("[data-does=rename]")
    page.until(lambda: page.run("return document.activeElement.tagName") == "INPUT")  # its text is selected
    page.run("drawList()")
    assert page.run("return document.activeElement.tagName") == "INPUT"
    page.type("#list input", "Weather" + ENTER)
    page.until(lambda: titles(page) == ["Weather"])
    assert page.run("return document.activeElement.dataset.does") == "rename"
    page.until(lambda: "Weather" in kept(page)[0]["title"])
    page.click("[data-does=rename]")
    page.type("#list input", "x" + ESCAPE)
    assert titles(page) == ["Weather"]


def test_a_deleted_conversation_can_be_brought_back(page: Browser) -> None:
    says(page, ["one"])
    send_and_wait(page, "first")
    page.click("[data-does=remove]")
    assert (titles(page), roles(page)) == ([], [])
    page.until(lambda: kept(page) == [])
    assert page.text("#undone") == "Deleted “first”."
    assert page.run("return document.activeElement.id") == "restore"
    page.press(ENTER)
    assert page.run(SHOWN) == ["first", "one"]
    page.until(lambda: len(kept(page)) == 1)
    assert not page.shown("#undo")


def test_a_conversation_that_is_deleted_while_its_answer_comes_stays_deleted(page: Browser) -> None:
    says(page, ["half", {"wait": 60000}])
    send(page, "first")
    page.until(lambda: text_of(page) == "half")
    page.run(
        "window.ended = new Promise((done) => { const real = finish; finish = (...all) => { real(...all); done(); }; })"
    )
    page.click("[data-does=remove]")
    page.run("return window.ended.then(() => new Promise((done) => setTimeout(done, 100)))")
    assert (titles(page), kept(page)) == ([], [])


def test_another_tab_hears_of_changes(page: Browser) -> None:
    says(page, ["one"])
    send_and_wait(page, "first")
    script = """
        const other = structuredClone(current), tab = new BroadcastChannel("polarlm");
        const shelf = database.transaction(SHELF, "readwrite").objectStore(SHELF);
        await granted(shelf.put({...other, title: "from another tab", named: Date.now()}));
        tab.postMessage(other.id);
    """
    page.run(f"return (async () => {{ {script} }})()")
    page.until(lambda: titles(page) == ["from another tab"])
    assert page.run(SHOWN) == ["first", "one"]


# -- files -----------------------------------------------------------------------------------------------------

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


def test_conversations_go_to_a_file_and_come_back(page: Browser) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": "{}"}}
    says(page, [{"reasoning_content": "hm"}, "one"], [{"tool_calls": [call]}])
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
    assert page.run(SHOWN) == ["first", "one", "second", "two", "third", "three"]
    for message in file["conversations"][0]["messages"].values():  # as if it had been continued elsewhere
        if message["text"] == "first":
            message["children"].append("00000000000000ff")
            more = {"role": "assistant", "text": "elsewhere", "children": [], "parent": message["id"]}
    file["conversations"][0]["messages"]["00000000000000ff"] = more
    import_text(page, json.dumps(file))
    assert page.run(SHOWN) == ["first", "one", "second", "two", "third", "three"]
    press_button(page, "Later version", 1)
    assert page.run(SHOWN) == ["first", "elsewhere"]
    page.until(lambda: len(kept(page)) == 1 and "elsewhere" in json.dumps(kept(page)))


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
    assert page.run(SHOWN) == ["first", "one"]
    assert page.run("return Object.values(current.messages).flatMap(({children}) => children).length") == 1


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


def test_a_file_cannot_bring_loops_or_values_of_other_kinds(page: Browser) -> None:
    hostile = {
        "title": {"a": 1},
        "shown": 99,
        "children": ["a", "a", "__proto__", "gone", 5],
        "settings": {"system": 5, "temperature": "x", "loop_check": False, "other": 1},
        "messages": {
            "a": {"role": "user", "text": ["<b>"], "children": ["b", "a"], "shown": -1},
            "b": {
                "role": "assistant",
                "text": "<b>hi</b>",
                "children": ["a", "c"],
                "calls": [None, {"name": 7}],
                "usage": {"prompt": "x"},
            },
            "c": {"role": "system", "text": "no", "children": []},
        },
    }
    text = json.dumps({"format": "polarlm-conversations", "conversations": [hostile]})
    assert import_text(page, text) == "1 conversation imported."
    page.click("button.chat")
    assert roles(page) == ["user", "assistant"]
    assert text_of(page) == "<b>hi</b>"
    assert page.run("return current.settings") == {"system": "5", "temperature": "x", "loop_check": False}
