"""The cost of a CPU's compiled kernels in quality: packed weights, queries rounded to bytes, codes read in place.

Half of a window is a prompt, and each of the other tokens is a step, as in the engine. The divergence of steps is
measured from float32 in full precision and from float32 with the same cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from polarlm.bench import report
from polarlm.bench.command import CacheType
from polarlm.bench.quality.divergence import Divergence, compare
from polarlm.bench.quality.reference import Reference
from polarlm.bench.quality.scores import small
from polarlm.engine import SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import select
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.model.forward import Transformer
from polarlm.engine.sampling.sample import SamplerInput, resolve
from polarlm.engine.state.store import SequenceKV
from polarlm.model_loaders.config import GenerationDefaults


@dataclass(frozen=True)
class ArithmeticRow:
    """Mean figures of the steps of all windows. KL in nats."""

    type: str
    kl_float32: float  # float32 with this cache, from float32 in full precision
    kl_compiled: float  # compiled kernels with this cache, from float32 in full precision
    kl_between: float  # compiled kernels from float32, both with this cache
    same_top1: float  # share of steps in which compiled kernels and float32 with this cache agree


def measure_arithmetic(
    reference: Reference,
    types: Sequence[CacheType],
    cut: Sequence[Sequence[int]],
    on_progress: Callable[[ArithmeticRow], None] = lambda row: None,
) -> list[ArithmeticRow]:
    """A row for each type, over the windows `cut` (ids with BOS); on_progress is called with each new row.

    Raises EngineError, and FlagError if kernels cannot be compiled.
    """
    rows: list[ArithmeticRow] = []
    with tqdm(total=len(types) * len(cut), desc="Scoring", unit="window", disable=None) as bar:
        for cache_type in types:
            bar.set_postfix_str(cache_type.label)
            found: list[tuple[Divergence, ...]] = []
            settings = {"ctx_size": max(map(len, cut)), "kept_sequences": 0, **cache_type.settings()}
            plain = reference.assemble(NumpyOps(), **settings)
            compiled = reference.assemble(compiled_ops(), **settings)
            try:
                for ids in cut:  # at least two tokens each
                    prompt = len(ids) // 2
                    exact = reference.score(ids).logits[prompt:-1]
                    wide = chunk_logits(plain.model, ids, prompt)[:-1]
                    ours = step_logits(compiled.model, ids, prompt)[:-1]
                    found.append((compare(exact, wide), compare(exact, ours), compare(wide, ours)))
                    bar.update()
            finally:
                plain.close()
                compiled.close()
            plain_kl, compiled_kl, between_kl = ([one.kl for one in column] for column in zip(*found, strict=True))
            rows.append(
                ArithmeticRow(
                    type=cache_type.label,
                    kl_float32=_mean(plain_kl),
                    kl_compiled=_mean(compiled_kl),
                    kl_between=_mean(between_kl),
                    same_top1=_mean([one.same_top1 for _, _, one in found]),
                )
            )
            on_progress(rows[-1])
    return rows


def _mean(windows: Sequence[np.ndarray]) -> float:
    return float(np.concatenate(windows).mean())


def compiled_ops() -> Ops:
    """The compiled kernels of this CPU. Raises FlagError without them."""
    ops, note = select("cpu", 0, compiled=True)
    if isinstance(ops, NumpyOps):
        raise FlagError(f"--arithmetic measures compiled kernels. {note}")
    return ops


def step_logits(model: Transformer, ids: Sequence[int], prompt: int) -> np.ndarray:
    """Logits (T − prompt, V) of steps, one for each of `ids` (T,) after the first `prompt`, which are prefilled."""
    kept: list[np.ndarray] = []
    greedy = resolve(SamplingParams(temperature=0), GenerationDefaults())
    sampler_input = SamplerInput(greedy, (), 0.0, model.config.vocab_size)

    def keep(chosen: Any, logits: Any, sampler_inputs: Any) -> list[Any]:
        kept.append(model.ops.to_host(logits).copy())
        return []

    fetch, model.ops.fetch_tokens = model.ops.fetch_tokens, keep  # type: ignore[method-assign]
    sequence = _prefilled(model, ids[:prompt])
    try:
        for id in ids[prompt:]:
            span = model.store.open_step(sequence)
            model.step([span], [id], [sampler_input])
            model.store.commit(span)
    finally:
        model.store.release(sequence)
        model.ops.fetch_tokens = fetch  # type: ignore[method-assign]
    return np.concatenate(kept)


def chunk_logits(model: Transformer, ids: Sequence[int], prompt: int) -> np.ndarray:
    """As `step_logits`, but with the rows of a block at once; they read the same keys and values."""
    size, kept = model.store.shape.block_size, []
    sequence = _prefilled(model, ids[:prompt])
    start = prompt
    while start < len(ids):
        chunk = ids[start : (start // size + 1) * size]
        span = model.store.open(sequence, len(chunk), as_steps=True)
        kept.append(model.logits(model.forward([span], chunk)))
        model.store.commit(span)
        start += len(chunk)
    model.store.release(sequence)
    return np.concatenate(kept)


def _prefilled(model: Transformer, ids: Sequence[int]) -> SequenceKV:
    """A sequence whose prompt `ids` is prefilled."""
    sequence = model.store.new_sequence()
    span = model.store.open(sequence, len(ids))
    model.forward([span], ids)
    model.store.commit(span)
    return sequence


def one_arithmetic_line(row: ArithmeticRow) -> str:
    """A row as a line of text."""
    return f"{row.type}: KL {small(row.kl_float32)} in float32, {small(row.kl_compiled)} with compiled kernels"


def format_arithmetic_table(rows: Sequence[ArithmeticRow]) -> str:
    """A table of all figures."""
    header = ["cache type", "KL in float32", "KL compiled", "KL compiled from float32", "same top-1"]
    return report.table(
        header,
        [
            (
                row.type,
                small(row.kl_float32),
                small(row.kl_compiled),
                small(row.kl_between),
                f"{100 * row.same_top1:.1f} %",
            )
            for row in rows
        ],
    )
