"""Models of the hub: fetched when they are pulled or asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest

from polarlm.server.config import ServerConfig
from polarlm.server.models import app
from polarlm.server.models.process import READY
from polarlm.server.models.registry import Registry
from polarlm.server.models.supervisor import Supervisor
from tests.lazily import ollama
from tests.model_loaders.hub_server import Hub, Repository
from tests.server.models.running import KEY, common, front, two_models

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
