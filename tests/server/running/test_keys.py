"""API keys: what a file of them may say, that it holds while the server runs, and what each may ask in a minute."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine import Engine
from polarlm.engine.cli.flags import FlagError
from polarlm.server.keys import Keys
from polarlm.server.models.child import KEY_NAME, PRIORITY, _with_clients_of_parent
from polarlm.server.running import journal
from polarlm.server.running.quotas import Quotas
from polarlm.server.running.refusals import Refusal
from tests.server.apis import submitted
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


# -- limits for a minute ---------------------------------------------------------------------------------------


def limits_of(folder: Path, limits: str) -> Callable[[str], Mapping[str, int]]:
    (folder / "keys").write_text(f"anna {ANNA} {limits}\nben {BEN}\n")
    return Keys(None, str(folder / "keys")).limits_of


def refused(quotas: Quotas) -> int | None:
    """The seconds after which Anna may come again; None if her request passes."""
    try:
        quotas.begin("anna")
    except Refusal as refusal:
        return refusal.retry_after
    return None


@given(gaps=st.lists(st.floats(0, 20), min_size=1, max_size=80), limit=st.integers(1, 9))
def test_requests_pass_at_the_rate_of_the_limit(
    tmp_path_factory: pytest.TempPathFactory, gaps: list[float], limit: int
) -> None:
    """In any time no more than the limit and what comes back in it; who waits as long as the refusal says, passes."""
    time, passed = 0.0, list[float]()
    quotas = Quotas(limits_of(tmp_path_factory.mktemp("keys"), f"requests={limit}"), lambda: time)
    for gap in gaps:
        time += gap
        quotas.begin("ben")
        quotas.begin(None)
        if (seconds := refused(quotas)) is not None:
            assert 1 <= seconds <= 60 / limit + 1
            time += seconds
            assert refused(quotas) is None
        passed.append(time)
    for first, start in enumerate(passed):
        for last, end in enumerate(passed[first:], first):
            assert last - first + 1 <= limit + (end - start) * limit / 60 + 1e-6


def test_tokens_are_paid_back_before_the_next_request(tmp_path: Path) -> None:
    time = 0.0
    quotas = Quotas(limits_of(tmp_path, "tokens=600"), lambda: time)
    quotas.begin("anna")
    quotas.charge("anna", 500)
    quotas.begin("anna")
    quotas.charge("anna", 400)  # 300 too many: 30 seconds
    with pytest.raises(Refusal, match="key anna may have 600 tokens a minute") as caught:
        quotas.begin("anna")
    assert caught.value.retry_after == 30
    time = 30.5
    quotas.begin("anna")
    time += 60
    quotas.begin("anna")


def test_a_client_is_told_when_to_come_again(tiny: Engine, start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"anna {ANNA} requests=2 tokens=1000\nben {BEN}\n")
    with serving(tiny, api_key_file=str(file)) as server:
        answers = [ask(server, key) for key in (ANNA, ANNA, ANNA, BEN)]
        assert [answer.status_code for answer in answers] == [200, 200, 429, 200]
        assert answers[2].json()["error"]["code"] == "rate_limited"
        assert 25 < int(answers[2].headers["Retry-After"]) <= 30
        page = server.http.get("/metrics", headers={"X-Api-Key": BEN}).text
        assert 'outcome="rate_limited"' in page
    with Client(start(api_key_file=str(file)).address) as client:
        for number in range(3):
            *_, last = client.ask(id=number, prompt="a", max_tokens=1, api_key=ANNA)
            assert last.get("done") or (number == 2 and last["error"]["code"] == "rate_limited")
        assert last["error"]["retry_after"] > 25


def test_requests_of_a_key_have_its_priority_or_a_larger_one(
    tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, requests = tmp_path / "keys", submitted(tiny, monkeypatch)
    file.write_text(f"anna {ANNA} priority=5\nben {BEN}\n")
    with serving(tiny, api_key_file=str(file)) as server:
        for key in (ANNA, BEN):
            for priority in (-3, 8):
                body = {"prompt": "a", "max_tokens": 1, "priority": priority}
                assert server.http.post("/v1/completions", json=body, headers={"X-Api-Key": key}).status_code == 200
    assert [request["options"].priority for request in requests] == [5, 8, -3, 8]


@pytest.mark.anyio
async def test_a_model_s_process_hears_the_priority_of_a_key() -> None:
    """Of the parent, which alone reads the file of the keys."""
    heard = list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append((journal.current().key, journal.current().priority))

    headers = [(KEY_NAME.encode(), b"anna"), (PRIORITY.encode(), b"5")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    await _with_clients_of_parent(journal.JournalMiddleware(app))(scope, None, None)
    assert heard == [("anna", 5)]
