"""The chat page as a file and as a response, and the numbers that it shows."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polarlm import server as server_package
from polarlm.engine import Engine
from polarlm.engine.state.cache_types import PRESETS
from polarlm.server.http.page import _build
from polarlm.server.running import journal
from tests.server.http_server import Serving, serving
from tests.server.lines import eventually
from tests.tiny import PLAIN, forget, load_tiny

PAGE = _build()
FOLDER = Path(str(server_package.__file__)).parent / "page"
OWN = "".join(path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.*")))  # without what is vendored
SCRIPTS = sorted(FOLDER.rglob("*.js"))
BLOCK = 8  # tokens: kernels read no such blocks, and NumPy's have the bytes of the formula


@pytest.fixture
def server(tiny_path: Path) -> Iterator[Serving]:
    with load_tiny(tiny_path, **{**PLAIN, "block_size": BLOCK}) as engine, serving(engine) as running:
        yield running


def policy(response: httpx.Response) -> dict[str, str]:
    directives = [directive.partition(" ") for directive in response.headers["content-security-policy"].split("; ")]
    return {name: value for name, _, value in directives}


# -- the file --------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = OWN.replace("http://www.w3.org/2000/svg", "")  # the name of a format, which nobody fetches
    assert re.findall(r"(?i)(?:https?:|wss?:|[\"'(=])//\S*", text) == []
    assert re.findall(r"(?i)<link (?!rel=\"icon\" href=\"data:)|<script src=", PAGE) == []
    assert re.findall(r"(?i)@import|\bimport\s*[({*]", OWN) == []
    assert re.findall(r"url\((?!data:font/woff2;).*", PAGE.partition("<script>")[0]) == []


def test_no_text_ever_becomes_html() -> None:
    ways = "innerHTML|outerHTML|insertAdjacentHTML|document.write|DOMParser|srcdoc|eval[(]|Function[(]"
    assert re.findall(ways, OWN) == []


def test_every_script_and_style_is_where_the_policy_sees_it() -> None:
    assert (len(re.findall("<script>", PAGE)), len(re.findall("<style>", PAGE))) == (1, 1)
    assert len(re.findall("<script[ >]|<style", PAGE.partition("<script>")[0])) == 1
    assert re.findall(r"<[^>]*\s(?:on[a-z]+|style)=", OWN) == []
    assert all(script.read_text(encoding="utf-8") in PAGE for script in SCRIPTS)


# -- the response ----------------------------------------------------------------------------------------------


def test_the_page_comes_with_a_strict_policy(server: Serving) -> None:
    response = server.http.get("/")
    assert (response.status_code, response.text) == (200, PAGE)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    directives = policy(response)
    for name in ("script-src", "style-src"):
        assert re.fullmatch("'sha256-[A-Za-z0-9+/]{43}='", directives.pop(name))
    assert directives == {
        "default-src": "'none'",
        "font-src": "data:",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }


def test_a_browser_gets_the_page_compressed_and_only_once(server: Serving) -> None:
    plain = server.http.get("/", headers={"Accept-Encoding": "identity"})
    packed = server.http.get("/", headers={"Accept-Encoding": "br, gzip"})
    assert (packed.text, packed.headers["content-encoding"], packed.headers["vary"]) == (
        PAGE,
        "gzip",
        "Accept-Encoding",
    )
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 2
    known = server.http.get("/", headers={"If-None-Match": plain.headers["etag"]})
    assert (known.status_code, known.content, known.headers["etag"]) == (304, b"", packed.headers["etag"])
    assert server.http.get("/", headers={"If-None-Match": '"older"'}).text == PAGE


def test_head_says_what_get_would(server: Serving) -> None:
    got, head = server.http.get("/"), server.http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert {**head.headers, "date": ""} == {**got.headers, "date": ""}


# -- the numbers -----------------------------------------------------------------------------------------------


def test_the_numbers_of_an_idle_server(server: Serving) -> None:
    stats, status = server.http.get("/stats").json(), server.engine.status()
    cache, context = server.engine.cache_stats(), server.engine.context
    whole = {"tokens": context, "bytes": cache.context_bytes, "f16_bytes": cache.context_f16_bytes}
    assert 0 < whole["bytes"] < whole["f16_bytes"]
    whole["bits_per_value"] = cache.bits_per_value
    values = 2 * 2 * 2 * 8  # a token's keys and values, layers, heads, channels
    assert stats["f16_bytes_per_token"] == 2 * values
    assert stats["bytes_per_token"] == stats["bits_per_value"] * values / 8
    assert stats == {
        "model": server.engine.model.name,
        "context": server.engine.context,
        "cache_types": "polarquant",
        "cache_type_k": "polarquant",
        "cache_type_v": "polarquant",
        "block_size": BLOCK,
        "window": None,
        "whole_context": whole,
        "recent_blocks": 0,
        "bits_per_value": cache.bits_per_value,
        "bytes_per_token": stats["bytes_per_token"],
        "f16_bytes_per_token": stats["f16_bytes_per_token"],
        "blocks": status.blocks,
        "blocks_used": 0,
        "blocks_kept": 0,
        "blocks_free": status.blocks,
        "running": 0,
        "waiting": 0,
        "drafted_tokens": 0,
        "reread_tokens": 0,
        "rereads": [],
        "accepted_tokens": 0,
        "experts": None,
        "snapshots": None,
        "threads": {
            "number": status.threads.number,
            "why": status.threads.why,
            "kernels": list(status.threads.kernels),
        },
    }


def test_a_preset_is_named_by_its_types(tiny_path: Path) -> None:
    with Engine.load(tiny_path, device="cpu", calibration=False) as engine, serving(engine) as server:
        stats = server.http.get("/stats").json()
        assert (stats["cache_type_k"], stats["cache_type_v"]) == PRESETS["balanced"][:2]


def test_the_memory_of_a_sequence_is_what_the_engine_holds_for_it(server: Serving) -> None:
    body = {"prompt": "the rain then ran on and on", "temperature": 0, "ignore_eos": True, "max_tokens": 3 * BLOCK}
    server.post("/v1/completions", body)
    held = server.engine.cache_stats()
    sequence = server.http.get(f"/stats?tokens={held.tokens}").json()["sequence"]
    assert sequence == {"tokens": held.tokens, "bytes": held.bytes, "f16_bytes": held.f16_bytes}
    nothing = server.http.get("/stats?tokens=0").json()["sequence"]
    assert nothing == {"tokens": 0, "bytes": 0, "f16_bytes": 0}


@pytest.mark.parametrize("tokens", ["", "-1", "1.5", "many", "9" * 13, "٣"])
def test_an_invalid_number_of_tokens_is_a_bad_request(server: Serving, tokens: str) -> None:
    response = server.http.get("/stats", params={"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"


def test_every_block_is_used_or_kept_or_free(server: Serving) -> None:
    def blocks() -> tuple[int, int]:
        stats = server.http.get("/stats").json()
        assert stats["blocks_used"] + stats["blocks_kept"] + stats["blocks_free"] == stats["blocks"]
        return stats["blocks_used"], stats["blocks_kept"]

    body = {"prompt": "the rain then ran on and on", "ignore_eos": True, "max_tokens": 3 * BLOCK, "stream": True}
    server.post("/v1/completions", body)
    eventually(lambda: not server.busy and blocks()[0] == 0)
    _, kept = blocks()
    assert kept >= 2
    server.gate.close()
    with server.send("/v1/completions", body):
        eventually(lambda: server.engine.status().waiting == 1)
        server.gate.let(30)
        eventually(lambda: blocks()[0] > 0)
        assert blocks()[1] < kept
        server.gate.open()
        eventually(lambda: not server.busy)
    forget(server.engine)
    assert blocks() == (0, 0)


# -- the log ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status", "lines"),
    [
        ("/stats", 200, 0),
        ("/stats", 401, 1),
        ("/", 200, 1),
        ("/health", 200, 0),
        ("/ping", 200, 0),
        ("/health", 503, 1),
    ],
)
def test_what_is_asked_all_the_time_has_no_line_in_the_log(
    caplog: pytest.LogCaptureFixture, path: str, status: int, lines: int
) -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status})

    async def send(_message: Any) -> None:
        pass

    scope = {"type": "http", "method": "GET", "path": path}
    with caplog.at_level(logging.INFO, logger="server.requests"):
        asyncio.run(journal.JournalMiddleware(app)(scope, None, send))
    written = [record.line for record in caplog.records]  # type: ignore[attr-defined]
    assert [(line["route"], line["status"]) for line in written] == [(f"GET {path}", status)] * lines
