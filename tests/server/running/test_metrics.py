"""/metrics beyond counters: times of answers, what tiers hold and what is wrong with them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine.outputs import Chunk
from polarlm.engine.storage.tiers.query import Tier
from polarlm.engine.storage.tiers.tier_store import FolderTier
from polarlm.server.running.counters import Totals
from polarlm.server.running.journal import Entry
from tests.server.http.test_http_plain import metrics
from tests.server.http_server import Serving, serving
from tests.server.lines import PATIENCE, eventually
from tests.tiny import PLAIN, forget, load_tiny

BODY = {"prompt": "the rain then ran on and on and on", "temperature": 0, "ignore_eos": True, "max_tokens": 9}


@pytest.fixture
def server(tiny_path: Path, tmp_path: Path) -> Iterator[Serving]:
    kept = {"cache_disk": "1M", "cache_disk_folder": str(tmp_path)}
    with load_tiny(tiny_path, **PLAIN, **kept) as engine, serving(engine) as running:
        yield running


def ask(server: Serving, **more: Any) -> dict[str, Any]:
    return server.post("/v1/completions", {**BODY, **more}).json()


def flush(server: Serving) -> None:
    """Waits until what was asked is released, and written."""
    eventually(lambda: not server.busy)
    assert server.engine._tiers._writer.flush(60)


# -- times -------------------------------------------------------------------------------------------------------------


def test_times_of_answers_are_counted_in_buckets(server: Serving) -> None:
    before = metrics(server)
    for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
        assert before[f"polarlm_{name}_seconds_count"] == before[f"polarlm_{name}_seconds_sum"] == 0
    for _ in range(2):
        ask(server)
    server.post("/tokenize", {"content": "a"})  # is no answer
    after = metrics(server)
    for name, count in (("time_to_first_token", 2), ("inter_token_latency", 2 * 8), ("request_latency", 2)):
        assert after[f"polarlm_{name}_seconds_count"] == count
        assert after[f"polarlm_{name}_seconds_bucket{{+Inf}}"] == count
        assert after[f"polarlm_{name}_seconds_sum"] > 0
    first, gaps, whole = (
        after[f"polarlm_{name}_seconds_sum"]
        for name in ("time_to_first_token", "inter_token_latency", "request_latency")
    )
    assert first + gaps <= whole


class JobAt:
    """A job whose chunk came at `appended`."""

    entry = Entry("", "")

    def __init__(self, started: float):
        self.start_time = started
        self.append_time = 0.0
        self.last_token_time: float | None = None


def test_a_slow_reader_does_not_make_the_gaps_larger() -> None:
    """They are the engine's: its thread notes the time of a chunk."""
    job = JobAt(10.0)
    totals = Totals()
    for at, tokens in ((12.0, 0), (13.0, 1), (13.5, 2), (14.5, 1)):
        job.append_time = at
        totals.count(Chunk("", tuple(range(tokens))), job)
    assert (totals.first_token.seconds, totals.gaps.seconds) == (3.0, 1.5)
    assert (sum(totals.first_token.counts), sum(totals.gaps.counts)) == (1, 3)


# -- tiers -------------------------------------------------------------------------------------------------------------


def test_what_a_tier_holds_is_shown(server: Serving, tmp_path: Path) -> None:
    assert metrics(server)["polarlm_tier_objects{disk}"] == 0
    ask(server)
    flush(server)
    files = [file for file in tmp_path.iterdir() if not file.name.startswith(".")]
    now = metrics(server)
    assert now["polarlm_tier_objects{disk}"] == len(files) > 0
    assert now["polarlm_tier_bytes{disk}"] == sum(file.stat().st_size for file in files)
    forget(server.engine)
    cached = ask(server)["usage"]["prompt_tokens_details"]
    assert cached["cached_from"] == {"disk": cached["cached_tokens"]}
    assert metrics(server)["polarlm_cached_tokens_from_total{disk}"] == cached["cached_tokens"] > 0


def test_damaged_objects_are_counted(server: Serving, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each has a line in the log with its name: tests/tiers/test_engine.py."""
    assert metrics(server)["polarlm_tier_damaged_objects_total{disk}"] == 0
    ask(server)
    flush(server)
    for file in (file for file in tmp_path.iterdir() if not file.name.startswith(".")):
        file.write_bytes(b"?" * 200)
    forget(server.engine)
    ask(server)
    flush(server)
    damaged = metrics(server)["polarlm_tier_damaged_objects_total{disk}"]
    assert damaged == caplog.text.count("is damaged and not used") > 0


@pytest.mark.parametrize(("damaged", "lines"), [(10, 10), (99, 18), (100, 19)])
def test_a_dying_disk_does_not_fill_the_log(
    tmp_path: Path, damaged: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    place = Tier(FolderTier(tmp_path, 1000))
    for number in range(damaged):
        place.report_damaged(bytes([*number.to_bytes(15, "big"), 0]), ValueError("its checksum is wrong"))
    assert len(caplog.records) == lines
    assert place.status().damaged == damaged


def test_errors_and_timeouts_are_counted_by_place(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"polarlm_tier_{name}" for name in ("errors_total{read,disk}", "errors_total{write,disk}")]
    names += ["polarlm_tier_timeouts_total{disk}"]
    assert [metrics(server)[name] for name in names] == [0, 0, 0]

    def broken(*_: object) -> None:
        raise OSError("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(FolderTier, "write", broken)
        ask(server)
        flush(server)
        assert metrics(server)[names[1]] >= 1
        assert metrics(server)[names[0]] == 0
        patch.setattr(FolderTier, "has", broken)
        ask(server, prompt="once upon a time there was " * 2)
        assert metrics(server)[names[0]] >= 1
        flush(server)
    hangs = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(server.engine._tiers._patience, "seconds", lambda tokens: 0.05)
        patch.setattr(FolderTier, "has", lambda *_: hangs.wait(PATIENCE) and False)
        ask(server, prompt="in the end the rain then ran on " * 2)
        eventually(lambda: metrics(server)[names[2]] == 1)
        hangs.set()
        flush(server)
