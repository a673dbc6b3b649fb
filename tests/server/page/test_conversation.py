"""The chat page in a browser, against a real server: what people see, press and are told."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from polarlm.server.config import KEY_VARIABLE
from tests.server.lines import eventually
from tests.server.page.browser import ENTER, ESCAPE
from tests.server.page.test_page import ROUND
from tests.server.page.visitor import LONG, Page, stats, usage
from tests.server.process import SOME, Process

pytestmark = pytest.mark.slow


def same_words(a: str, b: str) -> bool:
    return a.split() == b.split() != []


# -- a conversation --------------------------------------------------------------------------------------------


def test_an_answer_comes_piece_by_piece_and_is_the_apis(page: Page, server: Process) -> None:
    page.choose(temperature=0, max_tokens=60)
    page.send(LONG)
    page.until(lambda: len(page.text_of()) > 5)
    begun = page.answer()
    busy = page.run("return document.querySelector('.answer').ariaBusy")
    page.until(page.done)
    assert busy == "true"
    assert page.run("return document.querySelector('.answer').ariaBusy") == "false"
    assert len(begun) < len(page.answer())
    asked = [{"role": "user", "content": LONG}]
    whole = server.post("/v1/chat/completions", messages=asked, temperature=0, max_tokens=60)
    assert same_words(page.answer(), whole["choices"][0]["message"]["content"])


def test_the_next_turn_has_the_conversation_in_it_and_finds_it_in_the_cache(page: Page, server: Process) -> None:
    page.choose(temperature=0, max_tokens=30, system="be on time")
    page.send_and_wait("the rain")
    first = page.text_of()
    page.send_and_wait("and then")
    messages = [("system", "be on time"), ("user", "the rain"), ("assistant", first), ("user", "and then")]
    asked = [{"role": role, "content": content} for role, content in messages]
    whole = server.post("/v1/chat/completions", messages=asked, temperature=0, max_tokens=30)
    assert same_words(page.answer(), whole["choices"][0]["message"]["content"])
    said = re.match(r"(\d+) of (\d+) prompt tokens from the cache", page.figures())
    cached, prompt = map(int, said.groups())
    assert prompt == whole["usage"]["prompt_tokens"]
    assert 0 < cached < prompt


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_answer_and_the_servers_work(page: Page, server: Process, how: str) -> None:
    page.choose(temperature=0)
    page.send(LONG)
    page.until(lambda: len(page.text_of()) > 2)
    if how == "button":
        page.click("#stop")
    else:
        page.press(ESCAPE)
    page.until(page.done)
    stopped = page.answer()
    assert "stopped" in page.figures()
    eventually(server.is_idle)
    assert page.answer() == stopped
    assert 'outcome="cancelled"} ' in server.get("/metrics")


def test_drafted_tokens_are_counted_where_there_are_any(page: Page) -> None:
    def drafted(accepted: int, rejected: int) -> dict[str, int]:
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}

    first = usage(9, 20, completion_tokens_details=drafted(12, 8))
    page.says(["one", first], ["two", usage(9, 20, completion_tokens_details=drafted(0, 0))])
    page.send_and_wait("first")
    assert "12 of 20 drafted tokens right" in page.figures()
    page.send_and_wait("second")
    assert "drafted" not in page.figures()


def test_a_looping_answer_goes_on_with_the_loop_check_off_and_after_a_reload(page: Page) -> None:
    page.click("#loop_check")
    page.reload()
    assert not page.run("return loop_check.checked")
    page.says(ROUND)
    page.send_and_wait("the wheel")
    assert page.text_of() == "".join(ROUND)
    assert "repeated itself" not in page.figures()
    page.click("#fields button[type=reset]")
    page.until(lambda: page.run("return localStorage.getItem('polarlm.settings')") == "{}")
    assert page.run("return loop_check.checked")


def test_a_list_with_lines_that_look_alike_is_not_stopped(page: Page) -> None:
    items = [piece for number in range(150) for piece in (f"{number}", ". one", " more", " line\n")]
    page.says([*items, *["-"] * 250, *["Twice", " the", " same", " words "] * 50, *map(str, range(800))] * 2)
    page.send_and_wait("a list")
    assert "repeated itself" not in page.figures()


def test_the_page_recognises_loops(page: Page) -> None:
    for text, least, is_loop in [
        ("", 1, False),
        ("aaa", 3, True),
        ("abab", 1, False),
        ("xababab", 6, True),
        ("xababab", 7, False),
        ("abababc", 1, False),
        ("bcabcabcab", 9, True),
    ]:
        assert page.run("return loops(arguments[0], arguments[1])", text, least) == is_loop


# -- meters ------------------------------------------------------------------------------------------------------


def test_the_meters_fill(page: Page, server: Process) -> None:
    now = stats(server, 0)
    assert page.text("#model") == now["model"]
    assert page.text("#bits") == f"{now['whole_context']['bits_per_value']:.2f} bits/value"
    assert page.text("#types") == f"Stored as {now['cache_types']}"
    assert (page.text("#speed"), page.text("#memory")) == ("–", "–")
    page.choose(temperature=0, max_tokens=100)
    page.send(LONG)
    page.until(lambda: page.text("#requests").startswith("1 running"))
    page.until(lambda: page.text("#context").startswith("≈ "))
    page.until(page.done)
    said = re.search(r"of (\d+) prompt tokens from the cache · (\d+) tokens · (\S+ tokens/s)", page.figures())
    total = int(said[1]) + int(said[2])
    page.until(lambda: page.text("#context") == f"{total} of {now['context']}")
    assert page.run("return filled.value") == total
    assert page.text("#speed") == said[3]
    assert 0 < float(said[3].split()[0]) < 50  # a step takes 20 ms at least
    sequence = stats(server, total)["sequence"]
    page.until(lambda: page.text("#memory").startswith(f"{sequence['bytes'] / 1024:.1f} KiB"))
    page.until(lambda: page.text("#requests") == "0 running, 0 waiting")


def test_the_memory_saved_is_shown_as_a_factor(page: Page) -> None:
    show = "stats.sequence = {tokens: 9, bytes: arguments[0], f16_bytes: arguments[1]}; meter()"
    whole = "stats.whole_context = {tokens: 8192, bytes: arguments[0], f16_bytes: arguments[1], bits_per_value: 4}; "
    page.run(whole, 9 << 20, 9 << 20)
    page.run(show, 3 << 20, 12 << 20)
    assert page.text("#memory") == "3.0 MiB, 4.0× saved"
    assert page.text("#saved") == "f16 would take 12.0 MiB"
    page.click("#engine summary")
    assert page.shown("#bytes")
    page.run(show, 3 << 20, 3 << 20)  # a short conversation, whose blocks are all halves
    assert (page.text("#memory"), page.text("#saved")) == ("3.0 MiB", "")
    assert not page.shown("#bytes")
    page.run(whole + "meter()", 30 << 20, 120 << 20)
    assert page.text("#saved") == "8,192 tokens take 30.0 MiB, in f16 120.0 MiB"
    page.run("stats.whole_context.bits_per_value = 3.386; meter()")
    assert page.text("#bits") == "3.39 bits/value"


# -- what goes wrong ---------------------------------------------------------------------------------------------


def test_the_servers_sentence_is_shown(page: Page) -> None:
    page.send("rain " * 200)
    page.until(lambda: page.text(".message .notice"))
    assert "tokens" in page.text(".message .notice")
    assert page.text(".assistant .foot .act") == "Retry"
    page.choose(temperature=0, max_tokens=3)
    page.send_and_wait("the rain")  # what was not answered is not part of the conversation
    assert page.answer() != ""
    assert page.count(".message .notice") == 1


@pytest.mark.parametrize("text", ["", "half"])
def test_an_answer_that_was_lost_says_so_and_can_be_retried_without_being_hovered(page: Page, text: str) -> None:
    page.says([*([text] if text else []), {"wait": 60000}], ["two"])
    page.send("first")
    page.until(lambda: page.run("return live !== null") and page.text_of() == text)
    page.run("return keepConversation(current)")
    page.reload()
    page.until(lambda: page.text(".message .notice"))
    begins = f"This answer {'was cut off' if text else 'did not come'}: the page was closed, or another tab"
    assert page.text(".message .notice").startswith(begins)
    page.says(["two"])
    page.send_and_wait("second")
    assert page.count(".message .notice") == 1
    if not text:
        assert page.text(".assistant .foot .act") == "Retry"
        assert page.run("return rows[1].foot.querySelector('button').checkVisibility({opacityProperty: true})")


def test_a_busy_server_says_when_to_come_back_and_retry_does(page: Page) -> None:
    error = {"message": "The server is busy: 2 requests wait"}
    page.says([{"status": 429, "error": error, "headers": {"Retry-After": "7"}}], ["one"])
    page.send_and_wait("the rain")
    sentence = "The server is busy: 2 requests wait. It asks to wait for about 7 seconds."
    assert page.text(".message .notice") == sentence
    page.press_button("Retry")
    page.until(lambda: page.done() and page.text_of() == "one")
    assert page.text(".message .notice") == ""


def test_a_lost_connection_is_shown_and_can_be_retried(
    visit: Callable[[Process], Page], tiny_path: Path, tmp_path: Path
) -> None:
    with ExitStack() as ends:
        server = ends.enter_context(Process(tiny_path, tmp_path, troubled=True))
        page = visit(server)
        page.choose(temperature=0)
        with server.held() as let:
            let(SOME)
            page.send(LONG)
            page.until(lambda: len(page.text_of()) > 2)
            server.process.kill()
        page.until(lambda: page.text(".message .notice"))
        assert page.text(".message .notice") == "The connection to the server was lost before the answer was complete."
        assert len(page.answer()) > 2
        page.press_button("Retry")
        page.until(lambda: "cannot be reached" in page.text(".message .notice"))
        page.until(lambda: page.text("#status") == "The server cannot be reached.")
        port = server.url.rpartition(":")[2]
        ends.enter_context(Process(tiny_path, tmp_path, "--port", port))
        page.press_button("Retry")
        page.until(lambda: page.done() and len(page.answer()) > 2)
        page.until(lambda: page.text("#status") == "Answered.")
        assert page.text(".message .notice") == ""
        assert "to differ" not in page.figures()


def test_a_key_is_asked_for_and_kept_until_it_is_forgotten(
    visit: Callable[[Process], Page], tiny_path: Path, tmp_path: Path
) -> None:
    with Process(tiny_path, tmp_path, **{KEY_VARIABLE: "sk-1"}) as server:
        page = visit(server)
        page.until(lambda: page.shown("#key"))
        page.choose(temperature=0, max_tokens=3)
        page.send("the rain")
        page.until(lambda: page.text(".message .notice") == "This server asks for an API key.")
        page.type("#key", "sk-2" + ENTER)
        page.until(lambda: page.shown("#key") and page.text("#door-why") == "The server does not know this key.")
        page.type("#key", "sk-1" + ENTER)
        page.until(lambda: page.done() and page.answer())  # what was refused is asked again
        assert not page.shown("#key")
        assert page.count(".message .notice") == 0
        with page.second() as other:
            other.open(server.url)
            other.until(lambda: "bits/value" in other.text("#bits"))
            assert not other.shown("#key")
            other.run("document.getElementById('forget').click()")
            other.until(lambda: other.shown("#key"))
            assert "sk-1" not in other.run("return JSON.stringify(localStorage)")
            assert not other.shown("#keyed")


@pytest.mark.parametrize(
    ("settings", "first", "second", "said"),
    [
        ({"temperature": 0}, {"temperature": 0}, {"temperature": 0.6}, "temperature 0.6, to differ"),
        ({"temperature": 0.5, "seed": 5}, {"seed": 5}, {"temperature": 0.5, "seed": 6}, "seed 6, to differ"),
        ({"temperature": 0.5}, {"temperature": 0.5}, {"temperature": 0.5}, ""),
    ],
)
def test_another_version_differs_and_says_by_what(
    page: Page, settings: dict[str, float], first: dict[str, float], second: dict[str, float], said: str
) -> None:
    page.says([usage(9, 20), "one"], [usage(9, 20), "two"])
    page.choose(**settings)
    page.send_and_wait("go")
    assert {name: page.request_body()[name] for name in first} == first
    assert "to differ" not in page.figures()
    page.press_button("Regenerate")
    page.until(lambda: page.done() and page.text_of() == "two")
    assert {name: page.request_body()[name] for name in second} == second
    assert said in page.figures()
    assert ("to differ" in page.figures()) == bool(said)
    assert all(value == settings.get(name, value) for name, value in page.request_body().items() if not said)
    page.reload()
    page.until(lambda: page.texts() == ["go", "two"])
    assert said in page.figures()


def test_a_version_of_a_model_that_is_greedy_by_itself_is_not(page: Page) -> None:
    page.run("temperature.placeholder = '0'")
    page.talk("one")
    assert "temperature" not in page.request_body()
    page.press_button("Regenerate")
    page.until(lambda: page.done() and page.request_body().get("temperature") == 0.6)


def test_what_is_not_sent_is_there_after_a_reload(page: Page) -> None:
    page.type("#message", "half a qu")
    page.reload()
    page.until(lambda: page.run("return document.getElementById('message').value") == "half a qu")
    page.says(["one"])
    page.send_and_wait("estion")
    assert page.texts() == ["half a question", "one"]
    page.reload()
    page.until(lambda: page.texts() == ["half a question", "one"])
    assert page.run("return document.getElementById('message').value") == ""


def test_the_meters_are_read_while_a_short_answer_comes(page: Page) -> None:
    page.run("window.looks = []; const real = look; look = () => { looks.push(live?.message.text); return real(); }")
    page.says(["one", {"wait": 300}, " two"])
    page.send_and_wait("go")
    assert any(text and text.startswith("one") for text in page.run("return looks"))
