"""Chromium without a screen, driven by chromedriver over the protocol of the W3C."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.lines import PATIENCE, eventually

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
ENTER, SHIFT, CONTROL, TAB, ESCAPE, NO_MODIFIER = "\ue007", "\ue008", "\ue009", "\ue004", "\ue00c", "\ue000"

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key under which the protocol has an element's id
_FLAGS = [
    "--headless=new",
    "--no-sandbox",  # root cannot start it otherwise; the only pages it sees are ours
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-features=BackForwardCache",  # a page that was left shall not keep its database open
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2",  # a mouse, which a machine without a screen may lack
]


class Browser:
    """One window. Elements are named by their CSS selectors, and have to be there."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def _call(self, path: str, **body: Any) -> Any:
        response = self._session.post(path, json=body)
        value = response.json()["value"]
        assert response.is_success, value
        return value

    @contextmanager
    def second(self) -> Iterator[Browser]:
        """Another window of the same browser, so with the same storage; closed when the `with` block ends."""
        made = self._call("/window/new", type="window")["handle"]
        mine = self._session.get("/window").json()["value"]
        try:
            yield _Window(self._session, made)
        finally:
            self._call("/window", handle=made)
            self._session.delete("/window")
            self._call("/window", handle=mine)

    def _element(self, selector: str) -> str:
        return self._call("/element", using="css selector", value=selector)[_ELEMENT]

    def open(self, url: str) -> None:
        self._call("/url", url=url)

    def reload(self) -> None:
        self._call("/refresh")

    def click(self, selector: str) -> None:
        self._call(f"/element/{self._element(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Real key strokes, into the element's end."""
        self._call(f"/element/{self._element(selector)}/value", text=text)

    def press(self, key: str) -> None:
        """A key, wherever the focus is."""
        strokes = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._call("/actions", actions=[{"type": "key", "id": "keyboard", "actions": strokes}])

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns; where that is a promise, what it comes to."""
        return self._call("/execute/sync", script=script, args=list(arguments))

    def text(self, selector: str) -> str:
        """What is written in an element, seen or not; empty where there is no such element."""
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def shown(self, selector: str) -> bool:
        return self.run("return document.querySelector(arguments[0])?.checkVisibility() ?? false", selector)

    def until(self, holds: Callable[[], Any]) -> None:
        """Waits for what the page is about to do; says what it showed if that does not come."""
        try:
            eventually(holds)
        except AssertionError:
            raise AssertionError(f"the page says: {self.run('return document.body.innerText')}") from None

    def protocol(self, command: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._call("/goog/cdp/execute", cmd=command, params=parameters)

    def screenshot(self) -> bytes:
        """A PNG of what is seen."""
        return base64.b64decode(self.protocol("Page.captureScreenshot", format="png")["data"])


class _Window(Browser):
    """A window that is turned to for each command, and back from."""

    def __init__(self, session: httpx.Client, handle: str) -> None:
        super().__init__(session)
        self._handle = handle

    def _call(self, path: str, **body: Any) -> Any:
        first = self._session.get("/window").json()["value"]
        super()._call("/window", handle=self._handle)
        try:
            return super()._call(path, **body)
        finally:
            super()._call("/window", handle=first)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile in `folder`; ends with the `with` block."""
    assert CHROMIUM is not None
    assert CHROMEDRIVER is not None
    flags = [*_FLAGS, f"--user-data-dir={folder / 'profile'}"]
    options = {"binary": CHROMIUM, "args": flags}
    with subprocess.Popen([CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            port = next(
                int(found[1]) for line in driver.stdout if (found := re.search(r"successfully on port (\d+)", line))
            )
            base = f"http://127.0.0.1:{port}/session"
            patience = {"script": int(1000 * PATIENCE)}
            match = {"browserName": "chrome", "goog:chromeOptions": options, "timeouts": patience}
            wanted = {"capabilities": {"alwaysMatch": match}}
            started = httpx.post(base, json=wanted, timeout=PATIENCE).json()["value"]
            assert "sessionId" in started, started
            with httpx.Client(base_url=f"{base}/{started['sessionId']}", timeout=2 * PATIENCE) as session:
                try:
                    yield Browser(session)
                finally:
                    httpx.delete(str(session.base_url).rstrip("/"), timeout=PATIENCE)
        finally:
            driver.terminate()
