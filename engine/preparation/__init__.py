"""What is done to a submission before it is queued, by one feature each.

`ORDER` has functions of the files here. Each is called when an engine is made. It makes what its feature needs, and
returns what the feature makes of a `Submission`: another one, its warnings included. It returns None if the feature is
off. What it returns runs in the caller's thread, without the engine's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any

from polarlm.engine.requests.request import Submission

ORDER = (
    "packs.begin",
    "adapters.choose",
    "constraints.constrain",
    "constraints.stop",
    "constraints.limit_reasoning",
    "prompt.read",
    "replay.repeat",
    "packs.load",
    "drafts.draft",
    "tiers.find",
)

Preparation = Callable[[Submission], Submission]

WARNINGS = logging.getLogger(f"{__name__}.warnings")
"""What is not done as a request asks, for programs that call the engine; a server tells its clients."""


@lru_cache(512)
def _log_once(sentence: str) -> None:
    """Log a sentence the first time that it comes: a conversation repeats it at each turn."""
    WARNINGS.warning("%s", sentence)


def preparations(engine: Any) -> list[Preparation]:
    """Return what an engine does to submissions, in this order."""
    names = (name.split(".") for name in ORDER)
    functions = [getattr(import_module(f"{__name__}.{file}"), name) for file, name in names]
    return [one for function in functions if (one := function(engine)) is not None]


def prepare(submission: Submission, each: Iterable[Preparation]) -> Submission:
    """Return a submission of which all is done, and log its warnings. Raises EngineError if it cannot be served."""
    for preparation in each:
        submission = preparation(submission)
    for sentence in submission.warnings:
        _log_once(sentence)
    return submission
