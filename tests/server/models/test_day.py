"""A day in the life of a server of several models: nothing is lost, and each process has the memory that it said."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import pytest

from polarlm.engine.loading.need import PROCESS_BYTES
from tests.server.lines import PATIENCE, eventually
from tests.server.models.household import (
    CHATTING,
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
TALK, MESSAGE = "0123456789abcdef", "fedcba9876543210"


@pytest.mark.slow
def test_a_day_with_a_kill_and_two_restarts(tmp_path: Path) -> None:
    models = make_household(tmp_path / "models")
    folders = {
        flag: str(tmp_path / flag.strip("-")) for flag in ("--cache-disk-folder", "--sessions", "--conversations")
    }
    kept = ["--cache-disk", "50M", *(word for pair in folders.items() for word in pair)]

    with Household(models, tmp_path, *kept) as house:
        first = everyone(house)
        assert_memory(house)
        for model in CHATTING:
            assert cached_from(house, model).get("disk", 0) == 0
        session = house.post("/sessions/save", model="mixture", name="talk", prompt=PROMPT)["tokens"]
        assert session > 128
        revision = say(house, 0, "in the morning")

        house.post("/api/generate", model="hybrid", keep_alive=1)
        eventually(lambda: house.loaded() == {"plain", "mixture", "decoder"})
        loaded = house.http.get("/api/ps").json()["models"]
        assert {entry["model"] for entry in loaded} == house.loaded()
        assert different(first, everyone(house)) == set()

        killed = house.processes()["plain"]
        with begun(house, "plain", 64) as lost, begun(house, "mixture") as other:
            killed.kill()
            *_, last = events(lost)
            assert json.loads(last)["error"]["code"] == "model_ended"
            *_, usage, end = events(other)
            assert (json.loads(usage)["usage"]["completion_tokens"] > 8 * 100, end) == (True, "[DONE]")
        assert different(first, everyone(house)) == set()
        assert house.processes()["plain"].pid != killed.pid
        assert starts(house) == {"plain": 2, "hybrid": 2, "mixture": 1, "decoder": 1} | {
            "encoder": starts(house)["encoder"]
        }

        assert_memory(house)
        with begun(house, "hybrid") as answer:
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
        assert said(house) == {MESSAGE: "in the morning"}
        assert house.post("/sessions/load", model="mixture", name="talk")["tokens"] == session
        say(house, revision, "in the evening")
        with begun(house, "mixture", 64) as answer:
            house.signal(signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(events(answer))
        house.process.wait(PATIENCE)
        eventually(lambda: not house.running())

    with Household(models, tmp_path, *kept) as house:
        assert different(first, everyone(house)) == set()
        assert cached_from(house, "mixture")["disk"] >= 128
        assert said(house) == {MESSAGE: "in the evening"}
        house.signal(signal.SIGTERM)
        assert house.process.wait(PATIENCE) == 0
        assert_nothing_is_left(house)
    assert "Traceback" not in (told := (tmp_path / "stderr").read_text())
    assert "Fatal Python error" not in told
    assert not [path for folder in folders.values() for path in Path(folder).rglob("*.tmp*")]


# -- what the server has ----------------------------------------------------------------------------------------------


def assert_memory(house: Household) -> None:
    """No process has more than the server says that its model may take."""
    for name, taken in resident(house).items():
        told = house.models()[name].get("memory")
        assert told is None or taken <= told + PROGRAM, f"{name}: {taken} bytes, and {told} were said"


def assert_nothing_is_left(house: Household) -> None:
    assert house.running() == []
    assert list(house.temporary.iterdir()) == []


# -- what is asked ----------------------------------------------------------------------------------------------------


def say(house: Household, base: int, text: str) -> int:
    """Change the only conversation; returns its revision."""
    body = {"base": base, "head": {"title": "a day"}, "messages": {MESSAGE: {"text": text}}}
    return int(house.post(f"/conversations/{TALK}", **body)["revision"])


def said(house: Household) -> dict[str, str]:
    kept = house.http.get("/conversations").json()["conversations"]
    return {name: message["text"] for name, message in kept[TALK]["messages"].items()}
