"""Packs over HTTP: a field of all APIs, and their list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polarlm import pack
from polarlm.engine import Engine, EngineConfig
from polarlm.server.config import ServerConfig
from polarlm.server.running import journal
from polarlm.server.serving import load_driver
from tests.server.apis import API, APIS
from tests.server.http_server import Serving, serving

TEXT = "The harbour has a captain. " * 4


@pytest.fixture(scope="module")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("packs")
    file = packed(folder, tiny_path)
    with Engine.load(tiny_path, device="cpu", packs={"harbour": str(file)}) as engine, serving(engine) as running:
        yield running


def packed(folder: Path, model: Path) -> Path:
    (folder / "harbour.txt").write_text(TEXT)
    file = folder / "harbour.pack"
    assert pack.main([str(folder / "harbour.txt"), "-m", str(model), "-o", str(file), "--device", "cpu"]) == 0
    return file


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_a_request_begins_with_a_pack(server: Serving, api: API) -> None:
    tokens = len(server.engine.packs["harbour"].token_ids)
    alone = api.ask(server, "Who is it?", temperature=0)
    for _ in range(2):
        body = api.body("Who is it?", temperature=0) | {"pack": "harbour"}
        response = server.post(api.path, body)
        assert response.status_code == 200, response.text
        reply = api.whole(response.json())
        assert reply.prompt_tokens > tokens > 0 < alone.prompt_tokens < reply.prompt_tokens
        assert reply.cached_tokens is None or reply.cached_tokens >= 64
    wrong = server.post(api.path, body | {"pack": "other"})
    assert wrong.status_code == 400
    assert "there are harbour" in wrong.text
    assert server.post(api.path, body | {"pack": 7}).status_code == 400


def test_packs_are_listed(server: Serving) -> None:
    (one,) = server.http.get("/v1/packs").json()["data"]
    assert one["id"] == "harbour"
    assert one["tokens"] == len(server.engine.packs["harbour"].token_ids)
    assert [text["name"] for text in one["texts"]] == ["harbour.txt"]


def test_a_server_has_read_its_packs_before_the_first_request(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is damaged is named, and keeps no other from being read."""
    monkeypatch.setattr(journal, "set_up", lambda name: None)  # of the whole process, and other tests' servers
    file = packed(tmp_path, tiny_path)
    damaged = tmp_path / "damaged.pack"
    damaged.write_bytes(file.read_bytes()[:-100] + bytes(100))
    packs = {"harbour": str(file), "damaged": str(damaged)}
    config = EngineConfig(weights=str(tiny_path), device="cpu", packs=packs)
    with load_driver(config, ServerConfig()) as driver:
        ids = driver.engine.packs["harbour"].token_ids
        assert driver.engine._prefixes.match_prefix(ids, "").length == len(ids)
    assert "warning" in (said := capsys.readouterr().err)
    assert "damaged.pack" in said
