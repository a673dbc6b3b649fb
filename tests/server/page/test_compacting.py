"""Compaction: a summary takes the place of the messages above it in prompts, and can be undone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.page.browser import ENTER, Browser
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
    shown,
    text_of,
)

SUMMARY = "Summary of the conversation so far:\n\n"


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """A piece that tells how many tokens a request had."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"event": {"choices": [], "usage": counts}}


def compact(page: Browser) -> None:
    page.click("#compact")
    page.until(lambda: done(page) and page.run("return rows.at(-1).message.role") == "summary")


def sent(page: Browser, which: int = -1) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in asked(page, which)["messages"]]


@pytest.mark.slow
def test_a_summary_stands_for_what_is_above_it_until_that_is_undone(page: Browser) -> None:
    says(page, ["one"], ["what was *said*"], ["ok"], ["three"], ["four"])
    choose(page, system="be brief", temperature=0.5)
    send_and_wait(page, "first")
    compact(page)
    assert roles(page) == ["user", "assistant", "summary"]
    page.until(lambda: page.run("return asked.length") == 3)
    *before, (role, instruction) = sent(page, 1)
    assert before == [("system", "be brief"), ("user", "first"), ("assistant", "one")]
    assert (role, "ummar" in instruction, asked(page, 1)["max_tokens"]) == ("user", True, 64)
    compacted = ("system", f"be brief\n\n{SUMMARY}what was *said*")
    assert (sent(page, 2)[0], asked(page, 2)["max_tokens"]) == (compacted, 1)  # computed while it is read
    send_and_wait(page, "third")
    assert sent(page) == [compacted, ("user", "third")]
    assert asked(page)["temperature"] == 0.5
    press_button(page, "Undo", 2)
    assert "not in use" in page.text(".summary .hint")
    assert page.run("return document.activeElement.textContent") == "Use again"
    send_and_wait(page, "fourth")
    whole = ["be brief", "first", "one", "third", "three", "fourth"]
    assert [content for _, content in sent(page)] == whole
    page.reload()
    page.until(lambda: shown(page) == ["first", "one", "what was *said*", "third", "three", "fourth", "four"])
    assert "Use again" in buttons(page, 2)
    press_button(page, "Use again", 2)
    says(page, ["five"])
    send_and_wait(page, "fifth")
    assert sent(page)[:2] == [compacted, ("user", "third")]


@pytest.mark.slow
def test_a_summary_is_edited_and_generated_again(page: Browser) -> None:
    says(page, ["one"], ["short"], ["ok"], ["shorter"])
    send_and_wait(page, "first")
    compact(page)
    press_button(page, "Edit", 2)
    page.run("document.activeElement.value = 'by hand'")
    page.click(".edit .main")
    assert shown(page) == ["first", "one", "by hand"]
    page.until(lambda: page.run("return asked.length") == 3)
    press_button(page, "Regenerate", 2)
    page.until(lambda: done(page) and shown(page) == ["first", "one", "shorter"])
    assert page.text(".summary .arrows span") == "3/3"
    says(page, ["two"])
    send_and_wait(page, "second")
    assert sent(page) == [("system", f"{SUMMARY}shorter"), ("user", "second")]


@pytest.mark.slow
def test_a_message_to_a_nearly_full_context_waits_for_the_summary(page: Browser) -> None:
    says(page, ["one", usage(100, 80)], ["short"], ["two"])
    send_and_wait(page, "first")
    send(page, "a message of several words, which brings the prompt to more than three quarters")
    page.until(lambda: done(page) and text_of(page) == "two")
    assert roles(page) == ["user", "assistant", "summary", "user", "assistant"]
    assert sent(page)[0] == ("system", f"{SUMMARY}short")
    assert page.run("return document.getElementById('message').value") == ""


@pytest.mark.slow
def test_a_message_is_not_lost_where_the_summary_fails_and_then_goes_without(page: Browser) -> None:
    refused = {"status": 503, "error": {"message": "The server is about to end", "param": None}}
    says(page, ["one", usage(100, 90)], [refused], ["two"])
    send_and_wait(page, "first")
    send(page, "a message of several words")
    page.until(lambda: done(page) and "The server is about to end." in page.text(".summary .notice"))
    assert page.run("return document.getElementById('message').value.trim()") == "a message of several words"
    page.type("#message", ENTER)
    page.until(lambda: done(page) and text_of(page) == "two")
    assert sent(page) == [("user", "first"), ("assistant", "one"), ("user", "a message of several words")]


@pytest.mark.slow
def test_nothing_is_compacted_by_itself_where_the_setting_forbids_it(page: Browser) -> None:
    says(page, ["one", usage(100, 100)], ["two"])
    page.click("#auto_compact")
    send_and_wait(page, "first")
    send_and_wait(page, "second")
    assert roles(page) == ["user", "assistant", "user", "assistant"]
    page.reload()
    page.until(lambda: len(shown(page)) == 4)
    assert not page.run("return auto_compact.checked")


@pytest.mark.slow
def test_what_does_not_fit_into_the_request_for_a_summary_is_left_out_and_named(page: Browser) -> None:
    """The real server counts: a character of the tiny model's is a token or less, and the context has 256."""
    says(page, ["a" * 150], ["b" * 150], ["short"])
    page.click("#auto_compact")
    send_and_wait(page, "first")
    send_and_wait(page, "second")
    compact(page)
    assert "The first 2 messages did not fit" in page.text(".summary .hint")
    (question, answer, _) = sent(page, 2)
    assert question == ("user", "second")
    assert set(answer[1]) <= {"b", "…"}
    assert len(answer[1]) > 20


@pytest.mark.slow
def test_the_real_server_has_computed_the_compacted_prompt_before_the_next_message(page: Browser) -> None:
    choose(page, system="You are brief.", temperature=0, max_tokens=4)
    send_and_wait(page, "a")
    page.run("max_tokens.value = ''")
    compact(page)
    page.until(lambda: page.run("return rows.at(-1).message.compacted") is not None)
    assert page.text("#context").startswith(f"{page.run('return rows.at(-1).message.compacted')} of")
    send_and_wait(page, "b")
    assert page.run("return rows.at(-1).message.usage.cached") >= 64
