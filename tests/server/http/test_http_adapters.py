"""Adapters (LoRA) over HTTP: named as the model, or by number in llama-server's field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from polarlm.engine import Engine, PromptOptions, SamplingParams
from tests.adapters import random_changes, write_peft
from tests.server.apis import API, APIS
from tests.server.http_server import Serving, serving
from tests.tiny import make_model

PROMPT = "the rain"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("model")
    base = make_model(folder)
    lora = {
        name: f"{write_peft(folder / name, random_changes(base, rank, rank), 2 * rank)}{scale}"
        for name, rank, scale in (("first", 4, ""), ("second", 8, ":0.5"))
    }
    settings: dict[str, Any] = {"device": "cpu", "cache_type": "f16", "block_size": 16, "lora": lora}
    with Engine.load(base, **settings) as engine, serving(engine) as running:
        yield running


def expected(server: Serving, lora: str, scale: float = 1.0) -> str:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return server.engine.generate(PROMPT, params, PromptOptions(lora=lora, lora_scale=scale, parse_special=True)).text


def answered(server: Serving, path: str = "/v1/completions", **more: Any) -> str:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **more}
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return str(answer["content"] if "content" in answer else answer["choices"][0]["text"])


def test_adapters_are_listed_as_models(server: Serving) -> None:
    base = server.engine.model.name
    listed = server.http.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == [base, "first", "second"]
    assert [one.get("parent") for one in listed] == [None, base, base]
    assert server.http.get("/v1/models/second").json()["id"] == "second"
    assert server.http.get("/v1/models/third").status_code == 404
    result = server.http.get("/lora-adapters").json()
    assert [(one["id"], one["path"], one["scale"]) for one in result] == [(0, "first", 0), (1, "second", 0)]
    assert "each request names its adapter" in server.refused("/lora-adapters", [], 501)["message"]


def test_the_models_name_chooses_an_adapter(server: Serving) -> None:
    texts = {name: expected(server, name) for name in ("", "first", "second")}
    assert len(set(texts.values())) == 3
    for model, name in (("any", ""), ("first", "first"), ("base:second", "second"), ("base:latest", "")):
        assert answered(server, model=model) == texts[name]
    assert server.post(
        "/v1/chat/completions", {"model": "first", "messages": [{"role": "user", "content": "a"}]}
    ).is_success


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_an_answer_names_the_adapter_by_a_name_that_chooses_it(server: Serving, api: API) -> None:
    base = server.engine.model.name
    lora = {"lora": [{"id": 1, "scale": 1}]}
    for asked, name in (
        ({"model": "first"}, "first"),
        ({"model": "any:first"}, f"{base}:first"),
        (lora, f"{base}:second"),
        ({"model": "any"}, base),
    ):
        for stream in (False, True):
            text = server.post(api.path, api.body("the rain", stream=stream, max_tokens=2) | asked).text
            assert set(re.findall(r'"model": ?"([^"]*)"', text)) == {name}


def test_llama_servers_field_chooses_an_adapter(server: Serving) -> None:
    """Its scale replaces the one that the adapter was loaded with."""
    for listed, name, scale in (
        ([{"id": 0, "scale": 1}, {"id": 1, "scale": 0}], "first", 1.0),
        ([{"id": 1, "scale": 1}], "second", 2.0),
        ([{"id": 0, "scale": 0.0}], "", 1.0),
        ([], "", 1.0),
    ):
        assert answered(server, "/completion", lora=listed) == expected(server, name, scale)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"lora": [{"id": 0, "scale": 1}, {"id": 1, "scale": 1}]}, "lora"),
        ({"lora": [{"id": 1, "scale": 1}], "model": "first"}, "lora"),
        ({"lora": [{"id": 2, "scale": 1}]}, "lora[0].id"),
        ({"lora": [{"id": 0, "scale": "much"}]}, "lora[0].scale"),
        ({"lora": "first"}, "lora"),
    ],
    ids=str,
)
def test_what_cannot_be_chosen_is_named(server: Serving, more: dict[str, Any], param: str) -> None:
    assert param in server.refused("/completion", {"prompt": PROMPT, **more})["message"]
