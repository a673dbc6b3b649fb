"""A day in the life of a server of several models: nothing is lost, and each process has the memory that it said."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from polarlm.engine.loading.need import PROCESS_BYTES
from tests.server.lines import PATIENCE, eventually
from tests.server.models.household import (
    CHATTING,
    NAMES,
    PROMPT,
    STORE,
    Household,
    begun,
    cached_from,
    different,
    events,
    everyone,
    make_household,
    resident,
    starts,
)

# Bytes of a process without a model: Python and its libraries, and LLVM if kernels have to be compiled.
PROGRAM = 256 << 20


@pytest.mark.slow
def test_a_day_with_a_kill_and_two_restarts(tmp_path: Path) -> None:
    models = make_household(tmp_path / "models")
    kept = ["--cache-disk", "50M", "--cache-disk-folder", str(tmp_path / "disk")]
    kept += ["--sessions", str(tmp_path / "sessions")]

    with Household(models, tmp_path, *kept) as house:
        first = everyone(house)
        assert_memory(house)
        for model in CHATTING:
            assert cached_from(house, model).get("disk", 0) == 0
        session = house.post("/sessions/save", model="mixture", name="talk", prompt=PROMPT)["tokens"]
        assert session > 128
        house.processes()["plain"].kill()
        eventually(lambda: house.models()["plain"]["status"].get("failed"))
        assert different(first, everyone(house)) == set()
        assert starts(house) == {**dict.fromkeys(NAMES, 1), "plain": 2, "encoder": starts(house)["encoder"]}
        assert_memory(house)
        with begun(house, "hybrid", 16) as answer:  # of which half wait
            house.signal(signal.SIGTERM)
            *_, end = events(answer)
        assert (end, house.process.wait(PATIENCE)) == ("[DONE]", 0)
        assert_nothing_is_left(house)

    most = 2 * (PROCESS_BYTES + STORE) + 300_000  # two of the models to chat with fill it: all five take turns
    with Household(models, tmp_path, *kept, "--models-memory", str(most)) as house:
        assert different(first, everyone(house)) == set()
        for model in CHATTING:
            assert cached_from(house, model)["disk"] >= 128
            assert sum(entry.get("memory", 0) for entry in house.models().values()) <= most
            assert_memory(house)
        assert "makes room for" in house.errors.read_text()
        assert house.post("/sessions/load", model="mixture", name="talk")["tokens"] == session
        with begun(house, "mixture", 64) as answer:
            house.signal(signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(events(answer))
        house.process.wait(PATIENCE)
        eventually(lambda: not house.running())

    with Household(models, tmp_path, *kept) as house:
        assert different(first, everyone(house)) == set()
        assert cached_from(house, "mixture")["disk"] >= 128
        house.signal(signal.SIGTERM)
        assert house.process.wait(PATIENCE) == 0
        assert_nothing_is_left(house)
    assert "Traceback" not in (told := (tmp_path / "stderr").read_text())
    assert "Fatal Python error" not in told


# -- what the server has ----------------------------------------------------------------------------------------------


def assert_memory(house: Household) -> None:
    """No process has more than the server says that its model may take."""
    for name, taken in resident(house).items():
        told = house.models()[name].get("memory")
        assert told is None or taken <= told + PROGRAM, f"{name}: {taken} bytes, and {told} were said"


def assert_nothing_is_left(house: Household) -> None:
    assert house.running() == []
    assert list(house.temporary.iterdir()) == []
