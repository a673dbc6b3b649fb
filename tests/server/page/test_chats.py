"""Conversations: they branch, and the browser keeps them."""

from __future__ import annotations

import json

import pytest

from tests.server.page.browser import ENTER, ESCAPE, Browser
from tests.server.page.visitor import (
    asked,
    buttons,
    choose,
    done,
    kept,
    press_button,
    roles,
    says,
    send,
    send_and_wait,
    shown,
    text_of,
    titles,
)


def messages(page: Browser) -> list[str]:
    return [message["content"] for message in asked(page)["messages"]]


# -- branches --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_message_is_edited_and_both_answers_stay(page: Browser) -> None:
    says(page, ["one"], ["two"], ["three"])
    send_and_wait(page, "first")
    send_and_wait(page, "second")
    press_button(page, "Edit", 0)
    assert page.run("return document.activeElement.value") == "first"
    page.type(".edit textarea", " edited" + ENTER)
    page.until(lambda: shown(page) == ["first edited", "three"] and done(page))
    assert messages(page) == ["first edited"]
    assert page.text(".arrows span") == "2/2"
    press_button(page, "Earlier version", 0)
    assert shown(page) == ["first", "one", "second", "two"]
    assert page.text(".arrows span") == "1/2"
    assert page.run("return document.activeElement.getAttribute('aria-label')") == "Later version"
    page.reload()
    page.until(lambda: shown(page) == ["first", "one", "second", "two"])
    press_button(page, "Later version", 0)
    assert shown(page) == ["first edited", "three"]


@pytest.mark.slow
def test_an_answer_is_generated_again_and_both_stay(page: Browser) -> None:
    says(page, ["one"], ["two"])
    send_and_wait(page, "first")
    press_button(page, "Regenerate")
    page.until(lambda: shown(page) == ["first", "two"] and done(page))
    assert messages(page) == ["first"]
    assert page.run("return document.activeElement.id") == "message"
    press_button(page, "Earlier version")
    assert shown(page) == ["first", "one"]
    send_and_wait(page, "on")
    assert messages(page) == ["first", "one", "on"]


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_conversation_branches_after_an_answer(page: Browser) -> None:
    says(page, ["one"], ["two"], ["other"])
    choose(page, system="be brief")
    send_and_wait(page, "first")
    send_and_wait(page, "second")
    press_button(page, "Branch", 1)
    assert (shown(page), titles(page)) == (["first", "one"], ["first (branch)", "first"])
    assert page.run("return system.value") == "be brief"
    send_and_wait(page, "elsewhere")
    assert messages(page) == ["be brief", "first", "one", "elsewhere"]
    page.until(lambda: len(kept(page)) == 2)
    ids = [set(chat["messages"]) for chat in kept(page)]
    assert not ids[0] & ids[1]
    page.run("history.back()")
    page.until(lambda: shown(page) == ["first", "one", "second", "two"])


@pytest.mark.slow
def test_a_branch_after_a_question_waits_until_it_is_changed_or_answered(page: Browser) -> None:
    says(page, ["one"], ["other"])
    send_and_wait(page, "first")
    press_button(page, "Branch", 0)
    assert shown(page) == ["first"]
    assert page.run("return document.activeElement.textContent") == "Answer"
    page.press(ENTER)
    page.until(lambda: shown(page) == ["first", "other"] and done(page))
    assert messages(page) == ["first"]


@pytest.mark.slow
def test_an_edited_answer_is_kept_without_asking(page: Browser) -> None:
    says(page, ["one"])
    send_and_wait(page, "first")
    press_button(page, "Edit")
    page.run("document.activeElement.value = 'my own'")
    press_button(page, "Save")
    assert shown(page) == ["first", "my own"]
    assert page.run("return asked.length") == 1


@pytest.mark.slow
def test_up_in_an_empty_field_edits_the_last_message_and_escape_leaves_it(page: Browser) -> None:
    says(page, ["one"])
    send_and_wait(page, "first")
    page.press("\ue013")  # Up
    assert page.run("return document.activeElement.value") == "first"
    page.press(ESCAPE)
    assert page.run("return document.activeElement.textContent") == "Edit"
    assert shown(page) == ["first", "one"]
    page.type("#message", "x")
    page.press("\ue013")
    assert not page.shown(".edit")


# -- several conversations -------------------------------------------------------------------------------------


@pytest.mark.slow
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
    page.until(lambda: shown(page) == ["second", "two"])
    page.click("li:last-child .chat")
    assert shown(page) == ["first", "one"]
    assert page.run("return system.value") == "be brief"
    page.run("history.back()")
    page.until(lambda: shown(page) == ["second", "two"])
    assert page.run("return system.value") == ""


@pytest.mark.slow
def test_what_has_come_of_an_answer_survives_a_reload(page: Browser) -> None:
    says(page, ["half ", {"wait": 2500}, "an answer", {"wait": 60000}])
    send(page, "first")
    page.until(lambda: text_of(page) == "half an answer")
    page.until(lambda: kept(page)[0]["messages"] and "half an answer" in json.dumps(kept(page)))
    page.reload()
    page.until(lambda: text_of(page) == "half an answer")
    assert "Continue" in buttons(page)


@pytest.mark.slow
def test_leaving_a_conversation_ends_its_answer_and_keeps_what_has_come(page: Browser) -> None:
    says(page, ["half", {"wait": 60000}], ["two"])
    send(page, "first")
    page.until(lambda: text_of(page) == "half")
    page.click("#new")
    assert page.run("return window.signal.aborted")
    send_and_wait(page, "second")
    page.click("li:last-child .chat")
    assert shown(page) == ["first", "half"]
    page.until(lambda: page.run("return rows.at(-1).message.ending") in ("stopped", "error"))


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_deleted_conversation_can_be_brought_back(page: Browser) -> None:
    says(page, ["one"])
    send_and_wait(page, "first")
    page.click("[data-does=remove]")
    assert (titles(page), roles(page)) == ([], [])
    page.until(lambda: kept(page) == [])
    assert page.text("#undone") == "Deleted “first”."
    assert page.run("return document.activeElement.id") == "restore"
    page.press(ENTER)
    assert shown(page) == ["first", "one"]
    page.until(lambda: len(kept(page)) == 1)
    assert not page.shown("#undo")


@pytest.mark.slow
def test_several_conversations_are_deleted_and_brought_back_together(page: Browser) -> None:
    says(page, ["one"])
    for text in ("first", "second", "third"):
        send_and_wait(page, text)
        page.click("#new")
    page.click("#select")
    assert page.run("return [...document.querySelectorAll('#list input')].map(({labels: [it]}) => it.textContent)") == [
        *("third", "second", "first")
    ]
    assert page.run("return document.getElementById('remove-picked').disabled")
    for place in (1, 3):
        page.click(f"#list li:nth-child({place}) input")
    assert page.text("#remove-picked") == "Delete 2"
    page.click("#remove-picked")
    assert titles(page) == ["second"]
    page.until(lambda: len(kept(page)) == 1)
    assert page.text("#undone") == "Deleted 2 conversations."
    page.press(ENTER)
    assert titles(page) == ["third", "second", "first"]
    page.until(lambda: len(kept(page)) == 3)
    page.click("#select")
    page.press(ENTER)  # All
    assert page.text("#remove-picked") == "Delete 3"
    page.press(ESCAPE)
    assert titles(page) == ["third", "second", "first"]
    assert page.run("return document.activeElement.id") == "select"


def folders(page: Browser) -> dict[str, list[str]]:
    """The names in each folder that the list shows; those of "" are in none."""
    script = """
        const names = (list) => [...list.querySelectorAll(":scope > li > .chat")].map(({textContent}) => textContent);
        const inside = [...document.querySelectorAll(".folder")].map((item) =>
            [item.querySelector("button").firstChild.data, names(item.querySelector("ul"))]);
        return Object.fromEntries([["", names(document.getElementById("list"))], ...inside]);
    """
    return page.run(script)


@pytest.mark.slow
def test_conversations_are_put_into_folders(page: Browser) -> None:
    says(page, ["one"])
    for text in ("first", "second", "third"):
        send_and_wait(page, text)
        page.click("#new")
    page.click("#list li:first-child .chat")
    page.click("[data-does=move]")
    page.type("#folder", "Work" + ENTER)
    assert folders(page) == {"": ["second", "first"], "Work": ["third"]}
    assert page.run("return document.activeElement.dataset.does") == "move"
    page.click("#select")
    page.press(ENTER)  # All
    page.click("#move-picked")
    page.type("#folder", "Home" + ENTER)
    assert folders(page) == {"": [], "Home": ["third", "second", "first"]}
    page.until(lambda: [chat["folder"] for chat in kept(page)] == ["Home"] * 3)
    page.click(".folder > button")
    assert folders(page) == {"": [], "Home": []}
    assert page.run("return document.activeElement.ariaExpanded") == "false"
    page.reload()
    page.until(lambda: folders(page) == {"": [], "Home": []})
    page.type("#search", "first")
    assert folders(page) == {"": [], "Home": ["first"]}


@pytest.mark.slow
def test_a_conversation_leaves_its_folder(page: Browser) -> None:
    says(page, ["one"])
    send_and_wait(page, "first")
    for name, shown_then in (("Work", {"": [], "Work": ["first"]}), ("\ue017", {"": ["first"]})):  # Delete
        page.click("[data-does=move]")
        page.type("#folder", name + ENTER)
        page.until(lambda shown_then=shown_then: folders(page) == shown_then)
    page.click("[data-does=move]")
    page.type("#folder", "Other" + ESCAPE)
    assert folders(page) == {"": ["first"]}
    assert not page.shown("#move")


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert shown(page) == ["first", "one"]
