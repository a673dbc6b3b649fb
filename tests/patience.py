"""Times after which engines give something up, as tests have them: a busy machine may stop any thread for seconds.

Tests of what is given up set their own times. No engine warms up for later turns a while after it was loaded: the
thread may outlive the test, and compile while others watch what is compiled.
"""

from __future__ import annotations

import threading
from typing import Any

from polarlm.engine.loading import warm_up
from polarlm.engine.storage.tiers import object_store, patience, tiers
from polarlm.model_loaders import limited_process

SECONDS = 120.0


TIMES: list[tuple[Any, str, Any]] = [  # modules, names in them, and their values
    (patience, "_LEAST_SECONDS", SECONDS),
    (patience, "_MOST_SECONDS", SECONDS),
    (tiers, "_NAMES_SECONDS", SECONDS),
    (tiers, "_LAST_PATIENCE", SECONDS),
    (object_store, "_SECONDS", SECONDS),
    (limited_process, "_ANSWER_SECONDS", SECONDS),
    (warm_up, "_SECONDS", threading.TIMEOUT_MAX),
]


def be_patient() -> None:
    """Set these times in this process."""
    for time in TIMES:
        setattr(*time)
