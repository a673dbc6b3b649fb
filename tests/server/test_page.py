"""The chat page in a browser, against a real server: what people see, press and are told."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from polarlm.server.config import KEY_VARIABLE
from tests.server.browser import CHROMEDRIVER, CHROMIUM, ENTER, ESCAPE, NO_MODIFIER, SHIFT, TAB, Browser, browser
from tests.server.lines import PATIENCE, eventually
from tests.server.process import Process

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or CHROMEDRIVER is None, reason="chromium and chromedriver are not both on the PATH"
)

LONG = "a"  # what the tiny model has 153 tokens to say to when it is greedy

HOSTILE = """<img src=x onerror="window.harmed = 1"><script>window.harmed = 1</script> **<b>bold</b>** `<i>code</i>`

```html
</code></pre><svg onload="window.harmed = 1">
```
[a link](javascript:window.harmed=1) &lt;escaped&gt;"""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as window:
        yield window


@pytest.fixture(scope="module")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Its steps take their time, so that there is something to see while it answers."""
    with Process(tiny_path, tmp_path_factory.mktemp("server"), troubled=True) as process:
        yield process


@pytest.fixture
def visit(window: Browser) -> Callable[[Process], Browser]:
    """visit(server): the page of a server as somebody sees it who has never been there."""

    def open_page(process: Process) -> Browser:
        size(window, 1100, 760)
        window.open(process.url)
        window.run("localStorage.clear(); sessionStorage.clear()")
        window.reload()
        return window

    return open_page


@pytest.fixture
def page(visit: Callable[[Process], Browser], server: Process) -> Iterator[Browser]:
    """The page of the server, ready; afterwards, when it is left, nothing is computed for it any more."""
    page = visit(server)
    page.until(lambda: "bits/value" in page.text("#bits"))
    yield page
    page.open("about:blank")
    eventually(server.is_idle)


def size(page: Browser, width: int, height: int) -> None:
    page.protocol(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
    )


def choose(page: Browser, **settings: float | str) -> None:
    for name, value in settings.items():
        page.type(f"#{name}", str(value))


def send(page: Browser, message: str) -> None:
    page.type("#message", message + ENTER)


def answer(page: Browser, which: int = -1) -> str:
    return page.run("return [...document.querySelectorAll('.answer')].at(arguments[0])?.innerText ?? ''", which)


def done(page: Browser) -> bool:
    return page.shown("#send")


def figures(page: Browser) -> str:
    """What is said below the last answer."""
    return page.run("return [...document.querySelectorAll('.foot')].at(-1).lastChild.textContent")


def stats(process: Process, tokens: int) -> dict[str, Any]:
    return json.loads(process.get(f"/stats?tokens={tokens}"))


def complete(process: Process, messages: list[dict[str, str]], **params: Any) -> dict[str, Any]:
    """The API's own answer, not streamed."""
    body = json.dumps({"messages": messages, **params}).encode()
    request = urllib.request.Request(process.url + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return json.load(response)


def same_words(a: str, b: str) -> bool:
    return a.split() == b.split() != []


# -- a conversation --------------------------------------------------------------------------------------------


def test_an_answer_comes_piece_by_piece_and_is_the_apis(page: Browser, server: Process) -> None:
    choose(page, temperature=0, max_tokens=60)
    send(page, LONG)
    page.until(lambda: len(page.run("return turns[0].answer")) > 5)
    begun = answer(page)
    busy = page.run("return document.querySelector('.answer').ariaBusy")
    page.until(lambda: done(page))
    assert busy == "true"
    assert page.run("return document.querySelector('.answer').ariaBusy") == "false"
    assert len(begun) < len(answer(page))
    whole = complete(server, [{"role": "user", "content": LONG}], temperature=0, max_tokens=60)
    assert same_words(answer(page), whole["choices"][0]["message"]["content"])


def test_the_next_turn_has_the_conversation_in_it_and_finds_it_in_the_cache(page: Browser, server: Process) -> None:
    choose(page, temperature=0, max_tokens=30, system="be on time")
    send(page, "the rain")
    page.until(lambda: done(page))
    first = page.run("return turns[0].answer")
    send(page, "and then")
    page.until(lambda: len(page.run("return turns")) == 2 and done(page))
    messages = [("system", "be on time"), ("user", "the rain"), ("assistant", first), ("user", "and then")]
    asked = [{"role": role, "content": content} for role, content in messages]
    whole = complete(server, asked, temperature=0, max_tokens=30)
    assert same_words(answer(page), whole["choices"][0]["message"]["content"])
    said = re.match(r"(\d+) of (\d+) prompt tokens from the cache", figures(page))
    assert said is not None
    cached, prompt = map(int, said.groups())
    assert prompt == whole["usage"]["prompt_tokens"]
    assert 0 < cached < prompt


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_answer_and_the_servers_work(page: Browser, server: Process, how: str) -> None:
    choose(page, temperature=0)
    send(page, LONG)
    page.until(lambda: len(page.run("return turns[0].answer")) > 2)
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


def test_regenerate_answers_the_last_message_again(page: Browser) -> None:
    choose(page, max_tokens=20, temperature=2, top_p=1, min_p=0)
    send(page, "the rain")
    page.until(lambda: done(page))
    first = page.run("return turns[0].answer")
    page.click(".foot button")
    page.until(lambda: done(page) and page.run("return turns[0].answer") != first)
    assert page.run("return turns.length") == 1


def test_a_seed_makes_it_the_same_again(page: Browser) -> None:
    choose(page, max_tokens=20, temperature=2, seed=7)
    send(page, "the rain")
    page.until(lambda: done(page))
    first = page.run("return turns[0].answer")
    page.click(".foot button")
    page.until(lambda: done(page) and page.run("return turns[0].answer.length") > 0)
    assert page.run("return turns[0].answer") == first


def test_a_new_chat_begins_anew_in_the_middle_of_an_answer(page: Browser, server: Process) -> None:
    choose(page, temperature=0)
    send(page, LONG)
    page.until(lambda: len(page.run("return turns[0].answer")) > 2)
    page.click("#new")
    eventually(server.is_idle)
    assert page.text("#turns") == ""
    assert page.shown("#welcome")
    assert page.text("#context").startswith("0 of ")
    send(page, "the rain")
    page.until(lambda: len(page.run("return turns[0].answer")) > 2)
    assert page.run("return turns.length") == 1


def says(page: Browser, pieces: list[str]) -> None:
    """What every answer from now on is, piece by piece, until the page turns away from it."""
    script = """
        const [pieces] = arguments, real = window.fetch, event = (value) => `data: ${JSON.stringify(value)}\\n\\n`;
        window.fetch = (path, options) => {
            if (!path.endsWith("completions")) return real(path, options);
            let sent = 0;
            window.asked = { get sent() { return sent; }, signal: options.signal };
            const encoder = new TextEncoder();
            const body = new ReadableStream({
                async pull(stream) {
                    await null;
                    if (options.signal.aborted) return stream.error(options.signal.reason);
                    const piece = pieces[sent++];
                    const choice = { delta: { content: piece }, finish_reason: piece === undefined ? "stop" : null };
                    stream.enqueue(encoder.encode(event({ choices: [choice] })));
                    if (piece !== undefined) return;
                    stream.enqueue(encoder.encode("data: [DONE]\\n\\n"));
                    stream.close();
                },
            });
            return Promise.resolve(new Response(body, { status: 200 }));
        };
    """
    page.run(script, pieces)


ROUND = ["So", *["round", " and", " round,", " again "] * 400]


def test_a_looping_answer_is_stopped(page: Browser) -> None:
    says(page, ROUND)
    send(page, "the wheel")
    page.until(lambda: done(page) and figures(page))
    assert "it repeated itself over and over" in figures(page)
    assert page.text("#status") == "Stopped."
    assert page.run("return asked.signal.aborted")
    assert "".join(ROUND).startswith(page.run("return turns[0].answer"))
    shown = len(page.run("return turns[0].answer")) / len("".join(ROUND)) * len(ROUND)
    assert 300 <= shown < 300 + 65
    assert page.text(".notice") == ""
    assert page.text(".foot button") == "Regenerate"


def test_a_looping_answer_goes_on_with_the_loop_check_off_and_after_a_reload(page: Browser) -> None:
    page.click("#loop_check")
    page.reload()
    assert not page.run("return loop_check.checked")
    says(page, ROUND)
    send(page, "the wheel")
    page.until(lambda: done(page) and figures(page))
    assert page.run("return turns[0].answer") == "".join(ROUND)
    assert "repeated itself" not in figures(page)
    page.click("#fields button[type=reset]")
    page.until(lambda: page.run("return localStorage.getItem('polarlm.settings')") == "{}")
    assert page.run("return loop_check.checked")


def test_a_list_with_lines_that_look_alike_is_not_stopped(page: Browser) -> None:
    items = [piece for number in range(150) for piece in (f"{number}", ". one", " more", " line\n")]
    says(page, [*items, *["-"] * 250, *["Twice", " the", " same", " words "] * 50, *map(str, range(800))] * 2)
    send(page, "a list")
    page.until(lambda: done(page) and figures(page))
    assert "repeated itself" not in figures(page)


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


# -- text is text ------------------------------------------------------------------------------------------------


def test_text_of_the_model_is_never_html(page: Browser) -> None:
    page.run("const p = make('div', 'probe'); document.body.append(p); render(p, arguments[0])", HOSTILE)
    elements = page.run("return [...document.querySelectorAll('.probe *')].map((e) => e.localName)")
    assert elements == ["p", "strong", "code", "pre", "code", "p"]
    for piece in ('<img src=x onerror="window.harmed = 1">', "<b>bold</b>", "</code></pre><svg", "&lt;escaped&gt;"):
        assert piece in page.text(".probe")
    assert page.run("return window.harmed ?? null") is None


def test_text_of_the_user_is_never_html(page: Browser) -> None:
    choose(page, max_tokens=1)
    send(page, HOSTILE.partition("\n")[0])
    page.until(lambda: done(page) and page.text(".question"))
    assert page.text(".question") == HOSTILE.partition("\n")[0]
    assert page.run("return document.querySelectorAll('.question *').length") == 0
    assert page.run("return window.harmed ?? null") is None


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("", []),
        ("one\ntwo\n\n\nthree", ["P one\ntwo", "P three"]),
        ("before\n```python\nx = 1\n\ny = 2\n```\nafter", ["P before", "PRE x = 1\n\ny = 2", "P after"]),
        ("```\nstill being written", ["PRE still being written"]),
        ("```", ["PRE "]),
        ("~~~~\n```\n~~~\n~~~~\nout", ["PRE ```\n~~~", "P out"]),
        ("a ```one line``` fence", ["P a ```one line``` fence"]),
        ("2 * 3 * 4 and ** nothing", ["P 2 * 3 * 4 and ** nothing"]),
    ],
)
def test_paragraphs_and_code(page: Browser, text: str, blocks: list[str]) -> None:
    """At once and character by character."""
    script = """
        const [whole, grown] = [make("div"), make("div")], text = arguments[0];
        render(whole, text);
        for (let end = 0; end <= text.length; end += 1) render(grown, text.slice(0, end));
        return [whole, grown].map((of) => [...of.children].map((block) => `${block.tagName} ${block.textContent}`));
    """
    assert page.run(script, text) == [blocks, blocks]


def test_nothing_becomes_code_unless_a_program_asks_for_it(page: Browser) -> None:
    """Trusted types: what would write HTML, a script or a handler raises an error."""
    script = """
        const raises = (action) => { try { action(); return false; } catch { return true; } };
        return [
            raises(() => { make("p").innerHTML = "<b>"; }),
            raises(() => { make("script").textContent = "1"; }),
            raises(() => { make("p").setAttribute("onclick", "1"); }),
            raises(() => { setTimeout("1"); }),
        ];
    """
    assert page.run(script) == [True] * 4


def test_the_policy_stops_what_is_injected(page: Browser) -> None:
    script = """
        const violated = new Set();
        document.addEventListener("securitypolicyviolation", (event) => violated.add(event.effectiveDirective));
        const add = (name, attributes) => {
            const element = document.createElement(name);
            for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
            document.body.append(element);
            return element;
        };
        const past = trustedTypes.createPolicy("past trusted types", { createScript: (text) => text });
        const harm = past.createScript("window.harmed = 1");
        const inline = document.createElement("script");
        inline.textContent = harm;
        document.body.append(inline);
        add("button", { onclick: harm }).click();
        add("p", { style: "position: fixed" });
        add("img", { src: "http://127.0.0.1:9/" });
        add("iframe", { src: "http://127.0.0.1:9/" });
        const fetched = await fetch("http://127.0.0.1:9/").catch((error) => error.name);
        await new Promise((resolve) => setTimeout(resolve, 50));
        return [fetched, window.harmed ?? null, [...violated].sort()];
    """
    fetched, harmed, violated = page.run(f"return (async () => {{ {script} }})()")
    assert (fetched, harmed) == ("TypeError", None)
    stopped = ["connect-src", "frame-src", "img-src", "script-src-attr", "script-src-elem", "style-src-attr"]
    assert violated == stopped


# -- meters ------------------------------------------------------------------------------------------------------


def test_the_meters_fill(page: Browser, server: Process) -> None:
    now = stats(server, 0)
    assert page.text("#model") == now["model"]
    assert page.text("#bits") == f"{now['bits_per_value']:.2f} bits/value"
    assert page.text("#types").startswith(f"Keys as {now['cache_type_k']}, values as {now['cache_type_v']}")
    assert (page.text("#speed"), page.text("#memory")) == ("–", "–")
    choose(page, temperature=0, max_tokens=100)
    send(page, LONG)
    page.until(lambda: page.text("#requests").startswith("1 running"))
    page.until(lambda: page.text("#context").startswith("≈ "))
    page.until(lambda: done(page))
    said = re.search(r"of (\d+) prompt tokens from the cache · (\d+) tokens · (\S+ tokens/s)", figures(page))
    assert said is not None
    total = int(said[1]) + int(said[2])
    page.until(lambda: page.text("#context") == f"{total} of {now['context']}")
    assert page.run("return filled.value") == total
    assert page.text("#speed") == said[3]
    assert 0 < float(said[3].split()[0]) < 50  # a step takes 20 ms at least
    sequence = stats(server, total)["sequence"]
    page.until(lambda: page.text("#memory").startswith(f"{sequence['bytes'] / 1024:.1f} KiB"))
    assert page.text("#saved").startswith(f"f16 would take {sequence['f16_bytes'] / 1024:.1f} KiB")
    page.until(lambda: page.text("#requests") == "0 running, 0 waiting")


def test_the_memory_saved_is_shown_as_a_factor(page: Browser) -> None:
    show = "stats.sequence = {tokens: 9, bytes: arguments[0], f16_bytes: arguments[1]}; meter()"
    page.run(show, 3 << 20, 12 << 20)
    assert page.text("#memory") == "3.0 MiB, 4.0× saved"
    page.run(show, 3 << 20, 3 << 20)
    assert page.text("#memory") == "3.0 MiB"
    page.run(show, 12 << 20, 3 << 20)
    assert page.text("#memory") == "12.0 MiB"
    assert "stay exact" in page.text("#saved")


# -- settings ----------------------------------------------------------------------------------------------------


def test_settings_are_there_after_a_reload(page: Browser) -> None:
    chosen = {"system": "be brief", "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
    chosen |= {"repeat_penalty": 1.1, "max_tokens": 99, "seed": 5}
    choose(page, **chosen)
    page.reload()
    fields = {name: page.run("return document.getElementById(arguments[0]).value", name) for name in chosen}
    assert fields == {name: str(value) for name, value in chosen.items()}
    page.click("#fields button[type=reset]")
    page.until(lambda: page.run("return localStorage.getItem('polarlm.settings')") == "{}")


def test_a_browser_that_forbids_storage_gets_its_answer(page: Browser) -> None:
    for storage in ("sessionStorage", "localStorage"):
        page.run(
            f"Object.defineProperty(window, '{storage}', {{get() {{ throw new DOMException('no', 'SecurityError') }}}})"
        )
    choose(page, temperature=0, max_tokens=5)
    send(page, "the end")
    page.until(lambda: done(page))
    assert answer(page)


def test_an_invalid_setting_keeps_the_message(page: Browser) -> None:
    choose(page, top_p=1.5)
    send(page, "the rain")
    assert page.run("return [turns.length, message.value, document.activeElement.id]") == [0, "the rain", "top_p"]


# -- what goes wrong ---------------------------------------------------------------------------------------------


def test_the_servers_sentence_is_shown(page: Browser) -> None:
    send(page, "rain " * 200)
    page.until(lambda: page.text(".notice"))
    assert "tokens" in page.text(".notice")
    assert page.text(".foot button") == "Retry"
    choose(page, temperature=0, max_tokens=3)
    send(page, "the rain")  # what was not answered is not part of the conversation
    page.until(lambda: done(page) and page.run("return turns.length") == 2)
    assert answer(page) != ""
    assert page.run("return document.querySelectorAll('.notice').length") == 1


def test_a_server_that_is_silent_about_its_cache_is_no_trouble(
    visit: Callable[[Process], Browser], tiny_path: Path, tmp_path: Path
) -> None:
    with Process(tiny_path, tmp_path, "--hide-cached-tokens", troubled=True) as server:
        page = visit(server)
        choose(page, temperature=0, max_tokens=3)
        send(page, "the rain")
        page.until(lambda: done(page) and answer(page))
        assert re.match(r"\d+ prompt tokens · 3 tokens", figures(page))
        assert page.run("return document.querySelectorAll('.notice').length") == 0


def test_a_busy_server_says_when_to_come_back_and_retry_does(
    visit: Callable[[Process], Browser], tiny_path: Path, tmp_path: Path
) -> None:
    flags = ("--parallel", "1", "--max-queue", "0")
    with Process(tiny_path, tmp_path, *flags, troubled=True) as server:
        page = visit(server)
        choose(page, temperature=0, max_tokens=3)
        long = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}
        other = threading.Thread(target=complete, args=(server, [{"role": "user", "content": "on"}]), kwargs=long)
        other.start()
        eventually(lambda: stats(server, 0)["running"] == 1)
        send(page, "the rain")
        page.until(lambda: page.text(".notice"))
        assert re.search(r"busy: .* about \d+ seconds?\.$", page.text(".notice"))
        other.join()
        page.click(".foot button")
        page.until(lambda: done(page) and answer(page))
        assert page.text(".notice") == ""


def test_a_lost_connection_is_shown_and_can_be_retried(
    visit: Callable[[Process], Browser], tiny_path: Path, tmp_path: Path
) -> None:
    with ExitStack() as ends:
        server = ends.enter_context(Process(tiny_path, tmp_path, troubled=True))
        page = visit(server)
        choose(page, temperature=0)
        send(page, LONG)
        page.until(lambda: len(page.run("return turns[0].answer")) > 2)
        server.process.kill()
        page.until(lambda: page.text(".notice"))
        assert page.text(".notice") == "The connection to the server was lost before the answer was complete."
        assert len(answer(page)) > 2
        assert page.text(".foot button") == "Retry"
        page.click(".foot button")
        page.until(lambda: "cannot be reached" in page.text(".notice"))
        page.until(lambda: page.text("#status") == "The server cannot be reached.")
        port = server.url.rpartition(":")[2]
        ends.enter_context(Process(tiny_path, tmp_path, "--port", port))
        page.click(".foot button")
        page.until(lambda: done(page) and len(answer(page)) > 2)
        page.until(lambda: page.text("#status") == "Answered.")
        assert page.text(".notice") == ""


def test_a_key_is_asked_for_and_kept_for_this_tab_alone(
    visit: Callable[[Process], Browser], tiny_path: Path, tmp_path: Path
) -> None:
    with Process(tiny_path, tmp_path, **{KEY_VARIABLE: "sk-1"}) as server:
        page = visit(server)
        page.until(lambda: page.shown("#key"))
        choose(page, temperature=0, max_tokens=3)
        send(page, "the rain")
        page.until(lambda: page.text(".notice") == "This server asks for an API key.")
        page.type("#key", "sk-2" + ENTER)
        page.until(lambda: page.shown("#key") and page.text("#door-why") == "The server does not know this key.")
        page.type("#key", "sk-1" + ENTER)
        page.until(lambda: done(page) and answer(page))  # what was refused is asked again
        assert not page.shown("#key")
        assert page.run("return document.querySelectorAll('.notice').length") == 0
        assert "sk-1" not in page.run("return JSON.stringify(localStorage)")
        page.reload()
        page.until(lambda: "bits/value" in page.text("#bits"))
        assert not page.shown("#key")


# -- keyboard, screen reader, screens ----------------------------------------------------------------------------


def test_shift_enter_begins_a_line(page: Browser) -> None:
    choose(page, max_tokens=1)
    send(page, f"one{SHIFT}{ENTER}{NO_MODIFIER}two")
    page.until(lambda: page.text(".question"))
    assert page.text(".question") == "one\ntwo"


def test_everything_can_be_reached_by_keyboard(page: Browser) -> None:
    numbers = ["temperature", "top_p", "top_k", "min_p", "repeat_penalty", "max_tokens", "seed"]
    order = ["new", "log", "system", *numbers, "loop_check", "reset", "message", "send"]
    page.run("document.getElementById('new').focus()")
    reached = []
    for _ in order:
        reached.append(page.run("return document.activeElement.id || document.activeElement.type"))
        page.press(TAB)
    assert reached == order


def test_every_control_has_an_accessible_name(page: Browser) -> None:
    choose(page, max_tokens=1)
    send(page, "the rain")
    page.until(lambda: done(page) and page.text(".foot"))
    nodes = page.protocol("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "spinbutton", "checkbox", "log", "article", "progressbar", "region"}
    named = [(node["role"]["value"], node["name"]["value"]) for node in nodes if "role" in node and "name" in node]
    found = [(role, name) for role, name in named if role in roles]
    assert {role for role, _ in found} == roles
    assert all(name for _, name in found), found
    live = page.run("return ['turns', 'status'].map((id) => document.getElementById(id).role)")
    assert live == ["log", "status"]


def test_a_narrow_screen_has_all_of_it(page: Browser) -> None:
    size(page, 360, 640)
    assert page.run("return document.documentElement.scrollWidth") == 360
    for seen in ("#message", "#send", "#context", "#memory", "#requests", "#open", "#new"):
        assert page.shown(seen)
    assert not page.shown("#temperature")
    page.run("document.getElementById('open').focus()")
    page.press(ENTER)
    assert page.shown("#temperature")
    assert page.run("return [document.activeElement.id, log.inert, composer.inert]") == ["system", True, True]
    assert page.run("return document.documentElement.scrollWidth") == 360
    page.press(ESCAPE)
    assert not page.shown("#temperature")
    assert page.run("return [document.activeElement.id, log.inert, composer.inert]") == ["open", False, False]


def test_the_view_follows_the_answer_unless_the_user_has_scrolled_up(page: Browser) -> None:
    size(page, 360, 400)
    below = "return log.scrollHeight - log.scrollTop - log.clientHeight"
    page.run("temperature.value = 0")  # it is out of sight
    send(page, LONG)
    page.run("turns[0].parts.question.append('\\nmore'.repeat(30)); follow()")
    page.until(lambda: len(page.run("return turns[0].answer")) > 5)
    assert page.run(below) < 2
    page.run("log.scrollTop = 0")
    length = len(page.run("return turns[0].answer"))
    page.until(lambda: len(page.run("return turns[0].answer")) > length + 20)
    assert page.run("return log.scrollTop") == 0
    page.run("log.scrollTop = log.scrollHeight")
    page.until(lambda: len(page.run("return turns[0].answer")) > length + 60)
    assert page.run(below) < 2


def brightness(colour: str) -> float:
    """Relative luminance, as WCAG has it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_can_be_read(page: Browser, scheme: str) -> None:
    page.protocol("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    paper = brightness(page.run(style, "body", "backgroundColor"))
    assert (paper > 0.5) == (scheme == "light")
    for selector in ("body", "#model", ".meters small", "#how", "button.quiet"):
        pair = sorted([brightness(page.run(style, selector, "color")), paper])
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, selector
    pair = sorted(brightness(page.run(style, "#send", name)) for name in ("color", "backgroundColor"))
    assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5
