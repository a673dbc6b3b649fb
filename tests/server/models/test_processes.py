"""`polarlm serve --models` as a process: how it ends, and what becomes of the models' processes then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from polarlm.server.__main__ import main
from tests.compiled import share_kernels
from tests.server.lines import PATIENCE, eventually
from tests.server.models.running import two_models
from tests.server.process import started

FLAGS = ("--device", "cpu", "--no-calibration", "--cache-type", "f16", "--port", "0")


class Server:
    """A server of the models `big` and `small`; `big` is loaded."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.errors = folder / "stderr"
        (folder / "models").mkdir()
        place = two_models(folder / "models")
        cache = {CACHE_VARIABLE: str(share_kernels(folder / "cache"))}
        self.process, self.url = started(place, self.errors, *FLAGS, *flags, **cache)
        self.ask("big")
        self.children = psutil.Process(self.process.pid).children()
        assert len(self.children) == 1

    def ask(self, model: str, tokens: int = 3) -> httpx.Response:
        body = {"model": model, "prompt": "Once", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def no_process_is_left(self) -> bool:
        """The model's process is gone, and so is what it had started."""
        return not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in self.children)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate(timeout=PATIENCE)
        for child in started.children:
            if child.is_running():
                child.kill()


@pytest.mark.slow
def test_a_process_that_loads_notices_that_its_parent_was_killed(server: Server) -> None:
    def asking() -> None:
        with suppress(httpx.HTTPError):
            server.ask("small")

    threading.Thread(target=asking).start()
    parent = psutil.Process(server.process.pid)
    eventually(lambda: len(parent.children()) == 2)
    server.children = parent.children()
    server.process.kill()
    eventually(server.no_process_is_left)


def test_a_place_without_models_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--models", str(tmp_path), "--port", "0"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "there is no .gguf file and no folder of a model in it" in told.err
