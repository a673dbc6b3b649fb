"""Teacher-forced scoring, with the cache read as steps read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from polarlm.engine.backends.ops import Array
from polarlm.engine.errors import EngineError
from polarlm.engine.model.batch import PromptBatch, run_to_end
from polarlm.engine.model.forward import Transformer
from polarlm.engine.outputs import Score
from polarlm.engine.sampling.sample import log_softmax
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.store import SequenceKV

_ROWS = 256  # rows of logits at a time: 128 MiB for a vocabulary of 128 K


def score(model: Transformer, ids: Sequence[int], *, every_token_coded: bool = False, logits: bool = False) -> Score:
    """Score every next id of `ids` (T,) in a sequence of its own; see `states`. Raises EngineError if memory or blocks
    run out."""
    kv = model.store.new_sequence()
    try:
        logprobs = np.empty(len(ids) - 1, np.float32)
        all_logits = np.empty((len(ids) if logits else 0, model.config.vocab_size), np.float32)
        for start, hidden in states(model, kv, ids, every_token_coded=every_token_coded):
            for first in range(0, len(hidden), _ROWS):
                rows = model.logits(hidden[first : first + _ROWS])
                at = start + first
                if logits:
                    all_logits[at : at + len(rows)] = rows
                following = ids[at + 1 : at + 1 + len(rows)]
                logprobs[at : at + len(following)] = logprobs_of(rows[: len(following)], following)
        return Score(logprobs, all_logits)
    except MemoryError:
        advice = "score fewer tokens" + (", or without their logits" if logits else "")
        raise EngineError(f"There is not enough memory to score {len(ids)} tokens: {advice}", "out_of_memory") from None
    except OutOfBlocks:
        raise EngineError("The KV store is in use by other requests; score again later", "out_of_memory") from None
    finally:
        model.store.release(kv)


def states(
    model: Transformer, kv: SequenceKV, ids: Sequence[int], *, every_token_coded: bool = False
) -> Iterator[tuple[int, Array]]:
    """Feed `ids` (T,) to `kv`, and yield (index of the first id, hidden states (rows, E) from it on), block by block.

    `kv` is empty or ends with a complete block. Attention reads what it reads in a step; with `every_token_coded`, it
    reads all but the first block as codes: recent blocks encoded at once, and the current block encoded and decoded,
    whose codes may depend on later tokens of the block. The states are valid until the next chunk. Raises OutOfBlocks.
    """
    size = model.store.shape.block_size
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        span = model.store.open(kv, len(chunk), round_trip=every_token_coded, as_steps=not every_token_coded)
        with model.store.abort_on_error([span]):
            hidden = run_to_end(model.chunks(PromptBatch([span], chunk)))
            model.store.commit(span)
        if every_token_coded:
            model.store.encode_recent(kv)
        yield start, hidden


def logprobs_of(logits: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Return the log softmax of logits (T, V) at ids (T,): (T,) float32, computed in float64."""
    logprobs = np.empty(len(logits), np.float32)
    for first in range(0, len(logits), 64):  # float64 copies of 64 rows at a time
        rows = slice(first, first + 64)
        logprobs[rows] = np.take_along_axis(log_softmax(logits[rows]), np.asarray(ids[rows])[:, None], axis=1)[:, 0]
    return logprobs
