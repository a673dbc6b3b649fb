"""One browser and one server for all tests of this folder, and the page as a user opens it. Both end with the folder:
they would take time while other tests run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.lines import eventually
from tests.server.page.browser import CHROMEDRIVER, CHROMIUM, chromium
from tests.server.page.visitor import Page
from tests.server.process import Process


@pytest.fixture(scope="package")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("chromium and chromedriver are not both on the PATH")
    with chromium(tmp_path_factory.mktemp("browser")) as session:
        yield Page(session)


@pytest.fixture(scope="package")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Its steps take their time, so that there is something to see while it answers."""
    with Process(tiny_path, tmp_path_factory.mktemp("server"), troubled=True) as process:
        yield process


@pytest.fixture(scope="package")
def visit(window: Page) -> Callable[[Process], Page]:
    """visit(server): the page of a server in a browser that keeps nothing of it."""

    def open_page(process: Process) -> Page:
        window.size(1280, 800)
        window.open(f"{process.url}/health")  # shares the page's storage, and is there at once
        window.run(
            """localStorage.clear(); sessionStorage.clear();
            return new Promise((done) => { indexedDB.deleteDatabase("polarlm").onsuccess = done; });"""
        )
        window.open(process.url)
        return window

    return open_page


@pytest.fixture
def page(visit: Callable[[Process], Page], server: Process) -> Iterator[Page]:
    """The page of the server, ready. After the test the page is left, and the server computes nothing for it."""
    page = visit(server)
    page.until(lambda: "bits/value" in page.text("#bits"))
    page.until(lambda: page.run("return document.getElementById('temperature').placeholder"))
    yield page
    page.prefers()
    page.open("about:blank")
    eventually(server.is_idle)


@pytest.fixture
def drawing(window: Page, visit: Callable[[Process], Page], server: Process) -> Page:
    """The page of the server as the test before has left it, for scripts that only draw into elements of their own."""
    is_there = window.run("return typeof Markdown") != "undefined"
    return window if is_there else visit(server)
