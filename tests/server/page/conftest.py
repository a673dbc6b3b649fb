"""A browser, a server, and the page that the one has from the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.lines import eventually
from tests.server.page.browser import CHROMEDRIVER, CHROMIUM, Browser, browser
from tests.server.page.visitor import size
from tests.server.process import Process


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("chromium and chromedriver are not both on the PATH")
    with browser(tmp_path_factory.mktemp("browser")) as window:
        yield window


@pytest.fixture(scope="session")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Its steps take their time, so that there is something to see while it answers."""
    with Process(tiny_path, tmp_path_factory.mktemp("server"), troubled=True) as process:
        yield process


@pytest.fixture(scope="session")
def visit(window: Browser) -> Callable[[Process], Browser]:
    """visit(server): the page of a server as somebody sees it who has never been there."""

    def open_page(process: Process) -> Browser:
        size(window, 1280, 800)
        window.open(f"{process.url}/health")  # shares the page's storage, and is there at once
        window.run(
            """localStorage.clear(); sessionStorage.clear();
            return new Promise((done) => { indexedDB.deleteDatabase("polarlm").onsuccess = done; });"""
        )
        window.open(process.url)
        return window

    return open_page


@pytest.fixture
def page(visit: Callable[[Process], Browser], server: Process) -> Iterator[Browser]:
    """The page of the server, ready; afterwards, when it is left, nothing is computed for it any more."""
    page = visit(server)
    page.until(lambda: "bits/value" in page.text("#bits"))
    page.until(lambda: page.run("return document.getElementById('temperature').placeholder"))
    yield page
    page.protocol("Emulation.setEmulatedMedia", features=[])
    page.open("about:blank")
    eventually(server.is_idle)
