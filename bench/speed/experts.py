"""`polarlm speed --only experts`: generation with fewer experts in memory than a model has, and the disk's share.

Each row is an engine with `--expert-cache` of that size. It answers prompts of random tokens, whose answers are sampled
at temperature 1, so that many experts are chosen. *File* is what a token read of experts; the last column is how many
tokens a second this would allow if reading took all the time. It is measured on the same file, in pieces of an expert's
size that the system does not have in memory.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from polarlm.bench.command import model_named, weight_files
from polarlm.bench.report import Column, Table, size_text
from polarlm.bench.result import Figures, Result, digest_of_model, value_of
from polarlm.bench.speed.contestants import OURS, RATE
from polarlm.bench.speed.options import Options
from polarlm.engine import Engine, EngineConfig, SamplingParams
from polarlm.engine.cli.commands import note
from polarlm.engine.loading.placement.experts import ExpertPlan

_ALL = "all"
_PROMPT = 8  # tokens
_PIECES, _TOGETHER = 256, 16  # that are read from the disk, and how many of them at a time
_MIB = 1 << 20
_MOST = "1000T"


def measure(options: Options) -> Result:
    """The rows of all sizes. Raises FlagError, EngineError or LoadError."""
    path = model_named(options.weights, options.hf_repo)
    result = Result(digest_of_model(weight_files(path)))
    for size in options.expert_cache.split(","):
        result.about["model"] = _add(result, options, path, size.strip())
    return result


def _add(result: Result, options: Options, path: str | None, size: str) -> str:
    """Add the figures of one engine: the "bytes" of experts in memory and of the "whole", "tokens/s", the share of
    "hits", the bytes "read" for a token, and the "disk" in bytes a second. Returns the model's name."""
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
        subject = f"--expert-cache {size}".rstrip()
        result.add(subject, OURS, RATE, value=options.repeat * (length - 1) / seconds)
        first, last = counts[0], counts[-1]
        if isinstance(plan, ExpertPlan) and first is not None and last is not None:
            hits, misses, read = last.hits - first.hits, last.misses - first.misses, last.bytes - first.bytes
            file = max(engine.model.weights.files(), key=lambda path: path.stat().st_size)
            per_token = read / (options.repeat * (_PROMPT + length - 1))
            figures = {"bytes": plan.bytes, "whole": plan.whole, "hits": hits / (hits + misses), "read": per_token}
            disk = disk_rate(file, read // max(1, misses) or _MIB)
            result.add_all(subject, OURS, {**figures, "disk": disk})
        return str(engine.model.name)


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


def _disk(figures: Figures) -> str:
    disk, read = (value_of(figures, name) for name in ("disk", "read"))
    return f"{disk / read:.1f} tokens/s" if disk and read else ""


_COLUMNS = (
    Column(
        "experts in memory",
        lambda figures: size_text(size) if (size := value_of(figures, "bytes")) else _ALL,
    ),
    Column.of("of all", "whole", size_text),
    Column.of("tokens/s", RATE, "{:.1f}".format),
    Column.of("chosen ones in memory", "hits", "{:.0%}".format),
    Column.of("file, a token", "read", size_text),
    Column("disk alone", _disk),
)


def table_of(result: Result) -> Table:
    return Table.of("flag", _COLUMNS, ((subject, figures) for subject, _, figures in result.parts()))
