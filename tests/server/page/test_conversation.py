"""The chat page in a browser, against a real server: what people see, press and are told."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from polarlm.server.config import KEY_VARIABLE
from tests.server.lines import eventually
from tests.server.page.browser import ENTER, Browser
from tests.server.page.visitor import (
    LONG,
    answer,
    choose,
    complete,
    done,
    figures,
    press_button,
    roles,
    same_words,
    says,
    send,
    send_and_wait,
    stats,
    text_of,
)
from tests.server.process import SOME, Process

# -- a conversation --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_answer_comes_piece_by_piece_and_is_the_apis(page: Browser, server: Process) -> None:
    choose(page, temperature=0, max_tokens=60)
    send(page, LONG)
    page.until(lambda: len(text_of(page)) > 5)
    begun = answer(page)
    busy = page.run("return document.querySelector('.answer').ariaBusy")
    page.until(lambda: done(page))
    assert busy == "true"
    assert page.run("return document.querySelector('.answer').ariaBusy") == "false"
    assert len(begun) < len(answer(page))
    whole = complete(server, [{"role": "user", "content": LONG}], temperature=0, max_tokens=60)
    assert same_words(answer(page), whole["choices"][0]["message"]["content"])


@pytest.mark.slow
def test_the_next_turn_has_the_conversation_in_it_and_finds_it_in_the_cache(page: Browser, server: Process) -> None:
    choose(page, temperature=0, max_tokens=30, system="be on time")
    send(page, "the rain")
    page.until(lambda: done(page))
    first = text_of(page)
    send(page, "and then")
    page.until(lambda: len(roles(page)) == 4 and done(page))
    messages = [("system", "be on time"), ("user", "the rain"), ("assistant", first), ("user", "and then")]
    asked = [{"role": role, "content": content} for role, content in messages]
    whole = complete(server, asked, temperature=0, max_tokens=30)
    assert same_words(answer(page), whole["choices"][0]["message"]["content"])
    said = re.match(r"(\d+) of (\d+) prompt tokens from the cache", figures(page))
    cached, prompt = map(int, said.groups())
    assert prompt == whole["usage"]["prompt_tokens"]
    assert 0 < cached < prompt


@pytest.mark.slow
@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_answer_and_the_servers_work(page: Browser, server: Process, how: str) -> None:
    choose(page, temperature=0)
    send(page, LONG)
    page.until(lambda: len(text_of(page)) > 2)
    if how == "button":
        page.click("#stop")
    else:
        page.press("\ue00c")  # Escape, as WebDriver has it
    page.until(lambda: done(page))
    stopped = answer(page)
    assert "stopped" in figures(page)
    eventually(server.is_idle)
    assert answer(page) == stopped
    assert 'outcome="cancelled"} ' in server.get("/metrics")


@pytest.mark.slow
def test_regenerate_answers_the_last_message_again(page: Browser) -> None:
    choose(page, max_tokens=20, temperature=2, seed=7)
    send(page, "the rain")
    page.until(lambda: done(page))
    first = text_of(page)
    choose(page, max_tokens=20, temperature=2, seed=8)  # by luck, an answer without a seed might be empty
    press_button(page, "Regenerate")
    page.until(lambda: done(page) and text_of(page) != first)
    assert roles(page) == ["user", "assistant"]


@pytest.mark.slow
def test_a_seed_makes_it_the_same_again(page: Browser) -> None:
    choose(page, max_tokens=20, temperature=2, seed=7)
    send(page, "the rain")
    page.until(lambda: done(page))
    first = text_of(page)
    press_button(page, "Regenerate")
    page.until(lambda: done(page) and text_of(page))
    assert text_of(page) == first


@pytest.mark.slow
def test_a_new_chat_begins_anew_in_the_middle_of_an_answer(page: Browser, server: Process) -> None:
    choose(page, temperature=0)
    send(page, LONG)
    page.until(lambda: len(text_of(page)) > 2)
    page.click("#new")
    eventually(server.is_idle)
    assert page.text("#turns") == ""
    assert page.shown("#welcome")
    assert page.text("#context").startswith("0 of ")
    send(page, "the rain")
    page.until(lambda: len(text_of(page)) > 2)
    assert roles(page) == ["user", "assistant"]


@pytest.mark.slow
def test_drafted_tokens_are_counted_where_there_are_any(page: Browser) -> None:
    def usage(accepted: int, rejected: int) -> dict[str, Any]:
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        counts = {"prompt_tokens": 9, "completion_tokens": 20, "total_tokens": 29, "completion_tokens_details": details}
        return {"event": {"choices": [], "usage": counts}}

    says(page, ["one", usage(12, 8)], ["two", usage(0, 0)])
    send_and_wait(page, "first")
    assert "12 of 20 drafted tokens right" in figures(page)
    send_and_wait(page, "second")
    assert "drafted" not in figures(page)


ROUND = ["So", *["round", " and", " round,", " again "] * 400]


def test_a_looping_answer_is_stopped(page: Browser) -> None:
    says(page, ROUND)
    send(page, "the wheel")
    page.until(lambda: done(page) and figures(page))
    assert "it repeated itself over and over" in figures(page)
    assert page.text("#status") == "Stopped."
    assert page.run("return window.signal.aborted")
    assert "".join(ROUND).startswith(text_of(page))
    shown = len(text_of(page)) / len("".join(ROUND)) * len(ROUND)
    assert 300 <= shown < 300 + 65
    assert page.text(".message .notice") == ""
    assert page.text(".assistant .foot .act") == "Regenerate"


@pytest.mark.slow
def test_a_looping_answer_goes_on_with_the_loop_check_off_and_after_a_reload(page: Browser) -> None:
    page.click("#loop_check")
    page.reload()
    assert not page.run("return loop_check.checked")
    says(page, ROUND)
    send(page, "the wheel")
    page.until(lambda: done(page) and figures(page))
    assert text_of(page) == "".join(ROUND)
    assert "repeated itself" not in figures(page)
    page.click("#fields button[type=reset]")
    page.until(lambda: page.run("return localStorage.getItem('polarlm.settings')") == "{}")
    assert page.run("return loop_check.checked")


@pytest.mark.slow
def test_a_list_with_lines_that_look_alike_is_not_stopped(page: Browser) -> None:
    items = [piece for number in range(150) for piece in (f"{number}", ". one", " more", " line\n")]
    says(page, [*items, *["-"] * 250, *["Twice", " the", " same", " words "] * 50, *map(str, range(800))] * 2)
    send(page, "a list")
    page.until(lambda: done(page) and figures(page))
    assert "repeated itself" not in figures(page)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "least", "found"),
    [
        ("", 1, False),
        ("aaa", 3, True),
        ("aaa", 4, False),
        ("abab", 1, False),
        ("xababab", 6, True),
        ("xababab", 7, False),
        ("abababc", 1, False),
        ("abcabcab", 8, False),
        ("bcabcabcab", 9, True),
    ],
)
def test_the_page_recognises_loops(page: Browser, text: str, least: int, found: bool) -> None:
    assert page.run("return loops(arguments[0], arguments[1])", text, least) == found


# -- meters ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_meters_fill(page: Browser, server: Process) -> None:
    now = stats(server, 0)
    assert page.text("#model") == now["model"]
    assert page.text("#bits") == f"{now['bits_per_value']:.2f} bits/value"
    assert page.text("#types").startswith(f"Stored as {now['cache_types']};")
    assert (page.text("#speed"), page.text("#memory")) == ("–", "–")
    choose(page, temperature=0, max_tokens=100)
    send(page, LONG)
    page.until(lambda: page.text("#requests").startswith("1 running"))
    page.until(lambda: page.text("#context").startswith("≈ "))
    page.until(lambda: done(page))
    said = re.search(r"of (\d+) prompt tokens from the cache · (\d+) tokens · (\S+ tokens/s)", figures(page))
    total = int(said[1]) + int(said[2])
    page.until(lambda: page.text("#context") == f"{total} of {now['context']}")
    assert page.run("return filled.value") == total
    assert page.text("#speed") == said[3]
    assert 0 < float(said[3].split()[0]) < 50  # a step takes 20 ms at least
    sequence = stats(server, total)["sequence"]
    page.until(lambda: page.text("#memory").startswith(f"{sequence['bytes'] / 1024:.1f} KiB"))
    page.until(lambda: page.text("#requests") == "0 running, 0 waiting")


@pytest.mark.slow
def test_the_memory_saved_is_shown_as_a_factor(page: Browser) -> None:
    show = "stats.sequence = {tokens: 9, bytes: arguments[0], f16_bytes: arguments[1]}; meter()"
    page.run(show, 3 << 20, 12 << 20)
    assert page.text("#memory") == "3.0 MiB, 4.0× saved"
    assert page.text("#saved") == "f16 would take 12.0 MiB"
    assert page.shown("#bytes")
    page.run(show, 3 << 20, 3 << 20)  # a short conversation, whose blocks are all halves
    assert (page.text("#memory"), page.text("#saved")) == ("3.0 MiB", "")
    assert not page.shown("#bytes")


# -- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_servers_sentence_is_shown(page: Browser) -> None:
    send(page, "rain " * 200)
    page.until(lambda: page.text(".message .notice"))
    assert "tokens" in page.text(".message .notice")
    assert page.text(".assistant .foot .act") == "Retry"
    choose(page, temperature=0, max_tokens=3)
    send(page, "the rain")  # what was not answered is not part of the conversation
    page.until(lambda: done(page) and len(roles(page)) == 4)
    assert answer(page) != ""
    assert page.run("return document.querySelectorAll('.message .notice').length") == 1


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "half"])
def test_an_answer_that_was_lost_says_so_and_can_be_retried_without_being_hovered(page: Browser, text: str) -> None:
    says(page, [*([text] if text else []), {"wait": 60000}], ["two"])
    send(page, "first")
    page.until(lambda: page.run("return live !== null") and text_of(page) == text)
    page.run("return keepConversation(current)")
    page.reload()
    page.until(lambda: page.text(".message .notice"))
    found = page.text(".message .notice")
    assert found.startswith("This answer has no end: " if text else "This answer has not come: the page was closed")
    says(page, ["two"])
    send_and_wait(page, "second")
    assert page.run("return document.querySelectorAll('.message .notice').length") == 1
    seen = "return rows[1].foot.querySelector('button').checkVisibility({opacityProperty: true})"
    if not text:
        assert page.text(".assistant .foot .act") == "Retry"
        assert page.run(seen)


@pytest.mark.slow
def test_a_server_that_is_silent_about_its_cache_is_no_trouble(
    visit: Callable[[Process], Browser], tiny_path: Path, tmp_path: Path
) -> None:
    with Process(tiny_path, tmp_path, "--hide-cached-tokens", troubled=True) as server:
        page = visit(server)
        choose(page, temperature=0, max_tokens=3)
        send(page, "the rain")
        page.until(lambda: done(page) and answer(page))
        assert re.match(r"\d+ prompt tokens · 3 tokens", figures(page))
        assert page.run("return document.querySelectorAll('.message .notice').length") == 0


@pytest.mark.slow
def test_a_busy_server_says_when_to_come_back_and_retry_does(
    visit: Callable[[Process], Browser], tiny_path: Path, tmp_path: Path
) -> None:
    flags = ("--parallel", "1", "--max-queue", "0")
    with Process(tiny_path, tmp_path, *flags, troubled=True) as server:
        page = visit(server)
        choose(page, temperature=0, max_tokens=3)
        long = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}
        other = threading.Thread(target=complete, args=(server, [{"role": "user", "content": "on"}]), kwargs=long)
        with server.held() as let:
            let(SOME)
            other.start()
            eventually(lambda: stats(server, 0)["running"] == 1)
            send(page, "the rain")
            page.until(lambda: page.text(".message .notice"))
        assert re.search(r"busy: .* about \d+ seconds?\.$", page.text(".message .notice"))
        other.join()
        press_button(page, "Retry")
        page.until(lambda: done(page) and answer(page))
        assert page.text(".message .notice") == ""


@pytest.mark.slow
def test_a_lost_connection_is_shown_and_can_be_retried(
    visit: Callable[[Process], Browser], tiny_path: Path, tmp_path: Path
) -> None:
    with ExitStack() as ends:
        server = ends.enter_context(Process(tiny_path, tmp_path, troubled=True))
        page = visit(server)
        choose(page, temperature=0)
        with server.held() as let:
            let(SOME)
            send(page, LONG)
            page.until(lambda: len(text_of(page)) > 2)
            server.process.kill()
        page.until(lambda: page.text(".message .notice"))
        assert page.text(".message .notice") == "The connection to the server was lost before the answer was complete."
        assert len(answer(page)) > 2
        assert page.text(".assistant .foot .act") == "Retry"
        press_button(page, "Retry")
        page.until(lambda: "cannot be reached" in page.text(".message .notice"))
        page.until(lambda: page.text("#status") == "The server cannot be reached.")
        port = server.url.rpartition(":")[2]
        ends.enter_context(Process(tiny_path, tmp_path, "--port", port))
        press_button(page, "Retry")
        page.until(lambda: done(page) and len(answer(page)) > 2)
        page.until(lambda: page.text("#status") == "Answered.")
        assert page.text(".message .notice") == ""


@pytest.mark.slow
def test_a_key_is_asked_for_and_kept_for_this_tab_alone(
    visit: Callable[[Process], Browser], tiny_path: Path, tmp_path: Path
) -> None:
    with Process(tiny_path, tmp_path, **{KEY_VARIABLE: "sk-1"}) as server:
        page = visit(server)
        page.until(lambda: page.shown("#key"))
        choose(page, temperature=0, max_tokens=3)
        send(page, "the rain")
        page.until(lambda: page.text(".message .notice") == "This server asks for an API key.")
        page.type("#key", "sk-2" + ENTER)
        page.until(lambda: page.shown("#key") and page.text("#door-why") == "The server does not know this key.")
        page.type("#key", "sk-1" + ENTER)
        page.until(lambda: done(page) and answer(page))  # what was refused is asked again
        assert not page.shown("#key")
        assert page.run("return document.querySelectorAll('.message .notice').length") == 0
        assert "sk-1" not in page.run("return JSON.stringify(localStorage)")
        page.reload()
        page.until(lambda: "bits/value" in page.text("#bits"))
        assert not page.shown("#key")
