"""`polarlm speed --only experts`: generation with fewer experts in memory than a model has, and the disk's share.

Each row is an engine with `--expert-cache` of that size. It answers prompts of random tokens, whose answers are sampled
at temperature 1, so that many experts are chosen. *File* is what a token read of experts; the last column is how many
tokens a second this would allow if reading took all the time. It is measured on the same file, in pieces of an expert's
size that the system does not have in memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.command import model_named, weight_files
from polarlm.bench.report import digest_of_model, table
from polarlm.bench.speed.options import Options
from polarlm.engine import Engine, EngineConfig, SamplingParams
from polarlm.engine.cli.commands import note
from polarlm.engine.loading.placement.experts import ExpertPlan
from polarlm.engine.state.plan import format_bytes

_ALL = "all"
_PROMPT = 8  # tokens
_PIECES, _TOGETHER = 256, 16  # that are read from the disk, and how many of them at a time
_MIB = 1 << 20
_MOST = "1000T"


def measure(options: Options) -> dict[str, Any]:
    """The rows of all sizes. Raises FlagError, EngineError or LoadError."""
    path = model_named(options.weights, options.hf_repo)
    rows = [_row(options, path, size.strip()) for size in options.expert_cache.split(",")]
    return {"model": rows[0]["model"], **digest_of_model(weight_files(path)), "rows": rows}


def _row(options: Options, path: str | None, size: str) -> dict[str, Any]:
    """Return the figures of one engine: its "model", the "bytes" of experts in memory and of the "whole", "rate" in
    tokens a second, the share of "hits", the bytes "read" for a token, and the "disk" in bytes a second, or None."""
    length = options.token_count()
    settings = EngineConfig(
        weights=path,
        device="cpu",
        threads=options.thread_count(),
        ctx_size=_PROMPT + length,
        parallel=1,
        kept_sequences=0,
        expert_cache={"": None, _ALL: _MOST}.get(size, size),
    )
    with Engine.load(config=settings, verbose=note) as engine:
        plan, rng = engine.expert_plan, np.random.default_rng(0)
        counts, seconds = [], 0.0
        for number in range(1 + options.repeat):  # the first answer does not count
            params = SamplingParams(
                max_tokens=length, temperature=1, top_k=0, top_p=1, min_p=0, seed=number, ignore_eos=True
            )
            prompt = rng.choice(len(engine.model.vocabulary), _PROMPT).tolist()
            usage = engine.generate(prompt, params).usage
            seconds += usage.generation_seconds if number else 0
            counts.append(engine.status().experts)
        row = {"model": engine.model.name, "rate": options.repeat * (length - 1) / seconds}
        first, last = counts[0], counts[-1]
        if isinstance(plan, ExpertPlan) and first is not None and last is not None:
            hits, misses, read = last.hits - first.hits, last.misses - first.misses, last.bytes - first.bytes
            file = max(engine.model.weights.files(), key=lambda path: path.stat().st_size)
            row |= {
                "bytes": plan.bytes,
                "whole": plan.whole,
                "hits": hits / (hits + misses),
                "read": read / (options.repeat * (_PROMPT + length - 1)),
                "disk": disk_rate(file, read // max(1, misses) or _MIB),
            }
        return row


def disk_rate(file: Path, piece: int) -> float | None:
    """Return the bytes a second at which pieces of a file are read that are not in memory; None where the system
    cannot be asked to forget them."""
    if not hasattr(os, "posix_fadvise"):
        return None
    with file.open("rb", buffering=0) as opened:
        handle = opened.fileno()
        places = np.random.default_rng(0).integers(0, max(1, file.stat().st_size - piece), _PIECES).tolist()
        for place in places:
            os.posix_fadvise(handle, place, piece, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        for first in range(0, _PIECES, _TOGETHER):
            for place in places[first : first + _TOGETHER]:
                os.posix_fadvise(handle, place, piece, os.POSIX_FADV_WILLNEED)
            for place in places[first : first + _TOGETHER]:
                os.pread(handle, piece, place)
        return _PIECES * piece / (time.perf_counter() - began)


def format_result(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    header = ["experts in memory", "of all", "tokens/s", "chosen ones in memory", "file, a token", "disk alone"]
    return table(header, [_cells(row) for row in result["rows"]])


def _cells(row: Mapping[str, Any]) -> list[str]:
    rate = f"{row['rate']:.1f}"
    if "hits" not in row:
        return [_ALL, "", rate, "", "", ""]
    disk = f"{row['disk'] / row['read']:.1f} tokens/s" if row["disk"] and row["read"] else ""
    sizes = [format_bytes(row["bytes"]), format_bytes(row["whole"])]
    return [*sizes, rate, f"{row['hits']:.0%}", format_bytes(row["read"]), disk]
