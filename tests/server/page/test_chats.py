"""Conversations: they branch, and the browser keeps them."""

from __future__ import annotations

import pytest

from tests.server.page.browser import CONTROL, ENTER, ESCAPE, NO_MODIFIER, SHIFT
from tests.server.page.visitor import Page

pytestmark = pytest.mark.slow

UP, DELETE = "\ue013", "\ue017"

# -- branches --------------------------------------------------------------------------------------------------


def test_a_message_is_edited_and_both_answers_stay(page: Page) -> None:
    page.says(["one"], ["two"], ["three"])
    page.send_and_wait("first")
    page.send_and_wait("second")
    page.press_button("Edit", 0)
    assert page.run("return document.activeElement.value") == "first"
    page.type(".edit textarea", " edited" + ENTER)
    page.until(lambda: page.texts() == ["first edited", "three"] and page.done())
    assert page.contents() == ["first edited"]
    assert page.text(".arrows span") == "2/2"
    page.press_button("Earlier version", 0)
    assert page.texts() == ["first", "one", "second", "two"]
    assert page.text(".arrows span") == "1/2"
    assert page.focused() == "Later version"
    page.reload()
    page.until(lambda: page.texts() == ["first", "one", "second", "two"])
    page.press_button("Later version", 0)
    assert page.texts() == ["first edited", "three"]


def test_an_answer_is_generated_again_and_both_stay(page: Page) -> None:
    page.says(["one"], ["two"])
    page.send_and_wait("first")
    page.press_button("Regenerate")
    page.until(lambda: page.texts() == ["first", "two"] and page.done())
    assert page.contents() == ["first"]
    assert page.focused() == "message"
    page.press_button("Earlier version")
    assert page.texts() == ["first", "one"]
    page.send_and_wait("on")
    assert page.contents() == ["first", "one", "on"]


def test_an_answer_is_edited_and_the_server_goes_on_with_it(page: Page) -> None:
    page.says(["The sky is green."], [" and", " white."])
    page.send_and_wait("sky?")
    page.press_button("Edit")
    page.rewrite("The sky is **blue", "Save and continue")
    page.until(lambda: page.text_of() == "The sky is **blue and white." and page.done())
    assert page.request_body()["messages"][-1] == {"role": "assistant", "content": "The sky is **blue"}
    assert page.text(".answer") == "The sky is **blue and white."
    page.press_button("Earlier version")
    assert page.text_of() == "The sky is green."


def test_an_answer_is_edited_and_saved(page: Page) -> None:
    page.talk("one")
    page.press_button("Edit")
    page.rewrite("my own", "Save")
    assert page.texts() == ["first", "my own"]
    assert page.run("return asked.length") == 1
    assert page.focused() == "Edit"


def test_a_conversation_branches_after_an_answer(page: Page) -> None:
    page.choose(system="be brief")
    page.talk("one", "two")
    page.press_button("Branch", 1)
    assert (page.texts(), page.titles()) == (["first", "one"], ["first (branch)", "first"])
    assert page.run("return system.value") == "be brief"
    page.send_and_wait("elsewhere")
    assert page.contents() == ["be brief", "first", "one", "elsewhere"]
    page.until(lambda: len(page.kept()) == 2)
    ids = [set(chat["messages"]) for chat in page.kept()]
    assert not ids[0] & ids[1]
    page.run("history.back()")
    page.until(lambda: page.texts() == ["first", "one", "second", "two"])


def test_a_branch_after_a_question_waits_until_it_is_changed_or_answered(page: Page) -> None:
    page.says(["one"], ["other"])
    page.send_and_wait("first")
    page.press_button("Branch", 0)
    assert page.texts() == ["first"]
    assert page.focused() == "Answer"
    page.press(ENTER)
    page.until(lambda: page.texts() == ["first", "other"] and page.done())
    assert page.contents() == ["first"]


def test_up_in_an_empty_field_edits_the_last_message_and_escape_leaves_it(page: Page) -> None:
    page.talk("one")
    page.press(UP)
    assert page.run("return document.activeElement.value") == "first"
    page.press(ESCAPE)
    assert page.focused() == "Edit"
    assert page.texts() == ["first", "one"]
    page.type("#message", "x")
    page.press(UP)
    assert not page.shown(".edit")


# -- several conversations -------------------------------------------------------------------------------------


def test_conversations_survive_a_reload(page: Page) -> None:
    page.says(["one"], ["two"])
    page.choose(system="be brief")
    page.send_and_wait("first")
    page.click("#new")
    page.run("system.value = ''; system.dispatchEvent(new Event('input', {bubbles: true}))")
    page.send_and_wait("second")
    assert page.titles() == ["second", "first"]
    assert page.run("return document.title") == "second – PolarLM"
    page.reload()
    page.until(lambda: page.titles() == ["second", "first"])
    page.until(lambda: page.texts() == ["second", "two"])
    page.click("li:last-child .chat")
    assert page.texts() == ["first", "one"]
    assert page.run("return system.value") == "be brief"
    page.run("history.back()")
    page.until(lambda: page.texts() == ["second", "two"])
    assert page.run("return system.value") == ""


def test_leaving_a_conversation_ends_its_answer_and_keeps_what_has_come(page: Page) -> None:
    page.begin(["half", {"wait": 60000}], ["two"])
    page.click("#new")
    assert page.run("return window.signal.aborted")
    page.send_and_wait("second")
    page.click("li:last-child .chat")
    assert page.texts() == ["go", "half"]
    page.until(lambda: page.run("return rows.at(-1).message.ending") in ("stopped", "error"))


def test_search_finds_words_in_titles_and_texts(page: Page) -> None:
    page.says(["Rain in SPAIN"], ["snow"])
    page.send_and_wait("first")
    page.click("#new")
    page.send_and_wait("second")
    page.type("#search", "spain")
    assert page.titles() == ["first"]
    page.type("#search", "x")
    assert page.titles() == []
    assert page.text("#none") == "No conversation has these words in it."
    page.run("search.value = ''; search.dispatchEvent(new Event('input'))")
    assert len(page.titles()) == 2


@pytest.mark.parametrize("width", [1280, 390])
def test_keys_begin_a_chat_and_search_from_wherever_the_focus_is(page: Page, width: int) -> None:
    page.size(width, 800)
    page.talk("one")
    page.type("#message", f"{CONTROL}{SHIFT}o{NO_MODIFIER}")
    page.until(lambda: page.texts() == [] and page.focused() == "message")
    if width == 390:
        page.click("#open-settings")
    page.type("#system", f"{CONTROL}k{NO_MODIFIER}")
    assert page.focused() == "search"
    page.type("#search", "first")
    assert page.titles() == ["first"]
    page.type("#search", f"{CONTROL}{SHIFT}o{NO_MODIFIER}")
    page.until(lambda: page.focused() == "message")


def test_a_conversation_is_renamed(page: Page) -> None:
    page.talk("one")
    page.rename("Weather")
    page.run("listed = []; drawList()")
    assert page.run("return document.activeElement.value") == "Weather"
    page.press(ENTER)
    page.until(lambda: page.titles() == ["Weather"])
    assert page.run("return document.activeElement.dataset.does") == "rename"
    page.until(lambda: "Weather" in page.kept()[0]["title"])
    page.rename("x" + ESCAPE)
    assert page.titles() == ["Weather"]


def test_a_deleted_conversation_can_be_brought_back(page: Page) -> None:
    page.talk("one")
    page.click("[data-does=remove]")
    assert (page.titles(), page.roles()) == ([], [])
    page.until(lambda: page.kept() == [])
    assert page.text("#undone") == "Deleted “first”."
    (undo,) = [node for node in page.tree() if node["role"]["value"] == "button" and node["name"]["value"] == "Undo"]
    assert undo["description"]["value"] == "Deleted “first”."
    assert page.focused() == "restore"
    page.press(ENTER)
    assert page.texts() == ["first", "one"]
    page.until(lambda: len(page.kept()) == 1)
    assert not page.shown("#undo")


def three_chats(page: Page) -> None:
    """The list has conversations with the titles "third", "second" and "first"."""
    page.says(["one"])
    for text in ("first", "second", "third"):
        page.send_and_wait(text)
        page.click("#new")


def test_several_conversations_are_deleted_and_brought_back_together(page: Page) -> None:
    three_chats(page)
    page.click("#select")
    names = page.run("return [...document.querySelectorAll('#list input')].map(({labels: [it]}) => it.textContent)")
    assert names == ["third", "second", "first"]
    assert page.run("return document.getElementById('remove-picked').disabled")
    for place in (1, 3):
        page.click(f"#list li:nth-child({place}) input")
    assert page.text("#remove-picked") == "Delete 2"
    page.click("#remove-picked")
    assert page.titles() == ["second"]
    page.until(lambda: len(page.kept()) == 1)
    assert page.text("#undone") == "Deleted 2 conversations."
    page.press(ENTER)
    assert page.titles() == ["third", "second", "first"]
    page.until(lambda: len(page.kept()) == 3)
    page.click("#select")
    page.press(ENTER)  # All
    assert page.text("#remove-picked") == "Delete 3"
    page.press(ESCAPE)
    assert page.titles() == ["third", "second", "first"]
    assert page.focused() == "select"


def folders(page: Page) -> dict[str, list[str]]:
    """The names in each folder that the list shows; "" has the conversations that are in no folder."""
    script = """
        const names = (list) => [...list.querySelectorAll(":scope > li > .chat")].map(({textContent}) => textContent);
        const inside = [...document.querySelectorAll(".folder")].map((item) =>
            [item.querySelector("button").firstChild.data, names(item.querySelector("ul"))]);
        return Object.fromEntries([["", names(document.getElementById("list"))], ...inside]);
    """
    return page.run(script)


def test_conversations_are_put_into_folders(page: Page) -> None:
    three_chats(page)
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
    page.until(lambda: [chat["folder"] for chat in page.kept()] == ["Home"] * 3)
    page.click(".folder > button")
    assert folders(page) == {"": [], "Home": []}
    assert page.run("return document.activeElement.ariaExpanded") == "false"
    page.reload()
    page.until(lambda: folders(page) == {"": [], "Home": []})
    page.type("#search", "first")
    assert folders(page) == {"": [], "Home": ["first"]}


def test_a_conversation_leaves_its_folder(page: Page) -> None:
    page.talk("one")
    for name, shown_then in (("Work", {"": [], "Work": ["first"]}), (DELETE, {"": ["first"]})):
        page.click("[data-does=move]")
        page.type("#folder", name + ENTER)
        page.until(lambda shown_then=shown_then: folders(page) == shown_then)
    page.click("[data-does=move]")
    page.type("#folder", "Other" + ESCAPE)
    assert folders(page) == {"": ["first"]}
    assert not page.shown("#move")


def test_a_conversation_that_is_deleted_while_its_answer_comes_stays_deleted(page: Page) -> None:
    page.begin(["half", {"wait": 60000}])
    page.run(
        "window.ended = new Promise((done) => { const real = finish; finish = (...all) => { real(...all); done(); }; })"
    )
    page.click("[data-does=remove]")
    page.run("return window.ended.then(() => new Promise((done) => setTimeout(done, 100)))")
    assert (page.titles(), page.kept()) == ([], [])
