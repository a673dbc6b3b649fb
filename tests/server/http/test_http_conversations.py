"""/conversations: for this machine's browsers, or with the key; ids and shapes are checked, and sizes bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine
from tests.server.http_server import KEY, Serving, serving

A, M = "a" * 16, "0123456789abcdef"


def write(server: Serving, name: str = A, **more: Any) -> Any:
    return server.post(f"/conversations/{name}", {"base": 0, "head": {}, "messages": {M: {"text": "é"}}} | more)


def test_a_conversation_is_written_read_and_deleted(tiny: Engine, tmp_path: Path) -> None:
    with serving(tiny, conversations=str(tmp_path), max_body=200) as server:
        assert server.http.get("/conversations").json() == {
            "kept": True,
            "revision": 0,
            "more": False,
            "conversations": {},
        }
        assert write(server).json() == {"revision": 1}
        told = server.http.get("/conversations?since=0").json()
        assert told["conversations"] == {A: {"head": {}, "messages": {M: {"text": "é"}}}}
        assert (write(server).status_code, write(server).json()["error"]["code"]) == (409, "conflict")
        wrong: list[dict[str, Any]] = [{"head": 1}, {"messages": []}, {"messages": {"x": {}}}, {"messages": {M: 1}}]
        for fields in [*wrong, {"base": -1}, {"base": "x"}]:
            assert write(server, **fields).status_code == 400
        for unreadable in ("NaN", "1e999", "[" * 1400 + "]" * 1400):  # by JSON.parse, or by us
            content = f'{{"base": 1, "head": {{}}, "messages": {{"{M}": {{"text": {unreadable}}}}}}}'
            sent = server.http.post(
                f"/conversations/{A}", content=content, headers={"Content-Type": "application/json"}
            )
            assert sent.status_code == 400, sent.text
        for name in ("..", "a", "A" * 16, "..%2f..%2fetc", f"{A}/x"):
            assert write(server, name).status_code in (400, 404, 405)
        assert write(server, messages={M: {"text": "a" * 4000}}).status_code == 413
        assert server.http.get("/conversations?since=x").status_code == 400
        assert server.http.delete(f"/conversations/{A}").json() == {"revision": 2}
        assert server.http.get("/conversations?since=1").json()["conversations"] == {A: {"head": None, "messages": {}}}
        assert {path.name for path in tmp_path.iterdir()} <= {
            f"conversations.sqlite3{end}" for end in ("", "-wal", "-shm")
        }


def test_without_the_flag_nothing_is_kept(tiny: Engine) -> None:
    with serving(tiny) as server:
        assert server.http.get("/conversations").json() == {"kept": False}
        assert write(server).status_code == 501


@pytest.mark.parametrize("key", [None, KEY])
def test_another_machine_needs_a_key(
    tiny: Engine, tmp_path: Path, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polarlm.server.http.conversations.is_here", lambda client: False)
    with serving(tiny, conversations=str(tmp_path), api_key=key) as server:
        assert server.http.get("/conversations").json()["kept"] is (key is not None)
        assert write(server).status_code == (403 if key is None else 200)
        if key is not None:
            assert server.http.get("/conversations", headers={"Authorization": "Bearer x"}).status_code == 401
