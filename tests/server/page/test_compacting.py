"""Compaction: a summary takes the place of the messages above it in prompts, and can be undone."""

from __future__ import annotations

import pytest

from tests.server.page.browser import ENTER
from tests.server.page.visitor import Page, usage

pytestmark = pytest.mark.slow

SUMMARY = "Summary of the conversation so far:\n\n"


def compact(page: Page) -> None:
    page.click("#compact")
    page.until(lambda: page.done() and page.run("return rows.at(-1).message.role") == "summary")


def sent(page: Page, which: int = -1) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in page.request_body(which)["messages"]]


def test_a_summary_stands_for_what_is_above_it_until_that_is_undone(page: Page) -> None:
    page.says(["one"], ["what was *said*"], ["ok"], ["three"], ["four"])
    page.choose(system="be brief", temperature=0.5)
    page.send_and_wait("first")
    compact(page)
    assert page.roles() == ["user", "assistant", "summary"]
    page.until(lambda: page.run("return asked.length") == 3)
    *before, (role, instruction) = sent(page, 1)
    assert before == [("system", "be brief"), ("user", "first"), ("assistant", "one")]
    assert (role, "ummar" in instruction, page.request_body(1)["max_tokens"]) == ("user", True, 64)
    compacted = ("system", f"be brief\n\n{SUMMARY}what was *said*")
    assert (sent(page, 2)[0], page.request_body(2)["max_tokens"]) == (compacted, 1)  # computed while it is read
    page.send_and_wait("third")
    assert sent(page) == [compacted, ("user", "third")]
    assert page.request_body()["temperature"] == 0.5
    page.press_button("Undo", 2)
    assert "not in use" in page.text(".summary .hint")
    assert page.focused() == "Use again"
    page.send_and_wait("fourth")
    whole = ["be brief", "first", "one", "third", "three", "fourth"]
    assert [content for _, content in sent(page)] == whole
    page.reload()
    page.until(lambda: page.texts() == ["first", "one", "what was *said*", "third", "three", "fourth", "four"])
    assert "Use again" in page.buttons(2)
    page.press_button("Use again", 2)
    page.says(["five"])
    page.send_and_wait("fifth")
    assert sent(page)[:2] == [compacted, ("user", "third")]


def test_a_summary_is_edited_and_generated_again(page: Page) -> None:
    page.says(["one"], ["short"], ["ok"], ["shorter"])
    page.send_and_wait("first")
    compact(page)
    page.press_button("Edit", 2)
    page.run("document.activeElement.value = 'by hand'")
    page.click(".edit .main")
    assert page.texts() == ["first", "one", "by hand"]
    page.until(lambda: page.run("return asked.length") == 3)
    page.press_button("Regenerate", 2)
    page.until(lambda: page.done() and page.texts() == ["first", "one", "shorter"])
    assert page.text(".summary .arrows span") == "3/3"
    page.says(["two"])
    page.send_and_wait("second")
    assert sent(page) == [("system", f"{SUMMARY}shorter"), ("user", "second")]


def test_a_message_to_a_nearly_full_context_waits_for_the_summary(page: Page) -> None:
    page.says(["one", usage(100, 80)], ["short"], ["two"])
    page.send_and_wait("first")
    page.send("a message of several words, which brings the prompt to more than three quarters")
    page.until(lambda: page.done() and page.text_of() == "two")
    assert page.roles() == ["user", "assistant", "summary", "user", "assistant"]
    assert sent(page)[0] == ("system", f"{SUMMARY}short")
    assert page.run("return document.getElementById('message').value") == ""


def test_a_message_is_not_lost_where_the_summary_fails_and_then_goes_without(page: Page) -> None:
    refused = {"status": 503, "error": {"message": "The server is about to end", "param": None}}
    page.says(["one", usage(100, 90)], [refused], ["two"])
    page.send_and_wait("first")
    page.send("a message of several words")
    page.until(lambda: page.done() and "The server is about to end." in page.text(".summary .notice"))
    assert page.run("return document.getElementById('message').value.trim()") == "a message of several words"
    page.type("#message", ENTER)
    page.until(lambda: page.done() and page.text_of() == "two")
    assert sent(page) == [("user", "first"), ("assistant", "one"), ("user", "a message of several words")]


def test_nothing_is_compacted_by_itself_where_the_setting_forbids_it(page: Page) -> None:
    page.says(["one", usage(100, 100)], ["two"])
    page.click("#auto_compact")
    page.send_and_wait("first")
    page.send_and_wait("second")
    assert page.roles() == ["user", "assistant", "user", "assistant"]
    page.reload()
    page.until(lambda: len(page.texts()) == 4)
    assert not page.run("return auto_compact.checked")


def test_what_does_not_fit_into_the_request_for_a_summary_is_left_out_and_named(page: Page) -> None:
    """The real server counts: a character of the tiny model's is a token or less, and the context has 256."""
    page.says(["a" * 150], ["b" * 150], ["short"])
    page.click("#auto_compact")
    page.send_and_wait("first")
    page.send_and_wait("second")
    compact(page)
    assert "The first 2 messages did not fit" in page.text(".summary .hint")
    (question, answer, _) = sent(page, 2)
    assert question == ("user", "second")
    assert set(answer[1]) <= {"b", "…"}
    assert len(answer[1]) > 20


def test_the_real_server_has_computed_the_compacted_prompt_before_the_next_message(page: Page) -> None:
    page.choose(system="You are brief.", temperature=0, max_tokens=4)
    page.send_and_wait("a")
    page.run("max_tokens.value = ''")
    compact(page)
    page.until(lambda: page.run("return rows.at(-1).message.compacted") is not None)
    assert page.text("#context").startswith(f"{page.run('return rows.at(-1).message.compacted')} of")
    page.send_and_wait("b")
    assert page.run("return rows.at(-1).message.usage.cached") >= 64
