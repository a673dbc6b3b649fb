"""`python -m polarlm.bench.lab.page_pictures` photographs the chat page with answers of the demonstration model.

It needs chromium and chromedriver on the PATH, and writes docs/images/chat-page.png and chat-page-phone.png.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from polarlm.model_loaders.demo import demo_model
from tests.server.page.browser import CHROMEDRIVER, CHROMIUM, chromium
from tests.server.page.visitor import Page
from tests.server.process import Process

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
QUESTIONS = [
    "Why do leaves turn red in autumn?",
    "Show me a Python function that reverses a string, and explain it briefly.",
]


def main() -> int:
    if CHROMIUM is None or CHROMEDRIVER is None:
        print("chromium and chromedriver have to be on the PATH", file=sys.stderr)
        return 1
    model = demo_model(None)
    with (
        tempfile.TemporaryDirectory() as folder,
        chromium(Path(folder)) as session,
        Process(model, Path(folder)) as server,
    ):
        page = Page(session)
        page.size(1280, 800)
        page.open(server.url)
        page.until(lambda: "bits/value" in page.text("#bits"))
        page.choose(temperature=0.6, repeat_penalty=1.08, seed=4, max_tokens=280)
        for question in QUESTIONS:
            page.send_and_wait(question)
        page.run("engine.open = true; document.querySelector('.side').scrollTop = 0")
        page.until(lambda: page.done() and page.text("#requests").startswith("0 running"))
        photograph(page, "chat-page.png")
        page.size(390, 844)
        page.protocol("Emulation.setTouchEmulationEnabled", enabled=True)
        page.prefers(prefers_color_scheme="dark")
        photograph(page, "chat-page-phone.png")
    return 0


def photograph(page: Page, name: str) -> None:
    page.run("document.activeElement.blur(); return new Promise((done) => setTimeout(done, 300))")
    (IMAGES / name).write_bytes(page.screenshot())


if __name__ == "__main__":
    sys.exit(main())
