"""What is done to a submission before it is queued: one list, and a file for each feature.

Each function in `ORDER` is called when an engine is made. It makes what its feature needs, and returns what the feature
makes of a `Submission`, or None if the feature is off. That runs in the caller's thread, without the engine's lock.
"""

from __future__ import annotations

from typing import Any

from polarlm.engine.preparation import adapters, constraints, drafts, packs, prompt, replay, tiers
from polarlm.engine.requests.request import Preparation

ORDER = (
    packs.begin,
    adapters.choose,
    constraints.constrain,
    constraints.stop,
    constraints.limit_reasoning,
    prompt.read,
    replay.repeat,
    packs.load,
    drafts.draft,
    tiers.find,
)


def preparations(engine: Any) -> list[Preparation]:
    return [one for function in ORDER if (one := function(engine)) is not None]
