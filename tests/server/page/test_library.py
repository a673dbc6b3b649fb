"""Saved prompts, for the system prompt or a message."""

from __future__ import annotations

import json

import pytest

from tests.server.page.browser import ENTER, Browser
from tests.server.page.test_files import READ_BACK, import_text
from tests.server.page.visitor import asked, choose, says, send_and_wait


def names(page: Browser) -> list[str]:
    return page.run("return [...document.querySelectorAll('#prompts .name')].map(({textContent}) => textContent)")


def save(page: Browser, name: str) -> None:
    page.run("library.open = true")
    page.type("#prompt-name", name + ENTER)


@pytest.mark.slow
def test_a_prompt_is_saved_and_used_and_deleted(page: Browser) -> None:
    says(page, ["one"])
    save(page, "nothing")
    assert page.text("#prompt-says") == "Write the prompt first, as the system prompt or as a message."
    choose(page, system="Be <b>brief</b>.")
    page.run("document.getElementById('prompt-name').value = ''")
    save(page, "Short")
    assert (names(page), page.run("return document.getElementById('prompt-name').value")) == (["Short"], "")
    page.run("system.value = ''; system.dispatchEvent(new Event('input', {bubbles: true}))")
    page.reload()
    page.run("library.open = true")
    page.until(lambda: names(page) == ["Short"])
    says(page, ["one"])
    page.click("[aria-label='Use Short as the system prompt']")
    page.type("#message", "x ")
    page.click("[aria-label='Write Short into the message']")
    assert page.run("return [message.value, document.activeElement.id]") == ["x Be <b>brief</b>.", "message"]
    send_and_wait(page, "")
    assert [message["content"] for message in asked(page)["messages"]] == ["Be <b>brief</b>.", "x Be <b>brief</b>."]
    page.click("[aria-label='Delete Short']")
    assert names(page) == []


@pytest.mark.slow
def test_prompts_go_to_the_file_of_all_conversations_and_come_back(page: Browser) -> None:
    says(page, ["one"])
    choose(page, system="Be brief.")
    save(page, "Short")
    send_and_wait(page, "first")
    page.run(READ_BACK)
    page.click("#export-all")
    page.until(lambda: page.run("return window.exported"))
    text = page.run("return window.exported")
    assert json.loads(text)["prompts"] == [{"name": "Short", "text": "Be brief."}]
    page.run("localStorage.removeItem('polarlm.prompts'); drawPrompts()")
    assert names(page) == []
    import_text(page, text)
    assert names(page) == ["Short"]
    wrong = json.loads(text) | {"prompts": [{"name": 1, "text": "a"}, {"name": " "}, None, {"name": "b", "text": "c"}]}
    import_text(page, json.dumps(wrong))
    assert names(page) == ["b", "Short"]
