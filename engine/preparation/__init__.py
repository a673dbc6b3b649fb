"""What is done to a submission before it is queued, in one list.

Each function in `ORDER` is called when an engine is made. It makes what its feature needs, and returns what the feature
makes of a `Submission`, or None if the feature is off. That runs in the caller's thread, without the engine's lock.
"""

from __future__ import annotations

from polarlm.engine.preparation import adapters, answer, holes, prompt, replay, storage

ORDER = (
    storage.begin_with_pack,
    adapters.choose,
    answer.constrain,
    answer.stop,
    answer.limit_reasoning,
    prompt.read,
    holes.leave_out,
    replay.repeat,
    storage.load_pack,
    answer.draft,
    storage.find_blocks,
)
