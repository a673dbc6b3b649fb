"""The plan of a waiting request: what the store lacks of it, and how that is computed."""

from __future__ import annotations

from polarlm.engine.requests.request import Plan, Request
from polarlm.engine.state.store import KVStore


def plan_of(request: Request, store: KVStore, most_rows: int, *, is_replayable: bool) -> Plan:
    """Return the plan of a request by the first line that is true of it and of what the store has of it:

    | | how |
    |---|---|
    | its blocks are still being put back | wait |
    | it lacks nothing | step |
    | its answer can be replayed, and not the whole prompt is to be read | step |
    | what its prompt lacks are text rows of the current block, and it has no token yet | step |
    | it is computed for the first time, has two to `most_rows` rows, of text, and no reader | join |
    | all else: long prompts, images, readers, and what a preempted request has lost | alone |

    wait: until the next unit. step: what it lacks are rows of its first step, which see the same there: the current
    block in full precision. join: in a batch with others. (Of one row, a CPU computes products in another way.) alone:
    in chunks of its own; rows that were steps before a preemption see what they saw.
    """
    sequence, kv = request.sequence, request.kv
    if kv is None:
        return Plan("wait")
    start = kv.length
    missing, left = sequence.computable - start, len(sequence.prompt) - start
    is_first = not sequence.generated and start == request.cached
    is_text = not request.reads_prompt and sequence.text_from <= start
    is_short = is_text and sequence.max_tokens > 0 and not store.sparse_groups and 0 < left <= store.rows_of_block(kv)
    if missing == 0 or (is_replayable and not (left > 0 and request.is_whole)) or (is_short and is_first):
        return Plan("step", missing)
    if is_first and is_text and 2 <= missing <= most_rows:
        return Plan("join", missing)
    rows = request.span_end(start, store.shape.block_size) - start
    return Plan("alone", rows, as_steps=left <= 0 or (is_short and start == request.cached))
