"""The warm-up: runs a conversation without values, so that its kernels are prepared before the weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence

from polarlm.engine.model.forward import Transformer
from polarlm.engine.sampling.sample import greedy
from polarlm.engine.state.plan import StorePlan, plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import RowAdapter, SequenceKV

_ROWS = 48  # rows of a prompt: kernels for many rows take 6, 4, 3 or 2 at a time, and all of these divide it
_MANY_ROWS = 96  # rows of a prompt: enough to be multiplied by a GPU's library


def least_plan(shape: CacheShape, most_rows: int) -> StorePlan:
    """Return the smallest store for a warm-up. most_rows: the most rows of `warm_up_rows`."""
    of_sequence = 2 * _ROWS + 1 + _many_rows(shape) + shape.block_size
    if shape.has_two_kinds:  # there is room for blocks with more bits
        of_sequence *= 2
    return plan_for_tokens(shape, of_sequence + 1 + most_rows, 1 + most_rows)


def _many_rows(shape: CacheShape) -> int:
    """Return the rows of a prompt that completes blocks."""
    return max(2 * shape.block_size, _MANY_ROWS)


def warm_up(model: Transformer, short: Sequence[int]) -> SequenceKV:
    """Run first prompts and a step, and return the sequence of the longest prompt and of the step.

    model: one with the ops of a `WarmUp`. short: rows of the other prompts.
    """
    sequence = model.store.new_sequence()
    _prompt(model, sequence, _ROWS)
    _step(model, sequence)
    for rows in short:
        other = model.store.new_sequence()
        _prompt(model, other, rows)
        model.store.release(other)
    return sequence


def warm_up_codes(model: Transformer, sequence: SequenceKV) -> None:
    """Run a prompt that completes blocks and one that reads them, after `warm_up`, and again once one is coded again.

    Recurrent layers have a kernel for a step that completes a block; for these one is run as well.
    """
    _prompt(model, sequence, _many_rows(model.store.shape))
    _prompt(model, sequence, _ROWS)
    if model.store.finer is not None:
        model.store.finer.code_again()
        _prompt(model, sequence, _ROWS)
    if not any(group.is_sparse for group in model.store.groups):
        return
    if more := -(sequence.length + 1) % model.store.shape.block_size:
        _prompt(model, sequence, more)
    _step(model, sequence)


def warm_up_rows(model: Transformer, rows: int, *, in_steps: bool) -> None:
    """Run a prompt of `rows` rows; with `in_steps`, run a step of `rows` sequences before it."""
    sequences = [model.store.new_sequence() for _ in range(rows if in_steps else 1)]
    if in_steps:
        spans = [model.store.open_step(sequence) for sequence in sequences]
        model.step(spans, [0] * rows, [greedy(model.config.vocab_size)] * rows)
        model.store.commit_steps(spans)
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
    """Run a step of one sequence with `rows` rows, as drafted tokens have."""
    sequence = model.store.new_sequence()
    rows = min(rows, model.store.rows_of_block(sequence))
    span = model.store.open_step(sequence, rows)
    model.step([span], [0] * rows, [greedy(model.config.vocab_size)] * rows)
    model.store.commit(span)
    model.store.release(sequence)


def _step(model: Transformer, sequence: SequenceKV) -> None:
    span = model.store.open_step(sequence)
    model.step([span], [0], [greedy(model.config.vocab_size)])
    model.store.commit(span)


def _prompt(model: Transformer, sequence: SequenceKV, tokens: int) -> None:
    span = model.store.open(sequence, tokens)
    hidden = model.forward([span], [0] * tokens, outputs=1)
    model.store.commit(span)
    model.choose(hidden, [greedy(model.config.vocab_size)])
