"""Saved prompts, for the system prompt or a message."""

from __future__ import annotations

import json

import pytest

from tests.server.page.browser import ENTER
from tests.server.page.visitor import Page

pytestmark = pytest.mark.slow


def names(page: Page) -> list[str]:
    return page.run("return [...document.querySelectorAll('#prompts .name')].map(({textContent}) => textContent)")


def save(page: Page, name: str) -> None:
    page.run("library.open = true; document.getElementById('prompt-name').value = ''")
    page.type("#prompt-name", name + ENTER)


def test_a_prompt_is_saved_and_used_and_deleted(page: Page) -> None:
    save(page, "nothing")
    assert page.text("#prompt-says") == "Write the prompt first, as the system prompt or as a message."
    page.choose(system="Be <b>brief</b>.")
    save(page, "Short")
    assert (names(page), page.run("return document.getElementById('prompt-name').value")) == (["Short"], "")
    page.run("system.value = ''; system.dispatchEvent(new Event('input', {bubbles: true}))")
    page.reload()
    page.run("library.open = true")
    page.until(lambda: names(page) == ["Short"])
    page.says(["one"])
    page.click("[aria-label='Use Short as the system prompt']")
    page.type("#message", "x ")
    page.click("[aria-label='Write Short into the message']")
    assert page.run("return [message.value, document.activeElement.id]") == ["x Be <b>brief</b>.", "message"]
    page.send_and_wait("")
    assert page.contents() == ["Be <b>brief</b>.", "x Be <b>brief</b>."]
    page.click("[aria-label='Delete Short']")
    assert names(page) == []


def test_prompts_go_to_the_file_of_all_conversations_and_come_back(page: Page) -> None:
    page.choose(system="Be brief.")
    save(page, "Short")
    page.talk("one")
    file = page.export()
    assert file["prompts"] == [{"name": "Short", "text": "Be brief."}]
    page.run("localStorage.removeItem('polarlm.prompts'); drawPrompts()")
    page.import_text(json.dumps(file))
    assert names(page) == ["Short"]
    wrong = file | {"prompts": [{"name": 1, "text": "a"}, {"name": " "}, None, {"name": "b", "text": "c"}]}
    page.import_text(json.dumps(wrong))
    assert names(page) == ["b", "Short"]
