"""What somebody does on the page, what they see there, and answers that are made up for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.server.page.browser import ENTER, Browser
from tests.server.process import Process

LONG = "a"  # what the tiny model has 153 tokens to say to when it is greedy

Piece = str | dict[str, Any]


class Page(Browser):
    """A window with the chat page. A message or an answer is given by its place; -1 is the last one."""

    # -- what somebody does --------------------------------------------------------------------------------------

    def size(self, width: int, height: int) -> None:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.protocol("Emulation.setDeviceMetricsOverride", **screen)

    def prefers(self, **features: str) -> None:
        """What the user prefers, by the names of media features with _ for each -."""
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.protocol("Emulation.setEmulatedMedia", features=listed)

    def choose(self, **settings: float | str) -> None:
        for name, value in settings.items():
            self.run("for (const fold of FOLDS) fold.open ||= fold.contains($(arguments[0]))", name)
            self.type(f"#{name}", str(value))

    def send(self, message: str) -> None:
        self.type("#message", message + ENTER)

    def send_and_wait(self, message: str) -> None:
        """Returns once the answer to `message` is complete."""
        before = self.run("return rows.length")
        self.send(message)
        self.until(lambda: self.run("return rows.length") > before and self.done())

    def talk(self, *answers: str) -> None:
        """A conversation with these answers, to the messages "first", "second" and "third"."""
        self.says(*([answer] for answer in answers))
        for message in ("first", "second", "third")[: len(answers)]:
            self.send_and_wait(message)

    def begin(self, *answers: list[Piece]) -> None:
        """Sends "go"; returns when a part of the first of these answers has come."""
        self.says(*answers)
        self.send("go")
        self.until(lambda: self.run("return live?.message.text"))

    def press_button(self, name: str, message: int = -1) -> None:
        """Clicks a button by its name or text, in one of the messages that are shown, once it is there."""
        script = """
            const all = [...rows.at(arguments[1]).element.querySelectorAll("button")];
            const match = all.find((made) => [made.textContent, made.ariaLabel].includes(arguments[0]));
            match?.click();
            return match !== undefined;
        """
        self.until(lambda: self.run(script, name, message))

    def rewrite(self, text: str, button: str) -> None:
        """Writes a text into the form in place of a message, which has the focus, and sends or saves it."""
        self.run("document.activeElement.value = arguments[0]", text)
        self.press_button(button)

    def rename(self, name: str) -> None:
        self.click("[data-does=rename]")
        self.until(lambda: self.run("return document.activeElement.tagName") == "INPUT")
        self.type("#list input", name)

    def copied(self, press: Callable[[], None]) -> str:
        """What `press` copies, as the page gives it to the clipboard."""
        self.run("window.copied = null; navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        press()
        self.until(lambda: self.run("return window.copied") is not None)
        return self.run("return window.copied")

    def change_elsewhere(self, title: str) -> None:
        """Another tab gives the conversation that is shown another title."""
        script = """
            return (async (title) => {
                const other = {...structuredClone(current), title, named: Date.now()};
                await resultOf(database.transaction(SHELF, "readwrite").objectStore(SHELF).put(other));
                new BroadcastChannel("polarlm").postMessage(other.id);
            })(arguments[0]);
        """
        self.run(script, title)

    def export(self) -> dict[str, Any]:
        self.run(
            """
            window.exported = null;
            URL.createObjectURL = (blob) => { blob.text().then((text) => { window.exported = text; }); return "#"; };
            """
        )
        self.click("#export-all")
        self.until(lambda: self.run("return window.exported"))
        return json.loads(self.run("return window.exported"))

    def import_text(self, text: str) -> str:
        """Imports a file; the sentence that is shown then."""
        script = """
            const files = new DataTransfer();
            files.items.add(new File([arguments[0]], "chats.json"));
            document.getElementById("shelf-says").textContent = "";
            file.files = files.files;
            file.dispatchEvent(new Event("change"));
        """
        self.run(script, text)
        self.until(lambda: self.text("#shelf-says"))
        return self.text("#shelf-says")

    # -- what is shown and kept ----------------------------------------------------------------------------------

    def done(self) -> bool:
        return self.shown("#send")

    def count(self, selector: str) -> int:
        return self.run("return document.querySelectorAll(arguments[0]).length", selector)

    def focused(self) -> str:
        """The id, the name or the text of the element that has the focus."""
        return self.run("const at = document.activeElement; return at.id || at.ariaLabel || at.textContent")

    def text_of(self) -> str:
        """The last answer, as it was written."""
        return self.run("return rows.findLast(({message}) => message.role === 'assistant')?.message.text ?? ''")

    def answer(self) -> str:
        """The last answer, as it is shown."""
        return self.run("return [...document.querySelectorAll('.answer')].at(-1)?.innerText ?? ''")

    def roles(self) -> list[str]:
        return self.run("return rows.map((row) => row.message.role)")

    def texts(self) -> list[str]:
        return self.run("return rows.map(({message}) => message.text)")

    def titles(self) -> list[str]:
        return self.run("return [...document.querySelectorAll('button.chat')].map((made) => made.textContent)")

    def kept(self) -> list[dict[str, Any]]:
        """The conversations in the browser's database."""
        return self.run("return resultOf(database.transaction(SHELF).objectStore(SHELF).getAll())")

    def figures(self) -> str:
        """What is said below the last answer."""
        return self.run("return [...document.querySelectorAll('.figures')].at(-1)?.textContent ?? ''")

    def tree(self) -> list[dict[str, Any]]:
        """What the browser tells screen readers."""
        return [node for node in self.protocol("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]

    def buttons(self, message: int = -1) -> list[str]:
        script = """return [...rows.at(arguments[0]).element.querySelectorAll("button")]
            .map((made) => made.getAttribute("aria-label") ?? made.textContent)"""
        return self.run(script, message)

    # -- answers that are made up --------------------------------------------------------------------------------

    def says(self, *answers: list[Piece]) -> None:
        """What the answers from now on are, piece by piece, until the page turns away; the last one stays.

        A piece is text, or a dict: the delta of an event, {"event": …}, {"status": …, "error": …, "headers": …},
        {"wait": milliseconds}, or {"held": True}, which waits for `go_on`. `asked` returns the body of a request.
        """
        self.run(_SAYS, list(answers))

    def go_on(self) -> None:
        """Let the answers of `says` go on that are held, and wait for their end."""
        self.run("window.goesOn = true")
        self.until(self.done)

    def request_body(self, which: int = -1) -> dict[str, Any]:
        return self.run("return asked.at(arguments[0])", which)

    def contents(self, which: int = -1) -> list[str]:
        return [message["content"] for message in self.request_body(which)["messages"]]


_SAYS = """
const [answers] = arguments, real = window.real ??= window.fetch;
const event = (value) => `data: ${JSON.stringify(value)}\\n\\n`;
window.asked = [];
window.goesOn = false;
window.fetch = async (path, options) => {
    if (!path.endsWith("completions")) return real(path, options);
    const pieces = answers[Math.min(window.asked.length, answers.length - 1)];
    window.asked.push(JSON.parse(options.body));
    window.signal = options.signal;
    const {status, error, headers} = pieces[0] ?? {};
    if (status) return new Response(JSON.stringify({error}), {status, headers});
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


def call(index: int, name: str, *arguments: str) -> list[Piece]:
    first = {"index": index, "id": f"call-{index}", "function": {"name": name, "arguments": ""}}
    more = [{"index": index, "function": {"arguments": piece}} for piece in arguments]
    return [{"tool_calls": [delta]} for delta in (first, *more)]


def usage(prompt: int, completion: int, **details: Any) -> dict[str, Any]:
    """A piece that tells how many tokens a request had."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **details}
    return {"event": {"choices": [], "usage": counts}}


def stats(process: Process, tokens: int) -> dict[str, Any]:
    return json.loads(process.get(f"/stats?tokens={tokens}"))
