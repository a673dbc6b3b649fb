"""What is refused before a request is looked at: strangers' names, wrong keys, other types, too large bodies."""

from __future__ import annotations

import asyncio
import gzip
import socket
from typing import Any

import httpx
import pytest

from polarlm.engine import Engine
from polarlm.server.config import ServerConfig
from polarlm.server.http.guard import Guard
from polarlm.server.http.warnings import HEADER
from tests.pairs import each, in_turn
from tests.server.http_server import KEY, Serving, serving
from tests.server.lines import until_closed

BODY = {"prompt": "the rain", "max_tokens": 2}


def assert_error(response: httpx.Response, status: int, code: str) -> None:
    """OpenAI's shape, and a sentence."""
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert len(error["message"].split()) > 3


# -- Host ------------------------------------------------------------------------------------------------------


def passes(host: str, reached: str, headers: list[tuple[bytes, bytes]], **settings: Any) -> bool:
    """Whether a server with --host `host` takes a request that arrived at its address `reached`."""
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(200)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": headers, "server": (reached, 8080)}
    asyncio.run(Guard(app, ServerConfig(host=host, **settings))(scope, None, send))  # type: ignore[arg-type]
    assert seen in ([200], [421])
    return seen == [200]


STRANGERS = "evil.example 127.0.0.1.evil.example:8080 localhost.evil.example [::1]evil.example 192.168.1.5 0.0.0.0:8080"
ODD = ":8080 localhost:80:80 localhost@evil.example"


@in_turn(
    "host reached ours others",
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:8080 localhost:8080 LocalHost localhost.:8080 127.9.9.9", STRANGERS),
        ("127.0.0.1", "127.0.0.1", "localhost", ODD),
        ("::1", "::1", "[::1]:8080", "evil.example"),
        ("shelf.lan", "192.168.1.5", "shelf.lan:8080 192.168.1.5:8080", "evil.example"),
        ("192.168.1.5", "192.168.1.5", "192.168.1.5:8080", "192.168.1.6"),
        ("0.0.0.0", "192.168.1.5", "192.168.1.5:8080", "evil.example:8080"),
        ("0.0.0.0", "172.17.0.2", "192.168.1.5:8080", "evil.example"),
        ("::", "::1", "[fe80::1]:8080", "evil.example"),
    ],
)
def test_the_servers_own_names_pass_and_others_do_not(host: str, reached: str, ours: str, others: str) -> None:
    assert all(passes(host, reached, [(b"host", name.encode())]) for name in ours.split())
    assert not any(passes(host, reached, [(b"host", name.encode())]) for name in ["", *others.split()])


def test_a_request_needs_exactly_one_host_header() -> None:
    assert not passes("127.0.0.1", "127.0.0.1", [])
    assert not passes("127.0.0.1", "127.0.0.1", [(b"host", b"localhost"), (b"host", b"localhost")])


@pytest.mark.parametrize("name", ["host.docker.internal:8080", "Shelf.lan", "shelf.lan.:80", "[fd00::1]:8080"])
def test_names_that_the_server_is_given_pass(name: str) -> None:
    headers = [(b"host", name.encode())]
    names = ("host.docker.internal", "shelf.lan", "fd00::1")
    assert passes("0.0.0.0", "172.17.0.2", headers, allowed_host=names)
    assert not passes("127.0.0.1", "127.0.0.1", headers, allowed_host=("other.lan",))


def test_with_a_key_any_name_passes(tiny: Engine) -> None:
    with serving(tiny, api_key=KEY) as server:
        assert server.http.get("/v1/models", headers={"Host": "mybox.local:8080"}).status_code == 200
        bare = httpx.get(f"{server.http.base_url}/v1/models", headers={"Host": "mybox.local:8080"})
        assert_error(bare, 401, "invalid_api_key")


# -- other origins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "content_type"),
    each(
        ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"],
        [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonp"],
    ),
)
def test_only_json_is_taken(server: Serving, path: str, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = server.http.post(path, content=b'{"prompt": "the"}', headers=headers)
    assert_error(response, 415, "unsupported_media_type")


@pytest.mark.parametrize("path", ["/v1/completions", "/api/chat", "/v1/messages"])
def test_a_compressed_body_is_refused_with_the_reason(server: Serving, path: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = server.http.post(path, content=gzip.compress(b'{"prompt": "the"}'), headers=headers)
    assert response.status_code == 415
    assert "without Content-Encoding" in response.text
    plain = {**headers, "Content-Encoding": "identity"}
    assert server.http.post("/tokenize", content=b'{"content": "the"}', headers=plain).status_code == 200


def test_a_body_may_name_its_charset_and_begin_with_the_mark_of_some_shells(server: Serving) -> None:
    body, headers = b'\xef\xbb\xbf{"content": "the"}', {"Content-Type": "Application/JSON; charset=utf-8"}
    response = server.http.post("/tokenize", content=body, headers=headers)
    assert response.json() == server.post("/tokenize", {"content": "the"}).json()


def test_ollamas_clients_may_leave_the_type_out_and_pages_may_not(server: Serving) -> None:
    body = b'{"model": "any"}'
    assert server.http.post("/api/show", content=body).status_code == 200
    for more in ({"Origin": "https://example.com"}, {"Sec-Fetch-Site": "cross-site"}, {"Content-Type": "text/plain"}):
        response = server.http.post("/api/show", content=body, headers=more)
        assert response.status_code == 415
        assert set(response.json()) == {"error"}


PAGE = "https://chat.example.com"


def preflight(server: Serving, origin: str) -> httpx.Response:
    asks = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    return httpx.options(f"{server.http.base_url}/v1/chat/completions", headers=asks)


@pytest.mark.parametrize(("origins", "told"), [((PAGE, "http://localhost:3000"), PAGE), (("*",), "*")])
def test_a_page_gets_the_permission_that_the_server_was_started_with(
    tiny: Engine, origins: tuple[str, ...], told: str
) -> None:
    """Also to read errors; a browser asks for it without the key."""
    with serving(tiny, api_key=KEY, cors_origin=origins) as server:
        permission = preflight(server, PAGE)
        assert permission.status_code == 200
        assert permission.headers["access-control-allow-origin"] == told
        assert "POST" in permission.headers["access-control-allow-methods"]
        allowed = permission.headers["access-control-allow-headers"].lower()
        assert all(name in allowed for name in ("authorization", "content-type", "x-stainless-os"))
        answer = server.http.post("/v1/completions", json=BODY, headers={"Origin": PAGE})
        refusal = httpx.post(f"{server.http.base_url}/v1/completions", json=BODY, headers={"Origin": PAGE})
        assert (answer.status_code, refusal.status_code) == (200, 401)
        for response in (answer, refusal):
            assert response.headers["access-control-allow-origin"] == told
            assert HEADER in response.headers["access-control-expose-headers"]


def test_a_page_on_the_internet_may_use_a_server_on_this_machine(tiny: Engine) -> None:
    """Chrome asks for that in a header of its own."""
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
    with serving(tiny, cors_origin=(PAGE,)) as server:
        permission = httpx.options(f"{server.http.base_url}/v1/chat/completions", headers=asks)
    assert permission.status_code == 200
    assert permission.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("origins", [(), (PAGE,)])
def test_pages_of_other_origins_get_no_permission(tiny: Engine, origins: tuple[str, ...]) -> None:
    with serving(tiny, cors_origin=origins) as server:
        asked = preflight(server, "https://evil.example")
        assert asked.status_code == (400 if origins else 405)
        for response in (asked, server.http.get("/v1/models", headers={"Origin": "https://evil.example"})):
            assert "access-control-allow-origin" not in response.headers


# -- API key ---------------------------------------------------------------------------------------------------


@in_turn(
    "headers_sent",
    [
        [],
        [(b"Authorization", b"Bearer sk-another")],
        [(b"Authorization", f"Basic {KEY}".encode())],
        [(b"Authorization", KEY.encode())],
        [(b"Authorization", b"Bearer \xff\xfe")],
        [(b"Authorization", b"Bearer")],
        [(b"Authorization", f"Bearer {KEY}".encode()), (b"Authorization", f"Bearer {KEY}".encode())],
        [(b"X-Api-Key", b"")],
        [(b"X-Api-Key", f"Bearer {KEY}".encode())],
        [(b"X-Api-Key", KEY.encode()), (b"X-Api-Key", KEY.encode())],
    ],
)
def test_without_the_key_there_are_health_and_page_alone(tiny: Engine, headers_sent: list[tuple[bytes, bytes]]) -> None:
    with serving(tiny, api_key=KEY) as server:
        bare = httpx.Client(base_url=server.http.base_url)
        for path in ("/v1/models", "/models", "/version", "/metrics", "/stats", "/nowhere"):
            response = bare.get(path, headers=headers_sent)
            assert_error(response, 401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        assert_error(bare.post("/v1/completions", json=BODY, headers=headers_sent), 401, "invalid_api_key")
        for path in ("/health", "/v1/health", "/ping", "/"):  # the page asks for the key
            assert bare.get(path, headers=headers_sent).status_code == 200
        assert server.http.get("/version").json()["version"]
        assert server.outcomes() == {}


def test_a_key_may_come_as_anthropics_clients_send_it_and_a_wrong_one_is_told_apart_from_none(tiny: Engine) -> None:
    with serving(tiny, api_key=KEY) as server, httpx.Client(base_url=server.http.base_url) as bare:
        for sent, sentence in (
            ({}, "This server needs its API key"),
            ({"Authorization": "Bearer"}, "This server needs its API key"),
            ({"Authorization": "Bearer sk-another"}, "The key is not known"),
            ({"X-Api-Key": "sk-another"}, "The key is not known"),
        ):
            assert bare.get("/v1/models", headers=sent).json()["error"]["message"].startswith(sentence)
        for more in ({}, {"Authorization": "Bearer sk-of-another-server"}):
            assert bare.get("/v1/models", headers={"X-Api-Key": KEY, **more}).status_code == 200


# -- size and form ---------------------------------------------------------------------------------------------


def test_a_body_may_be_as_large_as_the_limit_and_no_larger(tiny: Engine) -> None:
    with serving(tiny, max_body=1000) as server:
        headers = {"Content-Type": "application/json"}
        empty = b'{"content": "the"}'
        for size, status in ((1000, 200), (1001, 413)):
            whole = empty.ljust(size)
            pieces = [whole[:500], whole[500:]]
            assert server.http.post("/tokenize", content=whole, headers=headers).status_code == status
            assert server.http.post("/tokenize", content=iter(pieces), headers=headers).status_code == status


def test_other_paths_and_methods_are_errors_of_the_same_shape(server: Serving) -> None:
    for path in ("/nowhere", "/v1", "/v1nowhere"):
        assert_error(server.http.get(path), 404, "not_found")
    assert_error(server.post("/v1/images/generations", {"prompt": "the"}), 404, "not_found")
    response = server.http.get("/v1/chat/completions")
    assert_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert "POST /v1/images/gen" in server.refused("/v1/images/gen", {"prompt": "the"}, 404)["message"]


def test_slashes_in_a_row_are_one(server: Serving) -> None:
    """A base URL that ends with a slash gives two."""
    for path in ("//v1/completions", "/v1//completions", "///completion"):
        assert server.post(server.url + path, BODY).status_code == 200
    assert server.http.get(f"{server.url}//health").status_code == 200
    assert server.refused(f"{server.url}//api/chat", {"messages": 5}).startswith("messages")  # Ollama's shape


def test_a_body_of_two_lengths_is_refused_and_the_connection_closed(server: Serving) -> None:
    """The bytes behind the one end would be a request of its own to whoever believes the other."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden)
        received = until_closed(connection)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1
    assert b"Content-Length or Transfer-Encoding" in received
