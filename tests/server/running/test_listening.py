"""What an event loop says of connections that cannot be accepted."""

from __future__ import annotations

import errno
import logging
import os
from typing import Any
from unittest.mock import Mock

import pytest

from polarlm.server.running.listening import quiet_accept_errors

OUT_OF_FILES = {
    "message": "socket.accept() out of system resource",
    "exception": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
}
NOBODY_LISTENS = {
    "message": "Exception in callback BaseSelectorEventLoop._start_serving(<socket>)",
    "exception": ValueError("Invalid file descriptor: -1"),
}
OTHER = {"message": "Exception in callback something()", "exception": ValueError("other")}


@pytest.mark.parametrize(("context", "lines", "others"), [(OUT_OF_FILES, 1, 0), (NOBODY_LISTENS, 0, 0), (OTHER, 0, 3)])
def test_accept_errors_are_one_line_and_others_are_unchanged(
    context: dict[str, Any], lines: int, others: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three in the same second."""
    caplog.set_level(logging.WARNING)
    loop, handle = Mock(), quiet_accept_errors()
    for _ in range(3):
        handle(loop, context)
    assert len(caplog.records) == lines
    assert all(record.exc_info is None for record in caplog.records)
    assert loop.default_exception_handler.call_count == others
