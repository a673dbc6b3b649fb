"""Chromium without a screen, driven by chromedriver over the protocol of the W3C."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.server.lines import PATIENCE, eventually

if TYPE_CHECKING:
    from typing_extensions import Self

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
ENTER, SHIFT, CONTROL, TAB, ESCAPE, NO_MODIFIER = "\ue007", "\ue008", "\ue009", "\ue004", "\ue00c", "\ue000"

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key under which the protocol has an element's id
_FLAGS = [
    "--headless=new",
    "--no-sandbox",  # root cannot start it otherwise; the only pages it sees are ours
    "--disable-gpu",
    "--disable-quic",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # pages need no other server
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-features=BackForwardCache",  # a page that was left shall not keep its database open
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2",  # a mouse, which a machine without a screen may lack
]


class Browser:
    """One window of a session. Elements are named by their CSS selectors, and have to be there."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session
        self._handle = session.get("/window").json()["value"]

    def _call(self, path: str, **body: Any) -> Any:
        self._post("/window", handle=self._handle)  # another window may have had the last command
        return self._post(path, **body)

    def _post(self, path: str, **body: Any) -> Any:
        response = self._session.post(path, json=body)
        value = response.json()["value"]
        assert response.is_success, value
        return value

    @contextmanager
    def second(self) -> Iterator[Self]:
        """Another window of the same browser, so with the same storage; closed when the `with` block ends."""
        self._post("/window", handle=self._call("/window/new", type="window")["handle"])
        window = type(self)(self._session)
        try:
            yield window
        finally:
            self._post("/window", handle=window._handle)
            self._session.delete("/window")

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
        strokes = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._call("/actions", actions=[{"type": "key", "id": "keyboard", "actions": strokes}])

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns, or that the promise which it returns resolves to."""
        return self._call("/execute/sync", script=script, args=list(arguments))

    def text(self, selector: str) -> str:
        """The text of an element, seen or not; empty if there is no such element."""
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def shown(self, selector: str) -> bool:
        return self.run("return document.querySelector(arguments[0])?.checkVisibility() ?? false", selector)

    def until(self, holds: Callable[[], Any]) -> None:
        """Returns once `holds()` is true; if that takes too long, the error says what the page showed."""
        try:
            eventually(holds)
        except AssertionError:
            raise AssertionError(f"the page says: {self.run('return document.body.innerText')}") from None

    def protocol(self, command: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._call("/goog/cdp/execute", cmd=command, params=parameters)

    def screenshot(self) -> bytes:
        """The visible part of the page as a PNG."""
        return base64.b64decode(self.protocol("Page.captureScreenshot", format="png")["data"])


@contextmanager
def chromium(folder: Path) -> Iterator[httpx.Client]:
    """A session of a browser with an empty profile in `folder`; ends with the `with` block."""
    assert CHROMIUM is not None
    assert CHROMEDRIVER is not None
    flags = [*_FLAGS, f"--user-data-dir={folder / 'profile'}"]
    options = {"binary": CHROMIUM, "args": flags}
    with subprocess.Popen([CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            port = next(
                int(ready[1]) for line in driver.stdout if (ready := re.search(r"successfully on port (\d+)", line))
            )
            base = f"http://127.0.0.1:{port}/session"
            patience = {"script": int(1000 * PATIENCE)}
            match = {"browserName": "chrome", "goog:chromeOptions": options, "timeouts": patience}
            wanted = {"capabilities": {"alwaysMatch": match}}
            started = httpx.post(base, json=wanted, timeout=PATIENCE).json()["value"]
            assert "sessionId" in started, started
            with httpx.Client(base_url=f"{base}/{started['sessionId']}", timeout=2 * PATIENCE) as session:
                try:
                    yield session
                finally:
                    httpx.delete(str(session.base_url).rstrip("/"), timeout=PATIENCE)
        finally:
            driver.terminate()
