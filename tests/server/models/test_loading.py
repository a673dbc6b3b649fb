"""Loads that take for ever, with real processes: a download that stops in mid-file, and a process that hangs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from polarlm.server.models import process
from polarlm.server.models.process import FAILED, LOADING
from tests.compiled import share_kernels
from tests.model_loaders.hub_server import Hub, Repository
from tests.server.lines import PATIENCE, eventually
from tests.server.models.running import Front, front, two_models
from tests.server.process import started

FILE, FAR = "tiny-Q4_K_M.gguf", "someone/tiny-GGUF:Q4_K_M"
FLAGS = ("--device", "cpu", "--no-calibration", "--cache-type", "f16", "--port", "0")
ONE_TOKEN: dict[str, Any] = {"prompt": "Once", "max_tokens": 1}


@pytest.fixture
def stopped(
    hub: Hub, small_ggufs: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[threading.Event]:
    """A download that stops in mid-file. Yields the event that says so; also processes use this hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    hub.repositories["someone/tiny-GGUF"] = Repository({FILE: small_ggufs[FILE] + bytes(4 << 20)})
    hub.trouble.hold[FILE] = threading.Event()
    yield hub.trouble.held
    hub.trouble.hold[FILE].set()


@pytest.fixture
def asking() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def models(folder: Path) -> Path:
    two_models(folder)
    written = "".join(f"[{name}]\npath = '{folder / name}'\n" for name in ("big", "small"))
    (folder / "models.toml").write_text(f"{written}[far]\nhf = '{FAR}'\n")
    return folder / "models.toml"


def hung(server: Front, name: str) -> None:
    """Stop the process of a model that has begun to be loaded, as on a disk that hangs."""
    eventually(lambda: server.slot(name).process is not None)
    os.kill(server.pid(name), signal.SIGSTOP)
    assert server.state(name) == LOADING


@pytest.mark.slow
def test_a_process_that_hangs_keeps_no_model_waiting_and_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asking: ThreadPoolExecutor
) -> None:
    monkeypatch.setattr(process, "_POLL_SECONDS", 0.05)
    with front(two_models(tmp_path)) as server:
        waits = asking.submit(server.ask, "big")
        hung(server, "big")
        assert server.ask("small").status_code == 200
        monkeypatch.setattr(process, "_IDLE_SECONDS", 0.1)
        answer = waits.result(PATIENCE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert "neither read nor computed" in answer.json()["error"]["message"]
        assert server.state("big") == FAILED
        monkeypatch.setattr(process, "_IDLE_SECONDS", 120)
        assert server.ask("big").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["far", "big"])
def test_a_signal_ends_a_server_in_the_midst_of_a_load(
    name: str, stopped: threading.Event, hub: Hub, tmp_path: Path, asking: ThreadPoolExecutor
) -> None:
    places = {CACHE_VARIABLE: str(share_kernels(tmp_path / "cache")), "HF_ENDPOINT": hub.url}
    server, url = started(models(tmp_path), tmp_path / "stderr", *FLAGS, **places)
    try:
        waits: Future[httpx.Response] = asking.submit(
            httpx.post, f"{url}/v1/completions", json={"model": name} | ONE_TOKEN, timeout=PATIENCE
        )
        eventually(lambda: len(psutil.Process(server.pid).children()) == 1)
        (child,) = psutil.Process(server.pid).children()
        if name == "far":
            assert stopped.wait(PATIENCE)
            with httpx.Client(base_url=url, params={"model": "far"}, timeout=PATIENCE) as http:
                eventually(lambda: http.get("/stats").json()["state"].startswith("downloading, "))
                assert http.post("/tokenize", json={"model": "big", "content": "a"}).is_success  # it waits for nothing
        else:
            child.suspend()
        server.send_signal(signal.SIGTERM)
        answer = waits.result(PATIENCE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "closing")
        assert server.wait(PATIENCE) == 0
        eventually(lambda: not child.is_running())
        assert "Traceback" not in (tmp_path / "stderr").read_text()
    finally:
        server.kill()
        server.communicate(timeout=PATIENCE)
        with suppress(NameError, psutil.NoSuchProcess):
            child.kill()
