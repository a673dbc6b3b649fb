"""Who may use /mcp, and which files name servers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine, EngineError
from polarlm.server import __main__
from polarlm.server.__main__ import main
from polarlm.server.mcp.session import McpServer, read_mcp_file
from tests.server.http_server import KEY, serving
from tests.server.mcp.faults import mcp_file

WRONG = {
    "{": "is not JSON",
    "[]": "names no servers",
    '{"mcpServers": []}': "names no servers",
    '{"mcpServers": {"a": 1}}': "has to be an object",
    '{"mcpServers": {"": {"command": "x"}}}': "needs a name",
    '{"mcpServers": {"a": {}}}': "either a command or a url",
    '{"mcpServers": {"a": {"command": "x", "url": "http://x"}}}': "either a command or a url",
    '{"mcpServers": {"a": {"type": "sse", "url": "http://x"}}}': "of type 'sse'",
    '{"mcpServers": {"a": {"url": "file:///x"}}}': "begins with http",
    '{"mcpServers": {"a": {"url": 5}}}': "begins with http",
    '{"mcpServers": {"a": {"command": ["x"]}}}': "a command that is text",
    '{"mcpServers": {"a": {"command": "x", "args": "y"}}}': "an array of strings",
    '{"mcpServers": {"a": {"command": "x", "env": {"A": 1}}}}': "an object of strings",
}
CALL = {"server": "absent", "tool": "any", "arguments": {}}  # which no answer but an error comes to
FOREIGN: list[Mapping[str, str]] = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},  # another port of this machine
]


def test_pages_of_other_origins_get_nothing_even_with_cors(engine: Engine, tmp_path: Path) -> None:
    path = str(mcp_file(tmp_path))
    with serving(engine, mcp_config=path, cors_origin=("https://evil.example",), api_key=KEY) as server:
        parts = {"Origin": server.url}
        assert server.http.get("/mcp/servers", headers=parts).json()["servers"]
        assert server.http.post("/mcp/call", json=CALL, headers=parts).status_code == 502
        for headers in FOREIGN:
            assert server.http.get("/mcp/servers", headers=headers).json() == {"servers": []}
            for route in ("connect", "call"):
                refused = server.http.post(f"/mcp/{route}", json=CALL, headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")
        plain = server.http.post("/mcp/call", content=json.dumps(CALL), headers={"Content-Type": "text/plain"})
        assert plain.status_code == 415  # which a form of another origin can send
        assert server.http.post("/mcp/call", json=CALL, headers={"Authorization": "Bearer other"}).status_code == 401


def test_without_a_key_only_this_machine_may(engine: Engine, tmp_path: Path) -> None:
    with serving(engine, mcp_config=str(mcp_file(tmp_path))) as server:
        assert server.http.get("/mcp/servers").json()["servers"]
        for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP"):  # a proxy on this machine: its client is not
            assert server.http.get("/mcp/servers", headers={header: "10.0.0.9"}).json() == {"servers": []}
            assert server.http.post("/mcp/call", json=CALL, headers={header: "10.0.0.9"}).status_code == 403
        assert server.http.get("/mcp/servers", headers={"Host": "evil.example"}).status_code == 421  # DNS rebinding
        wrong: dict[str, tuple[Any, int]] = {
            "no such server": (CALL | {"server": "x"}, 400),
            "no object": (CALL | {"arguments": [1]}, 400),
            "no text": (CALL | {"tool": 5}, 400),
        }
        for name, (body, status) in wrong.items():
            assert server.post("/mcp/call", body).status_code == status, name


@pytest.mark.parametrize("key", [None, KEY])
def test_another_machine_needs_a_key(
    engine: Engine, tmp_path: Path, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polarlm.server.http.plain.mcp_tools.is_here", lambda client: False)
    with serving(engine, mcp_config=str(mcp_file(tmp_path)), api_key=key) as server:
        assert bool(server.http.get("/mcp/servers").json()["servers"]) is (key is not None)
        wrong = server.http.post("/mcp/connect", json={"server": "x"})  # which is looked up only for those who may
        assert wrong.status_code == (403 if key is None else 400)


def test_without_the_flag_there_are_none(engine: Engine) -> None:
    with serving(engine) as server:
        assert server.http.get("/mcp/servers").json() == {"servers": []}
        refused = server.post("/mcp/call", CALL)
        assert refused.status_code == 501
        assert "--mcp-config" in refused.json()["error"]["message"]


def test_a_file_names_programs_and_addresses(tmp_path: Path) -> None:
    by_name = {server.name: server for server in read_mcp_file(str(mcp_file(tmp_path)))}
    assert list(by_name) == ["tools", "web", "absent", "broken", "deaf"]
    assert by_name["absent"] == McpServer("absent", str(tmp_path / "no-such-program"))
    assert by_name["web"].secrets() == ["Bearer sk-very-secret", "sk-very-secret", "Bearer"]


def test_a_wrong_file_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    for text, why in WRONG.items():
        path.write_text(text)
        with pytest.raises(EngineError, match="--mcp-config") as refused:
            read_mcp_file(str(path))
        assert why in str(refused.value)


def test_a_wrong_file_or_a_missing_package_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mcp.json"
    path.write_text("{}")
    assert main(["--mcp-config", str(path)]) == 2
    assert "names no servers" in capsys.readouterr().err
    assert main(["--mcp-config", str(tmp_path / "missing")]) == 2
    assert "there is no file" in capsys.readouterr().err

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(__main__, "version", missing)
    assert main(["--mcp-config", str(mcp_file(tmp_path))]) == 1
    assert "pip install 'polarlm[mcp]'" in capsys.readouterr().err
