"""A salt keeps clients apart at every endpoint that computes, and a server that hides its cache tells nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.server.http.app import create_app
from tests.server.apis import submitted
from tests.server.http_server import Serving, serving

TEXT = "then he ran on and the rain ran on and then the end"
MESSAGES = [{"role": "user", "content": TEXT}]
CHAT, RAW = {"messages": MESSAGES, "max_tokens": 2}, {"prompt": TEXT, "max_tokens": 2}
ITEMS, INPUT, RANKED = {"input": TEXT, "max_output_tokens": 2}, {"input": TEXT}, {"query": "a", "documents": [TEXT]}
OPTIONS, PAIR = {"num_predict": 2}, {"text_1": TEXT, "text_2": TEXT}
GENERATING: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("/v1/chat/completions", "/chat/completions", "/v1/messages"), CHAT),
    **dict.fromkeys(("/v1/completions", "/completions", "/completion"), RAW),
    **dict.fromkeys(("/v1/responses", "/responses"), ITEMS),
    "/infill": {"input_prefix": TEXT, "input_suffix": "on", "n_predict": 2},
    "/api/chat": {"messages": MESSAGES, "options": OPTIONS},
    "/api/generate": {"prompt": TEXT, "options": OPTIONS},
}
VECTORS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("/v1/embeddings", "/embeddings", "/embedding", "/pooling", "/api/embed"), INPUT),
    **dict.fromkeys(("/score", "/v1/score"), PAIR),
    "/api/embeddings": {"prompt": TEXT},
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"), RANKED),
}
NO_ANSWER = {  # they count, convert, save and describe, or belong to the page
    *("/tokenize", "/detokenize", "/apply-template", "/sessions/save", "/sessions/load", "/documents/text"),
    *("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/responses/input_tokens"),
    *("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens", "/api/show", "/api/pull", "/props"),
    *("/v1/responses/compact", "/responses/compact"),  # an answer like others, to a prompt too long for this model
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/slots/{slot}", "/lora-adapters", "/conversations/{id}", "/mcp/connect", "/mcp/call"),
}


def test_every_endpoint_is_here(filling: Serving) -> None:
    routes = create_app(filling.driver, filling.driver.config).routes
    posted = {route.path for route in routes if "POST" in (getattr(route, "methods", None) or ())}
    assert posted == {*GENERATING, *VECTORS, *NO_ANSWER}


def test_a_salt_separates(filling: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, requests = filling.engine, submitted(filling.engine, monkeypatch)
    one = (TEXT, SamplingParams(max_tokens=0), PromptOptions(pooling="mean"))  # this model cannot rank
    monkeypatch.setattr(engine, "rank_jobs", lambda *_, **__: [one])
    monkeypatch.setattr(engine, "ranking_note", lambda: None)

    def cached(**more: Any) -> int:
        before = filling.driver.snapshot().cached_tokens
        response = filling.post(path, {**GENERATING, **VECTORS}[path] | more)
        assert response.status_code == 200, response.text
        assert "X-PolarLM-Warning" not in response.headers
        return filling.driver.snapshot().cached_tokens - before

    for path in [*GENERATING, *VECTORS]:
        salt = f"of {path}"
        cached()
        assert cached(cache_salt=salt) == 0, path
        assert [request["options"].cache_salt for request in requests[-2:]] == ["", salt], path
        if path in GENERATING:
            assert min(cached(), cached(cache_salt=salt)) > 0, path
            assert cached(cache_salt=salt, cache_prompt=False) == 0, path


def test_sessions_of_a_server_that_hides_its_cache_tell_nothing(tiny: Engine, tmp_path: Path) -> None:
    with serving(tiny, sessions=str(tmp_path / "sessions"), hide_cached_tokens=True) as server:
        set_salt = {"prompt": TEXT, "cache_salt": "mine"}
        for sent in (RAW, {**RAW, **set_salt}):
            assert server.post("/v1/completions", sent).status_code == 200
        known, new = (server.post("/sessions/save", {"name": "talk", "prompt": text}) for text in (TEXT, "the end"))
        assert (known.status_code, known.text) == (new.status_code, new.text)
        assert known.json()["error"]["param"] == "cache_salt"
        assert server.post("/sessions/save", {"name": "talk", **set_salt}).json() == {"name": "talk"}
        assert server.post("/sessions/load", {"name": "talk", "cache_salt": "mine"}).json() == {"name": "talk"}
