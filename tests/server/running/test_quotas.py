"""Limits of keys for a minute: how many requests and tokens pass, and what a client is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine import Engine
from polarlm.server.keys import Keys
from polarlm.server.models.child import KEY_NAME, PRIORITY, _with_clients_of_parent
from polarlm.server.running import journal
from polarlm.server.running.quotas import Quotas
from polarlm.server.running.refusals import Refusal
from tests.server.apis import submitted
from tests.server.http_server import serving
from tests.server.lines import Client
from tests.server.running.test_keys import ANNA, BEN, ask


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
