"""Models of the hub: fetched when they are pulled or asked for."""

from __future__ import annotations

from pathlib import Path

import ollama
import pytest

from polarlm.server.models.served import READY
from tests.model_loaders.hub_server import Hub, Repository
from tests.server.models.running import KEY, front, two_models

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
        assert [of for file in small_ggufs for of in cached.fetched(file)].count(None) == 1


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
