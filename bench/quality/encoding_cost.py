"""What encoding costs with compiled kernels: the time of a block, and the instructions that read its codes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from polarlm.bench import report
from polarlm.bench.command import CacheType
from polarlm.bench.quality.reference import Reference
from polarlm.bench.quality.states import exact_states
from polarlm.engine.backends.kv import FilledBlocks
from polarlm.engine.backends.ops import Ops

LEAST, _MOST = 192, 512  # tokens of the prompt whose blocks are encoded; the first block is not
_ROUNDS = 5


@dataclass(frozen=True)
class EncodingCost:
    """Instructions are those on vectors, each counted once."""

    type: str
    level: str  # the CPU level that kernels are compiled for
    microseconds: float  # of a thread, to encode keys and values of a block of one KV head: the median of the rounds
    keys: int  # instructions of the loop over codes of keys, for the query heads of a KV head together
    values: int  # of that over codes of values
    kernel: int  # of attention as a whole, which reads means, too


class _Timed:
    """Encodes by `encode`, and keeps the time and what it was for."""

    def __init__(self, encode: Callable[[Sequence[FilledBlocks]], None]) -> None:
        self._encode = encode
        self.seconds, self.blocks = 0.0, 0
        self.cache: Any = None  # of the first layer

    def __call__(self, filled: Sequence[FilledBlocks]) -> None:
        started = time.thread_time()  # one thread encodes, that which asks; others' work is not counted
        self._encode(filled)
        self.seconds += time.thread_time() - started
        for one in filled:
            self.cache = self.cache or one.caches[0]
            self.blocks += len(one.blocks) * sum(cache.format.kv_heads for cache in one.caches)


def measure_costs(reference: Reference, types: Sequence[CacheType], ids: Sequence[int], ops: Ops) -> list[EncodingCost]:
    """What each type costs. ops: compiled kernels, which all layers have, with one thread. ids: of a text, `LEAST` at
    least."""
    ids, encode = ids[:_MOST], ops.encode_blocks
    timed: list[list[_Timed]] = [[] for _ in types]
    with ExitStack() as opened:
        opened.callback(setattr, ops, "encode_blocks", encode)
        models = []
        for one in types:
            settings = {"ctx_size": len(ids), "kept_sequences": 0, **one.settings()}
            parts = reference.assemble(ops, encoding=one.encoding, **settings)
            opened.callback(parts.close)
            models.append(parts.model)
        for _ in range(1 + _ROUNDS):  # types in turn: the machine's other work affects all of them
            for model, runs in zip(models, timed, strict=True):
                runs.append(_Timed(encode))
                ops.encode_blocks = runs[-1]  # type: ignore[method-assign]
                exact_states(model, ids)
        heads = reference.model.config.attention.heads
        return [_cost(one.label, runs, heads) for one, runs in zip(types, timed, strict=True)]


def _cost(label: str, runs: Sequence[_Timed], heads: int) -> EncodingCost:
    """The first of the runs has compiled kernels. heads: of queries."""
    # All of these need llvmlite, as compiled kernels do.
    from polarlm.bench.kernel_loops import Loop, mix_kernel, scores_kernel, vector_instructions
    from polarlm.engine.backends.native.kernels.attention.steps import Attention, attend, query_tile_of
    from polarlm.engine.jit.compile.target import best

    cache, level = runs[0].cache, best()
    keys, values, format = cache.key_tiles, cache.value_tiles, cache.format
    size, dim, group = format.block_size, format.head_dim, heads // format.kv_heads
    together = query_tile_of(group, 1)
    attention = attend(Attention(keys, values, format.mean_bits, size, dim, group, together, is_capped=False))
    return EncodingCost(
        type=label,
        level=level.name,
        microseconds=median(1e6 * run.seconds / run.blocks for run in runs[1:]),
        keys=len(Loop(scores_kernel(keys, size, together), level)),
        values=len(Loop(mix_kernel(values, size, dim, together), level)),
        kernel=vector_instructions(attention, level),
    )


def format_costs(costs: Sequence[EncodingCost]) -> str:
    """A table; times are also relative to the first row's."""
    header = ["cache type", "encoding, µs", "relative", "keys", "values", "all of attention"]
    rows = [
        [
            one.type,
            f"{one.microseconds:.1f}",
            f"{one.microseconds / costs[0].microseconds:.2f}",
            *map(str, (one.keys, one.values, one.kernel)),
        ]
        for one in costs
    ]
    return report.table(header, rows)
