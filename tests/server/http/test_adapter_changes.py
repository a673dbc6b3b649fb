"""Adapters (LoRA) that come and go while a server runs, by vLLM's endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.requests.request import Ticket
from tests.adapters import changed_model, random_changes, write_peft
from tests.lazily import openai
from tests.server.http_server import Serving, serving
from tests.tiny import make_model

PROMPT = "the rain"
SETTINGS: dict[str, Any] = {"device": "cpu", "cache_type": "f16", "block_size": 16}
RANKS = {"sql": 4, "tone": 8}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and with a folder of adapters beside one that is not in it."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "base").mkdir()
    base = make_model(folder / "base")
    (folder / "adapters").mkdir()
    for name, rank in RANKS.items():
        write_peft(folder / "adapters" / name, random_changes(base, rank, rank), 2 * rank)
    write_peft(folder / "secret", random_changes(base, 4, 1), 8)
    (folder / "adapters" / "link").symlink_to(folder / "secret")
    return folder


@pytest.fixture(scope="module")
def texts(place: Path) -> dict[str, str]:
    """What the model answers with an adapter's changes in its weights, and with none for ""."""
    found = {}
    for name in ("", *RANKS):
        changes = random_changes(place / "base", RANKS[name], RANKS[name]) if name else {}
        with Engine.load(changed_model(place / f"changed{name}", place / "base", changes, 2), **SETTINGS) as engine:
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            found[name] = engine.generate(PROMPT, params).text
    assert len({*found.values()}) == len(found)
    return found


@pytest.fixture
def server(place: Path) -> Iterator[Serving]:
    with (
        Engine.load(place / "base", **SETTINGS) as engine,
        serving(engine, adapters_folder=str(place / "adapters"), cors_origin=("*",)) as running,
    ):
        yield running


def loaded(server: Serving, *names: str) -> Serving:
    for name in names:
        response = server.post(LOAD, {"lora_name": name, "lora_path": name})
        assert (response.status_code, response.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    return server


def answered(server: Serving, model: str = "any", **more: Any) -> str:
    body = {"ignore_eos": True, **more}
    return (
        server.openai.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=12, extra_body=body)
        .choices[0]
        .text
    )


def names(server: Serving) -> list[str]:
    return [model.id for model in server.openai.models.list()]


def test_an_adapter_answers_from_when_it_is_loaded_until_it_is_unloaded(
    server: Serving, texts: dict[str, str], place: Path
) -> None:
    base = names(server)
    loaded(server, "sql")
    path = str(place / "adapters" / "tone")  # a whole path names what is in the folder, too
    response = server.post(LOAD, {"lora_name": "other", "lora_path": path, "load_inplace": True})
    assert response.status_code == 200
    assert response.headers["X-PolarLM-Warning"] == "load_inplace is unknown and ignored"
    assert names(server) == [*base, "sql", "other"]
    assert [answered(server, model) for model in ("sql", "x:other", "any")] == [texts["sql"], texts["tone"], texts[""]]
    response = server.post(UNLOAD, {"lora_name": "sql"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert names(server) == [*base, "other"]
    for model in ("sql", "x:sql"):  # the model without it would answer something else
        with pytest.raises(openai.NotFoundError, match="The adapter sql was unloaded"):
            answered(server, model)
    assert [answered(server, model) for model in ("other", "any")] == [texts["tone"], texts[""]]
    server.post(LOAD, {"lora_name": "sql", "lora_path": "tone"})
    assert answered(server, "sql") == texts["tone"]


def test_a_request_whose_adapter_is_unloaded_while_it_is_read_is_not_found(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*args: Any, **more: Any) -> Ticket:
        server.engine.unload_adapter("sql")
        return Engine.submit(server.engine, *args, **more)

    loaded(server, "sql")
    monkeypatch.setattr(server.engine, "submit", submit)
    body = {"model": "sql", "prompt": PROMPT}
    assert server.refused("/v1/completions", body, 404)["code"] == "model_not_found"


def test_what_is_wrong_is_said(server: Serving, place: Path) -> None:
    loaded(server, "sql")
    for path, body, status, sentence in (
        (LOAD, {"lora_name": "sql", "lora_path": "tone"}, 400, "The adapter sql is loaded already"),
        (LOAD, {"lora_path": "tone"}, 400, "lora_name must be"),
        (LOAD, {"lora_name": "tone"}, 400, "lora_path must be"),
        (LOAD, {"lora_name": "a b", "lora_path": "tone"}, 400, "give the adapter a name of letters"),
        (LOAD, {"lora_name": "a" * 101, "lora_path": "tone"}, 400, "100 at most"),
        (LOAD, {"lora_name": "base", "lora_path": "tone"}, 400, "lora_name is base, which names the model itself"),
        (LOAD, {"lora_name": "latest", "lora_path": "tone"}, 400, "lora_name is latest, which names the model itself"),
        (LOAD, {"lora_name": "tone", "lora_path": "missing"}, 404, "The folder of adapters has no missing"),
        (LOAD, {"lora_name": "tone", "lora_path": "sql/adapter_config.json"}, 400, "sql/adapter_config.json"),
        (UNLOAD, {"lora_name": "tone"}, 404, "There is no adapter called tone"),
        (UNLOAD, {}, 400, "lora_name must be"),
    ):
        message = server.refused(path, body, status)["message"]
        assert sentence in message
        assert str(place) not in message
    assert names(server)[1:] == ["sql"]


@pytest.mark.parametrize("path", ["../secret", "link", "sql/../../secret", ".", "..", "/", "a\0b", "{place}/secret"])
def test_nothing_outside_of_the_folder_is_loaded(server: Serving, place: Path, path: str) -> None:
    body = {"lora_name": "secret", "lora_path": path.replace("{place}", str(place))}
    assert "must name what is in the folder" in server.refused(LOAD, body)["message"]
    assert len(names(server)) == 1


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "https://evil.example"}, {"Origin": "{url}"}, {"Sec-Fetch-Site": "same-origin"}, {"Referer": "{url}/"}],
    ids=str,
)
def test_no_page_changes_adapters(server: Serving, headers: dict[str, str]) -> None:
    """Not one of this server's, nor one that --cors-origin lets in."""
    loaded(server, "sql")
    sent = {name: value.replace("{url}", server.url) for name, value in headers.items()}
    for path, body in ((LOAD, {"lora_name": "tone", "lora_path": "tone"}), (UNLOAD, {"lora_name": "sql"})):
        assert server.http.post(path, json=body, headers=sent).status_code == 403
    assert names(server)[1:] == ["sql"]


def test_a_server_without_the_folder_changes_no_adapters(place: Path) -> None:
    lora = {"sql": str(place / "adapters" / "sql")}
    with Engine.load(place / "base", lora=lora, **SETTINGS) as engine, serving(engine) as server:
        for path, body in (
            (LOAD, {"lora_name": "tone", "lora_path": str(place / "adapters" / "tone")}),
            (UNLOAD, {"lora_name": "sql"}),
        ):
            assert "--adapters-folder" in server.refused(path, body, 403)["message"]
        assert names(server)[1:] == ["sql"]


def test_a_number_is_of_one_adapter_until_it_is_unloaded(server: Serving, texts: dict[str, str]) -> None:
    loaded(server, "sql", "tone")
    server.post(UNLOAD, {"lora_name": "sql"})
    assert server.http.get("/lora-adapters").json() == [{"id": 1, "path": "tone", "scale": 0}]
    assert answered(server, lora=[{"id": 1, "scale": 1}]) == texts["tone"]
    refused = server.refused("/v1/completions", {"prompt": PROMPT, "lora": [{"id": 0, "scale": 1}]})
    assert refused["param"] == "lora[0].id"
