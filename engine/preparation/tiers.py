"""What tiers have of a prompt."""

from __future__ import annotations

from dataclasses import replace

from polarlm.engine.core import EngineCore
from polarlm.engine.requests.request import Preparation, Submission


def find(engine: EngineCore) -> Preparation | None:
    """The blocks of a prompt that tiers have and the store lacks are read. Raises EngineError if the engine has been
    closed."""
    tiers = engine._tiers
    if tiers is None:
        return None

    def prepare(submission: Submission) -> Submission:
        engine._check_open()
        if not submission.options.cache_prompt or submission.is_whole:
            return submission
        return replace(submission, hit=tiers.find(submission.ids[:-1], submission.salt))

    return prepare
