"""A request waits for places less long than computing takes on this machine, as it is now."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from polarlm.engine import SamplingParams
from polarlm.engine.requests import request
from polarlm.engine.storage.tiers import patience as patience_module
from polarlm.engine.storage.tiers.patience import Patience
from tests.tiers.test_engine import ids, load
from tests.tiny import make_model

ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience_module, "_LEAST_SECONDS", 0.1)
    monkeypatch.setattr(patience_module, "_MOST_SECONDS", 30.0)


def test_waiting_takes_half_as_long_as_computing() -> None:
    patience = Patience()
    patience.record_prefill(1000, 20.0)
    assert patience.seconds(500) == pytest.approx(5.0)
    assert patience.seconds(100) == pytest.approx(1.0)


def test_there_is_a_most_and_a_least() -> None:
    """A place that hangs holds no request for ever; a thread has time to begin."""
    for seconds, expected in ((1e6, 30.0), (1e-6, 0.1)):
        patience = Patience()
        patience.record_prefill(1000, seconds)
        assert patience.seconds(1000) == expected


def test_short_prefills_say_little_of_long_ones() -> None:
    patience = Patience()
    patience.record_prefill(1000, 1.0)
    for _ in range(100):
        patience.record_prefill(2, 1.0)
    assert patience.seconds(1000) == pytest.approx(0.5)


def test_patience_follows_the_machine_as_it_gets_busy_and_idle() -> None:
    """However long it was otherwise."""
    patience = Patience()
    for seconds in (1.0, 50.0, 1.0):
        for _ in range(50):
            patience.record_prefill(500, seconds)
        assert patience.seconds(500) == pytest.approx(seconds / 2, rel=0.01)
    patience.record_prefill(500, 50.0)
    assert patience.seconds(500) > 10


def test_an_engine_measures_its_prefills_and_waits_for_what_the_store_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock goes a second further each time that it is looked at."""
    ticks = itertools.count()
    monkeypatch.setattr(request, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    with load(make_model(tmp_path), tmp_path / "blocks") as engine:
        waits: list[float] = []
        run_within = engine._tiers._run_within
        monkeypatch.setattr(
            engine._tiers, "_run_within", lambda seconds, work: waits.append(seconds) or run_within(seconds, work)
        )
        usage = engine.generate(ids(1, 80), ONE).usage
        per_token = (usage.prefill_seconds - 1) / 80  # in the last second the token is taken
        assert per_token > 0
        waits.clear()
        engine.generate([*ids(1, 80), *ids(2, 40)], ONE)  # the store has the first 80
        assert waits == [pytest.approx(per_token / 2 * 39)]  # the last token is computed in any case
