"""`python -m polarlm.bench.gpu.profiled FILE`: kernels of a step, one by one, for a profiler such as NVIDIA's ncu.

Products with every matrix of an 8B model, attention and sampling are launched once each, after a first time that is not
profiled. FILE gets a line of JSON for each launch, in their order: its part, the weights, the rows, and the kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from polarlm.bench.gpu.weights import KINDS

from polarlm.bench.gpu.cache import Content, StoredSequence
from polarlm.bench.gpu.model import RandomModel
from polarlm.bench.gpu.setup import Gpu, Sizes, open_gpu
from polarlm.bench.gpu.steps import default_input
from polarlm.engine.cli.commands import command

_ROWS = (1, 16)
_LAYERS = 2  # of Q4_K_M both kinds: with larger types, and without


@dataclass(frozen=True)
class Profiled:
    """A launch. part: such as "down (q6_k)". weights: one of KINDS, or "any" for parts without weights."""

    part: str
    weights: str
    rows: int
    kernel: str


def launches(gpu: Gpu, sizes: Sizes, profile: Callable[[Callable[[], object]], object]) -> Iterator[Profiled]:
    """Yields every launch after it has been profiled. profile: calls its argument. Raises EngineError for too little
    memory."""
    layer = sizes.config.layers[0]
    sizes = replace(sizes, config=replace(sizes.config, layers=(layer,) * _LAYERS))
    attention = sizes.config.attention
    content = Content.random(sizes.blocks, sizes.block_size, attention.kv_heads, attention.head_dim)
    context = min(sizes.step_contexts)
    for weights in KINDS:
        gpu.clock.free()
        random = RandomModel(gpu, sizes, content, weights, [(context,) * rows for rows in _ROWS])
        for rows in _ROWS:
            works = [(part, weights, work) for part, work in _products(random, rows).items()]
            if weights == KINDS[0]:
                works.append(("attention", "any", _attention(random, context, rows)))
                works.append(("sampling", "any", _sampling(random, rows)))
            for part, kind, work in works:
                work()
                names: list[str] = []
                with mock.patch.object(random.device, "launch", partial(_noted, names, random.device.launch)):
                    profile(work)
                yield from (Profiled(part, kind, rows, name.removesuffix("_kernel")) for name in names)


def _noted(names: list[str], launch: Callable[..., None], kernel: str, *given: Any, **more: Any) -> None:
    names.append(kernel)
    launch(kernel, *given, **more)


def _products(random: RandomModel, rows: int) -> dict[str, Callable[[], object]]:
    """Of each matrix in each of its formats."""
    found: dict[str, Callable[[], object]] = {}
    weights = random.model.weights
    matrices = [(name, matrix) for layer in weights.layers for name, matrix in layer.matrices.items()]
    for name, matrix in (*matrices, ("head", weights.head)):
        x = np.random.default_rng(4).standard_normal((rows, matrix.shape[1]), np.float32)
        formats = ", ".join(dict.fromkeys(part.format.name for part in matrix.parts))
        found[f"{name} ({formats})"] = partial(random.ops.linear, random.ops.to_device(x), matrix, recorded=True)
    return found


def _attention(random: RandomModel, context: int, rows: int) -> Callable[[], object]:
    ops, cache, attention = random.ops, random.model.store.cache(0), random.config.attention
    n = cache.format.block_size
    blocks = (context - 1) // n - 1
    tables = [[*range(row * blocks, (row + 1) * blocks)] for row in range(rows)]
    places = [StoredSequence(context, 2 * row, table, 2 * row + 1) for row, table in enumerate(tables)]
    spans = ops.spans([place.span(row, n) for row, place in enumerate(places)], n)
    shape = rows, attention.heads, attention.head_dim
    q = ops.to_device(np.random.default_rng(2).standard_normal(shape, np.float32))
    return partial(ops.attention, q, cache, spans, attention.head_dim**-0.5, None)


def _sampling(random: RandomModel, rows: int) -> Callable[[], object]:
    ops = random.ops
    logits = ops.to_device(np.random.default_rng(6).standard_normal((rows, random.config.vocab_size), np.float32))
    return partial(ops.sample, logits, ops.pack_sampler_inputs([default_input(random.model)] * rows))


def _by_profiler(work: Callable[[], object]) -> None:
    import cupy

    runtime = cupy.cuda.runtime
    runtime.deviceSynchronize()
    runtime.profilerStart()
    work()
    runtime.deviceSynchronize()
    runtime.profilerStop()


@command
def main(argv: Sequence[str]) -> None:
    """Writes the lines."""
    about = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(prog="python -m polarlm.bench.gpu.profiled", description=about)
    parser.add_argument("file", type=Path, metavar="FILE", help="where the lines go")
    with parser.parse_args(argv).file.open("w", encoding="utf-8") as file:
        for launch in launches(open_gpu(), Sizes(), _by_profiler):
            print(json.dumps(asdict(launch)), file=file, flush=True)


if __name__ == "__main__":
    sys.exit(main())
