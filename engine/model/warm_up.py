"""The warm-up: runs a conversation without values, so that its kernels are prepared before the weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from polarlm.engine.model.batch import PromptBatch, StepBatch, join, run_to_end
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.layers.mtp import MtpRow
from polarlm.engine.sampling.sample import greedy
from polarlm.engine.state.plan import StorePlan, plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import RowAdapter, SequenceKV, Span

_ROWS = 48  # rows of a prompt: kernels for many rows take 6, 4, 3 or 2 at a time, and all of these divide it
_MANY_ROWS = 256  # rows of a prompt: enough to be multiplied by a GPU's library


def least_plan(shape: CacheShape, most_rows: int) -> StorePlan:
    """Return the smallest store for a warm-up. most_rows: the most rows of `warm_up_rows`."""
    tokens = 2 * _ROWS + 1 + _many_rows(shape) + shape.block_size
    return plan_for_tokens(shape, tokens + 1 + most_rows, 1 + most_rows)


def _many_rows(shape: CacheShape) -> int:
    """Enough to complete blocks."""
    return max(2 * shape.block_size, _MANY_ROWS)


def warm_up(model: Transformer, short: Sequence[int]) -> SequenceKV:
    """Run first prompts and a step with the ops of a `WarmUp`; return the sequence of the longest prompt and of the
    step. short: rows of the other prompts."""
    sequence = model.store.new_sequence()
    _prompt(model, sequence, _ROWS)
    _step(model, sequence)
    for rows in short:
        other = model.store.new_sequence()
        _prompt(model, other, rows)
        model.store.release(other)
    return sequence


def warm_up_codes(model: Transformer, sequence: SequenceKV) -> None:
    """Run a prompt that completes blocks, and one that reads them as codes; for recurrent layers, also a step that
    completes a block."""
    _prompt(model, sequence, _many_rows(model.store.shape))
    model.store.encode_recent(sequence)
    _prompt(model, sequence, _ROWS)
    if not any(group.is_sparse for group in model.store.groups):
        return
    if tokens_left := -(sequence.length + 1) % model.store.shape.block_size:
        _prompt(model, sequence, tokens_left)
    _step(model, sequence)


def warm_up_batch(model: Transformer, rows: int) -> None:
    """Run a batch of a first prompt, with a step of `rows` rows of another sequence, if there are such batches: others
    need the kernels of prompts."""
    if not model.batch_rows or not model.ops.batches_take_steps:
        return
    new, running = model.store.new_sequence(), model.store.new_sequence()
    _step(model, running)
    rows = min(rows, model.store.rows_of_block(running))
    spans, steps = model.store.open_batch([(new, _ROWS)]), [model.store.open_step(running, rows)]
    run_to_end(model.chunks(join(model.ops, spans, [[0] * _ROWS], steps, [0] * rows)))
    model.store.commit_steps([*spans, *steps])
    for sequence in (new, running):
        model.store.release(sequence)


def warm_up_rows(model: Transformer, rows: int, *, in_steps: bool) -> None:
    """Run a prompt of `rows` rows; with `in_steps`, run a step of `rows` sequences before it."""
    sequences = [model.store.new_sequence() for _ in range(rows if in_steps else 1)]
    if in_steps:
        _step(model, *sequences)
    _prompt(model, sequences[0], rows)
    for sequence in sequences:
        model.store.release(sequence)


def warm_up_adapter(model: Transformer) -> None:
    """Run a prompt and a step with the first adapter."""
    sequence = model.store.new_sequence()
    sequence.adapter = RowAdapter(0, 1.0)
    _prompt(model, sequence, _ROWS)
    _step(model, sequence)
    model.store.release(sequence)


def warm_up_drafts(model: Transformer, rows: int) -> None:
    """Run a step of one sequence with `rows` rows, as drafted tokens have, and let the layer of `ModelConfig.mtp` draft
    one more."""
    sequence = model.store.new_sequence()
    _step(model, sequence, rows=min(rows, model.store.rows_of_block(sequence)))
    if model.mtp is not None and sequence.hidden is not None:
        span = model.store.open_step(sequence)
        model.mtp.draft([MtpRow(span, 0, sequence.hidden)])
        model.store.abort(span)
    model.store.release(sequence)


def recording_warm_ups(model: Transformer, parallel: int) -> list[Callable[[], None]]:
    """Return calls that compute batches and steps as those of requests, and leave the store as it was. The first call
    for a number of rows lets a device allocate, the second one record. parallel: the most sequences that run."""
    batches, steps = model.ops.warm_up_rows
    prompts = [((rows,), False) for rows in batches if rows <= min(model.batch_rows, model.most_recorded_rows)]
    tokens = [((1,) * rows, True) for rows in steps if rows <= parallel]
    return [partial(_warm_up_new, model, *counts) for counts in (*prompts, *tokens) for _ in range(2)]


def _warm_up_new(model: Transformer, counts: Sequence[int], is_step: bool) -> None:
    """Compute so many tokens of new sequences in a step or a batch, if blocks are free that the prefix cache does not
    know."""
    store, rows = model.store, sum(counts)
    blocks, slots = rows // store.shape.block_size, 2 * len(counts)
    for group in store.groups:
        if group.quantized.free - group.quantized.kept < blocks or group.full.free - group.full.kept < slots:
            return
    spans: list[Span] = []
    try:
        if is_step:
            spans += [store.open_step(store.new_sequence()) for _ in counts]
            model.step(StepBatch(spans, [0] * rows, [greedy(model.config.vocab_size)] * rows))
        else:
            spans += store.open_batch([(store.new_sequence(), count) for count in counts])
            run_to_end(model.chunks(join(model.ops, spans, [[0] * count for count in counts])))
    finally:
        for span in spans:
            store.abort(span)


def _step(model: Transformer, *sequences: SequenceKV, rows: int = 1) -> None:
    spans = [model.store.open_step(sequence, rows) for sequence in sequences]
    count = rows * len(spans)
    model.step(StepBatch(spans, [0] * count, [greedy(model.config.vocab_size)] * count))
    model.store.commit_steps(spans)


def _prompt(model: Transformer, sequence: SequenceKV, tokens: int) -> None:
    span = model.store.open(sequence, tokens)
    hidden = run_to_end(model.chunks(PromptBatch([span], [0] * tokens, outputs=1)))
    model.store.commit(span)
    model.choose(hidden, [greedy(model.config.vocab_size)]).wait()
