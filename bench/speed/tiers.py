"""`polarlm speed --only tiers`: time to the first token of a long prompt, computed or read from the disk.

An engine computes a prompt and keeps its blocks in a folder. Others read them, as after a restart: one in its first
request, which uses all kernels for the first time, and one in a later request. If other programs run, compare CPU time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.command import cache_types, model_named
from polarlm.bench.speed.options import Options
from polarlm.engine import Engine, EngineConfig, EngineError, SamplingParams
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.state.plan import format_bytes

_FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
_LEAST = 128  # tokens of the prompt
_ROOM = 64  # tokens of context after the prompt


def measure(options: Options) -> dict[str, Any]:
    """The times to the first token of each way. Raises FlagError, EngineError or LoadError."""
    tokens = options.token_count()
    if tokens < _LEAST:
        raise FlagError(f"--tokens {tokens}: --only {options.only} takes prompts of at least {_LEAST} tokens")
    with tempfile.TemporaryDirectory() as folder:
        settings = EngineConfig(
            weights=model_named(options.weights, options.hf_repo),
            device=options.device,
            threads=options.thread_count(),
            ctx_size=tokens + _ROOM,
            cache_disk="64G",
            cache_disk_folder=folder,
            **cache_types(options.types)[0].settings(),
        )
        ways: dict[str, dict[str, float]] = {}
        with Engine.load(config=settings, verbose=note) as engine:
            name, vocabulary = engine.model.name, engine.model.vocabulary
            rng = np.random.default_rng(0)
            ids, other = (rng.integers(vocabulary.start, vocabulary.stop, tokens).tolist() for _ in "ab")
            ways["computed"] = _first_token(engine, ids, 0)
            ids.append(other[0])  # a next turn with a single new token to compute
            ways["from the KV store"] = _first_token(engine, ids, tokens)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        with Engine.load(config=settings) as engine:
            ways["from the disk, first request after a restart"] = _first_token(engine, ids, tokens)
        with Engine.load(config=settings) as engine:
            _first_token(engine, other[: tokens // 8], 0)  # uses the kernels for the first time
            ways["from the disk, a later request"] = _first_token(engine, ids, tokens)
    return {"model": name, "tokens": tokens, "disk_bytes": size, "ways": ways}


def _first_token(engine: Engine, ids: Sequence[int], cached: int) -> dict[str, float]:
    """Seconds of a first token, and CPU seconds. Raises EngineError if not `cached` tokens come from tier or store."""
    began, busy = time.perf_counter(), time.process_time()
    usage = engine.generate(ids, _FIRST_TOKEN).usage
    seconds = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - busy}
    if usage.cached_tokens != cached:
        raise EngineError(f"{usage.cached_tokens} tokens were found instead of {cached}")
    return seconds


def format_result(result: Mapping[str, Any]) -> str:
    """A line for each way to the first token."""
    lines = [f"{result['tokens']:,} tokens; {format_bytes(result['disk_bytes'])} on the disk"]
    computed = result["ways"]["computed"]
    for way, times in result["ways"].items():
        share, busy = (100 * times[name] / computed[name] for name in ("seconds", "cpu_seconds"))
        milliseconds = 1000 * times["seconds"]
        lines.append(f"{way}: {milliseconds:.0f} ms, {share:.1f} % of the time; {busy:.1f} % of the CPU time")
    return "\n".join(lines)
