"""The memory that another process writes before a start."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from polarlm.bench.speed import starts

GIB = 1 << 30


@pytest.mark.parametrize(
    ("file_bytes", "available", "size"),
    [
        pytest.param(4 * GIB, 32 * GIB, 6.5 * GIB, id="the weights, half as much again, and the process"),
        pytest.param(4 * GIB, 8 * GIB, 3 * GIB, id="the file stays in memory, and a GiB is free"),
        pytest.param(4 * GIB, 4 * GIB, 0, id="nothing is free"),
    ],
)
def test_what_is_made_ready_is_what_a_start_may_need_and_has(
    file_bytes: int, available: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts.host_memory, "available", lambda: available)
    assert starts.memory_of_a_start(file_bytes) == size


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the most memory of a process is not told here")
def test_memory_is_made_ready_by_a_process_that_writes_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []  # KiB

    def run(command: Sequence[str], **settings: object) -> None:
        python, flag, code, *arguments = command
        told = subprocess.check_output(
            [python, flag, f"{code}; print(open('/proc/self/status').read())", *arguments], text=True
        )
        most.append(int(told.split("VmHWM:")[1].split()[0]))

    monkeypatch.setattr(starts, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))
    starts.ready_memory(100 << 20)
    starts.ready_memory(0)
    assert len(most) == 1
    assert 100 << 10 < most[0] < 200 << 10
