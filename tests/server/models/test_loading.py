"""Loads with real processes: downloads from the hub, one that stops in mid-file, and a process that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from polarlm.server.config import ServerConfig
from polarlm.server.models import app, process
from polarlm.server.models.process import FAILED, LOADING, READY
from polarlm.server.models.registry import Registry
from polarlm.server.models.supervisor import Supervisor
from tests.compiled import share_kernels
from tests.lazily import ollama
from tests.model_loaders.hub_server import Hub, Repository
from tests.server.lines import PATIENCE, eventually
from tests.server.models.running import KEY, Front, common, front, two_models
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


# -- models of the hub -----------------------------------------------------------------------------------------

REPO = "someone/tiny-GGUF"


@pytest.fixture
def cached(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub, with its cache also in processes that are started."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    return hub


@pytest.mark.slow
def test_a_model_that_is_pulled_can_be_asked(cached: Hub, small_ggufs: dict[str, bytes], tmp_path: Path) -> None:
    cached.repositories[REPO] = Repository(small_ggufs)
    (tmp_path / "models").mkdir()
    with front(two_models(tmp_path / "models"), allow_pull=True) as server:
        client = ollama.Client(server.url, headers={"Authorization": f"Bearer {KEY}"})
        first, *_, last = client.pull(f"hf.co/{REPO}", stream=True)
        assert (first.status, last.status) == ("pulling manifest", "success")
        names = [model.model for model in client.list().models]
        assert names[:2] == ["big", "small"]
        assert names[2].startswith(f"{REPO}:Q")  # the quantization that was chosen
        assert client.generate(REPO, "Hi", options={"num_predict": 2}).done
        assert server.state(names[2]) == READY
        # The beginning of a file says what model it is; whole files are fetched once.
        assert [of for file in small_ggufs for of in cached.ranges_of(file)].count(None) == 1


@pytest.mark.slow
def test_a_model_that_is_not_on_the_hub_is_a_sentence(cached: Hub, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with front(two_models(tmp_path / "models"), allow_pull=True) as server:
        *_, last = server.http.post("/api/pull", json={"model": "no/such"}).text.splitlines()
        assert "no/such" in last
        assert last.startswith('{"error":')
        wrong = server.http.post("/api/pull", json={"model": "llama3"})
        assert (wrong.status_code, "does not name a model on the hub" in wrong.json()["error"]) == (400, True)
        whole = server.http.post("/api/pull", json={"model": "no/such", "stream": False})
        assert whole.status_code == 500


@pytest.mark.anyio
async def test_few_models_are_pulled_at_a_time_and_who_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[str] = []

    class Download:
        fetching = (1, 2)

        def __init__(self, model: Any) -> None:
            self.name = model.name
            running.append(self.name)

        async def fetch(self) -> Path:
            return await asyncio.Event().wait()  # type: ignore[return-value]

        async def end_at_once(self) -> None:
            running.remove(self.name)

    monkeypatch.setattr(app, "ModelProcess", lambda model, config, on_exit: Download(model))
    monkeypatch.setattr(app, "_PROGRESS_SECONDS", 0.001)

    config = ServerConfig(allow_pull=True)
    front = app._SeveralModels(Supervisor(Registry(common(), None, (), ()), config), None, config)  # type: ignore[arg-type]
    async with AsyncExitStack() as ends:
        pulls: list[AsyncGenerator[dict[str, Any], None]] = []
        for name in "abc":
            pull = front._pull_lines(f"user/{name}:Q4_K_M")
            pulls.append(await ends.enter_async_context(aclosing(pull)))
            assert await anext(pull) == {"status": "pulling manifest"}
        for pull in pulls[:2]:
            assert (await anext(pull))["completed"] == 1
        third = asyncio.ensure_future(anext(pulls[2]))
        await asyncio.sleep(0)
        assert running == ["user/a:Q4_K_M", "user/b:Q4_K_M"]
        await pulls[0].aclose()
        assert (await third)["completed"] == 1
        assert running == ["user/b:Q4_K_M", "user/c:Q4_K_M"]
    assert running == []
