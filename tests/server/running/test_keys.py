"""API keys: what a file of them may say, and that it holds while the server runs."""

from __future__ import annotations

import itertools
import json
import logging
import os
from pathlib import Path

import httpx
import pytest

from polarlm.engine import Engine
from polarlm.engine.cli.flags import FlagError
from polarlm.server.keys import Keys
from tests.server.http_server import Serving, serving
from tests.server.lines import Client

ANNA, BEN, LONE = "sk-anna-0123456789", "sk-ben-0123456789", "short"
TEAM = f"# the team\nanna {ANNA}\n\n  ben\t{BEN}\n{LONE}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(TEAM)
    return path


def rewrite(file: Path, text: str) -> None:
    """As an editor does, at another time."""
    file.write_text(text)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))


def test_a_line_has_a_key_with_or_without_a_name(file: Path) -> None:
    keys = Keys("sk-flag", str(file))
    assert [keys.name_of(key) for key in (ANNA, BEN, LONE, "sk-flag")] == ["anna", "ben", "", ""]
    assert [keys.name_of(other) for other in ("", "anna", ANNA[:-1], f"{ANNA}x", "#", "é", "\ud800")] == [None] * 7


WRONG = [
    ("anna secret-0123456789 more", "line 1 is neither a key nor a name"),
    ("# ok\nanna sécret-0123456789", "line 2 is neither"),
    (f"{'a' * 65} secret-0123456789", "line 1 is neither"),
    (
        "anna secret-0123456789 requests=0",
        "line 1 is neither a key nor a name, of at most 64 characters, and a key, in",
    ),
    ("anna secret-0123456789 tokens=5k", "line 1 is neither a key nor a name, of at most 64 characters, and a key, in"),
    ("secret-0123456789 anna", "line 1 has a key of fewer than 8 characters; a name goes before its key"),
    ("anna secret-0123456789\nben secret-0123456789", "line 2 has a key that has another name above"),
    ("# nothing\n", "has no key"),
    (b"\xff\xfe", "is not UTF-8 text"),
    (None, "there is no such file"),
]


@pytest.mark.parametrize(("content", "complaint"), WRONG)
def test_a_wrong_file_is_told_with_its_line_and_without_its_keys(
    tmp_path: Path, content: str | bytes | None, complaint: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FlagError) as caught:
        Keys(None, str(file))
    assert str(caught.value).startswith(f"--api-key-file {file}: {complaint}")
    assert "secret" not in str(caught.value)


def test_a_line_that_is_removed_withdraws_its_key(file: Path) -> None:
    keys = Keys("sk-flag", str(file))
    rewrite(file, f"anna {ANNA}\nanna {BEN}\n")
    assert [keys.name_of(key) for key in (ANNA, BEN, LONE)] == ["anna", "anna", None]
    rewrite(file, "")
    assert keys.are_required
    assert [keys.name_of(key) for key in (ANNA, "sk-flag")] == [None, ""]


@pytest.mark.parametrize("broken", ["carl short\n", None])
def test_a_file_that_breaks_leaves_the_keys_and_is_told_once(
    file: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(None, str(file))
    file.unlink() if broken is None else rewrite(file, broken)
    assert [keys.name_of(key) for key in (ANNA, BEN, "short0123")] == ["anna", "ben", None]
    (message,) = caplog.messages
    assert message.endswith("; the keys that were read before stay valid")
    assert "0123456789" not in message
    rewrite(file, f"ben {BEN}\n")
    assert [keys.name_of(key) for key in (ANNA, BEN)] == [None, "ben"]
    assert caplog.messages[-1].endswith("has 1 valid key now")


def test_a_file_that_could_not_be_read_is_read_again(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times, reads = [0.0], list[float]()

    def fail(at: str, _file: Path) -> str:
        reads.append(times[0])
        raise FlagError(f"{at} cannot be read: Too many open files")

    keys = Keys(None, str(file), now=lambda: times[0])
    rewrite(file, f"ben {BEN}\n")
    with monkeypatch.context() as patch:
        patch.setattr("polarlm.server.keys.read_text", fail)
        for time in range(400):
            times[0] = float(time)
            assert keys.has_problem()
            assert keys.name_of(ANNA) == "anna"
    pauses = [later - time for time, later in itertools.pairwise(reads)]
    assert pauses == sorted(pauses)
    assert pauses[0] == 1
    assert pauses[-1] == 60
    assert len(caplog.messages) == 1
    times[0] += 60
    assert [keys.name_of(key) for key in (ANNA, BEN)] == [None, "ben"]
    assert not keys.has_problem()


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_a_file_that_others_can_read_is_warned_about(file: Path) -> None:
    for mode, warned in ((0o600, False), (0o640, True), (0o604, True)):
        file.chmod(mode)
        assert (Keys(None, str(file)).warning() is not None) is warned


# -- in a server ---------------------------------------------------------------------------------------------------


def ask(server: Serving, key: str) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
    return server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def test_the_name_is_in_the_log_and_counted_and_the_key_is_nowhere(
    tiny: Engine, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), serving(tiny, api_key_file=str(file)) as server:
        assert [ask(server, key).status_code for key in (ANNA, ANNA, BEN, LONE, "sk-x")] == [200] * 4 + [401]
        page = server.http.get("/metrics", headers={"X-Api-Key": LONE}).text
    lines = [record.line for record in caplog.records if hasattr(record, "line")]
    assert [line.get("key") for line in lines[:5]] == ["anna", "anna", "ben", None, None]
    for name, requests in (("anna", 2), ("ben", 1)):
        assert f'polarlm_key_requests_total{{key="{name}"}} {requests}.0' in page
        assert f'polarlm_key_completion_tokens_total{{key="{name}"}} {3 * requests}.0' in page
    assert page.count("polarlm_key_requests_total{") == 2
    assert not any(key in text for key in (ANNA, BEN) for text in (page, json.dumps(lines)))


def test_the_health_says_that_the_file_cannot_be_read(tiny: Engine, file: Path) -> None:
    with serving(tiny, api_key_file=str(file)) as server:
        assert server.http.get("/health").json() == {"status": "ok"}
        file.unlink()
        found = server.http.get("/health")
        assert (found.status_code, found.json()["status"]) == (200, "ok")
        assert "keys that were read before stay valid" in found.json()["api_key_file"]
        assert str(file) not in found.text


def test_a_withdrawn_key_ends_its_connection_to_the_socket(start, file: Path) -> None:
    server = start(api_key_file=str(file))
    with Client(server.address) as client:
        assert client.ask(id=1, prompt="a", max_tokens=1, api_key=ANNA)[1]["done"]
        rewrite(file, f"ben {BEN}\n")
        client.send(id=2, prompt="a", max_tokens=1)
        assert client.receive()["error"]["code"] == "unauthorized"
        with pytest.raises((EOFError, ConnectionResetError)):
            client.receive()
