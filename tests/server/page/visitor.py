"""What somebody does on the page, what they see there, and answers that are made up for them."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.server.lines import PATIENCE
from tests.server.page.browser import ENTER, Browser
from tests.server.process import Process

LONG = "a"  # what the tiny model has 153 tokens to say to when it is greedy


def size(page: Browser, width: int, height: int) -> None:
    page.protocol(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
    )


def choose(page: Browser, **settings: float | str) -> None:
    for name, value in settings.items():
        if name in ("tools", "schema"):
            page.run("document.getElementById('more').open = true")
        page.type(f"#{name}", str(value))


def send(page: Browser, message: str) -> None:
    page.type("#message", message + ENTER)


def done(page: Browser) -> bool:
    return page.shown("#send")


def send_and_wait(page: Browser, message: str) -> None:
    """Returns once the answer to `message` is complete."""
    before = page.run("return rows.length")
    send(page, message)
    page.until(lambda: page.run("return rows.length") > before and done(page))


def text_of(page: Browser, which: int = -1) -> str:
    """The text of an answer, as it came."""
    script = "return rows.filter(({message}) => message.role === 'assistant').at(arguments[0])?.message.text ?? ''"
    return page.run(script, which)


def answer(page: Browser, which: int = -1) -> str:
    """What an answer looks like."""
    return page.run("return [...document.querySelectorAll('.answer')].at(arguments[0])?.innerText ?? ''", which)


def roles(page: Browser) -> list[str]:
    return page.run("return rows.map((row) => row.message.role)")


def shown(page: Browser) -> list[str]:
    """The texts of the messages that are shown."""
    return page.run("return rows.map(({message}) => message.text)")


def titles(page: Browser) -> list[str]:
    """The names in the list of conversations."""
    return page.run("return [...document.querySelectorAll('button.chat')].map((made) => made.textContent)")


def kept(page: Browser) -> list[dict[str, Any]]:
    """The conversations in the browser's database."""
    return page.run("return granted(database.transaction(SHELF).objectStore(SHELF).getAll())")


def figures(page: Browser) -> str:
    """What is said below the last answer."""
    return page.run("return [...document.querySelectorAll('.figures')].at(-1)?.textContent ?? ''")


def press_button(page: Browser, name: str, message: int = -1) -> None:
    """Clicks a button by its name or text, in one of the messages that are shown, once it is there."""
    script = """
        const all = [...rows.at(arguments[1]).element.querySelectorAll("button")];
        const found = all.find((made) => [made.textContent, made.getAttribute("aria-label")].includes(arguments[0]));
        found?.click();
        return found !== undefined;
    """
    page.until(lambda: page.run(script, name, message))


def buttons(page: Browser, message: int = -1) -> list[str]:
    script = """return [...rows.at(arguments[0]).element.querySelectorAll("button")]
        .map((made) => made.getAttribute("aria-label") ?? made.textContent)"""
    return page.run(script, message)


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


Piece = str | dict[str, Any]


def says(page: Browser, *answers: list[Piece]) -> None:
    """What the answers from now on are, piece by piece, until the page turns away from them; the last one stays.

    A piece is text, or a dict: the delta of an event, {"event": …}, {"status": …, "error": …}, {"wait": milliseconds},
    {"held": True}, which waits for `go_on(page)`, or {"lost": True}. `asked(page)` are the bodies of the requests.
    """
    script = """
        const [answers] = arguments, real = window.real ??= window.fetch;
        const event = (value) => `data: ${JSON.stringify(value)}\\n\\n`;
        window.asked = [];
        window.goesOn = false;
        window.fetch = async (path, options) => {
            if (!path.endsWith("completions")) return real(path, options);
            const pieces = answers[Math.min(window.asked.length, answers.length - 1)];
            window.asked.push(JSON.parse(options.body));
            window.signal = options.signal;
            const {status, error} = pieces[0] ?? {};
            if (status) return new Response(JSON.stringify({error}), {status});
            let sent = 0;
            const encoder = new TextEncoder();
            const calls = pieces.some((piece) => piece.tool_calls);
            const body = new ReadableStream({
                start(stream) {
                    options.signal.addEventListener("abort", () => stream.error(options.signal.reason), {once: true});
                },
                async pull(stream) {
                    await null;
                    const piece = pieces[sent++];
                    if (piece?.wait) await new Promise((done) => setTimeout(done, piece.wait));
                    while (piece?.held && !window.goesOn && !options.signal.aborted) {
                        await new Promise((done) => setTimeout(done, 20));
                    }
                    if (options.signal.aborted) return undefined;
                    if (piece?.lost) return stream.error(new TypeError("lost"));
                    if (piece?.event) return stream.enqueue(encoder.encode(event(piece.event)));
                    const empty = piece === undefined || piece.wait || piece.held;
                    const delta = typeof piece === "string" ? {content: piece} : empty ? {} : piece;
                    const finish_reason = piece === undefined ? (calls ? "tool_calls" : "stop") : null;
                    stream.enqueue(encoder.encode(event({choices: [{delta, finish_reason}]})));
                    if (piece !== undefined) return;
                    stream.enqueue(encoder.encode("data: [DONE]\\n\\n"));
                    stream.close();
                },
            });
            return new Response(body, {status: 200});
        };
    """
    page.run(script, list(answers))


def go_on(page: Browser) -> None:
    """Let the answers of `says` go on that are held."""
    page.run("window.goesOn = true")


def asked(page: Browser, which: int = -1) -> dict[str, Any]:
    """The body of a request to `says`."""
    return page.run("return asked.at(arguments[0])", which)
