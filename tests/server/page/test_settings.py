"""Settings on the page: they stay, empty ones show what is in force, and invalid ones lose no message."""

from __future__ import annotations

import json

import pytest

from tests.server.page.browser import Browser
from tests.server.page.visitor import answer, asked, choose, done, says, send, send_and_wait
from tests.server.process import Process


@pytest.mark.slow
def test_settings_are_there_after_a_reload(page: Browser) -> None:
    chosen = {"system": "be brief", "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
    chosen |= {"repeat_penalty": 1.1, "max_tokens": 99, "seed": 5}
    choose(page, **chosen)
    page.reload()
    fields = {name: page.run("return document.getElementById(arguments[0]).value", name) for name in chosen}
    assert fields == {name: str(value) for name, value in chosen.items()}
    page.click("#fields button[type=reset]")
    page.until(lambda: page.run("return localStorage.getItem('polarlm.settings')") == "{}")


@pytest.mark.slow
def test_empty_fields_show_what_is_in_force(page: Browser, server: Process) -> None:
    params = json.loads(server.get("/props"))["default_generation_settings"]["params"]
    for name in ("temperature", "top_p", "top_k", "min_p", "repeat_penalty", "dry_multiplier"):
        assert float(page.run("return document.getElementById(arguments[0]).placeholder", name)) == params[name]
    assert page.run("return [max_tokens, seed, cache_salt].map(({placeholder}) => placeholder)") == [
        "No limit",
        "Random",
        "None",
    ]
    choose(page, dry_multiplier=0.5)
    says(page, ["one"])
    send_and_wait(page, "first")
    assert asked(page)["dry_multiplier"] == 0.5
    assert "temperature" not in asked(page)


@pytest.mark.slow
@pytest.mark.parametrize("says_so", [False, True])
def test_a_model_without_a_chat_template_says_so(page: Browser, says_so: bool) -> None:
    page.run("showProps({default_generation_settings: {params: {}}, chat_template_is_default: arguments[0]})", says_so)
    sentence = "This model has no chat template: it continues text, and was probably not made for chats."
    assert page.text("#untaught") == (sentence if says_so else "")
    assert page.shown("#untaught") or not says_so


@pytest.mark.slow
def test_a_browser_that_forbids_storage_gets_its_answer(page: Browser) -> None:
    for storage in ("sessionStorage", "localStorage"):
        page.run(
            f"Object.defineProperty(window, '{storage}', {{get() {{ throw new DOMException('no', 'SecurityError') }}}})"
        )
    choose(page, temperature=0, max_tokens=5)
    send(page, "the end")
    page.until(lambda: done(page))
    assert answer(page)


@pytest.mark.slow
def test_an_invalid_setting_keeps_the_message(page: Browser) -> None:
    choose(page, top_p=1.5)
    send(page, "the rain")
    assert page.run("return [rows.length, message.value, document.activeElement.id]") == [0, "the rain", "top_p"]
