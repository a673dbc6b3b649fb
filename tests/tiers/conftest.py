"""What tests of tiers share."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from polarlm.engine.storage.tiers.writing import TierWriter
from tests.server.lines import PATIENCE


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Blocks of released sequences are written when this is set."""
    write, event = TierWriter._write_all, threading.Event()

    def late(*arguments: Any) -> None:
        assert event.wait(PATIENCE)
        write(*arguments)

    monkeypatch.setattr(TierWriter, "_write_all", late)
    return event
