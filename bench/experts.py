"""`python -m polarlm.bench.experts`: generation with fewer experts in memory than a model has, and the disk's share.

Each row is an engine with `--expert-cache` of that size. It answers prompts of random tokens, whose answers are sampled
at temperature 1, so that many experts are chosen. *File* is what a token read of experts; the last column is how many
tokens a second this would allow if reading took all the time. It is measured on the same file, in pieces of an expert's
size that the system does not have in memory.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench import report
from polarlm.bench.command import HF_REPO_HELP, WEIGHTS_HELP, at_least, model_named
from polarlm.bench.report import Output, table
from polarlm.engine import Engine, EngineConfig, SamplingParams
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import parse
from polarlm.engine.config import setting
from polarlm.engine.loading.placement.experts import ExpertPlan
from polarlm.engine.state.plan import format_bytes

_ALL = "all"
_PROMPT = 8  # tokens
_PIECES, _TOGETHER = 256, 16  # that are read from the disk, and how many of them at a time
_MIB = 1 << 20
_MOST = "1000T"


@dataclass(frozen=True)
class Config:
    """The flags of the measurement."""

    weights: str | None = setting(None, "--weights", "-m", metavar="PATH", help=WEIGHTS_HELP)
    hf_repo: str | None = setting(None, "-hf", "--hf-repo", metavar="REPO", help=HF_REPO_HELP)
    expert_cache: str = setting(
        "",
        "--expert-cache",
        metavar="SIZE[,SIZE]",
        help="sizes to measure; without it, what memory leaves. all: every expert in memory",
    )
    tokens: int = setting(64, "--tokens", metavar="N", help="tokens of an answer")
    repeat: int = setting(3, "--repeat", metavar="N", help="answers; the first does not count")
    threads: int = setting(0, "-t", "--threads", metavar="N", help="CPU threads; 0 takes all")


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes the JSON, prints the table."""
    config, output = parse(
        argv,
        {"Measurement": Config, "Output": Output},
        prog="python -m polarlm.bench.experts",
        description="Generation with fewer experts in memory than a model has, beside what the disk allows.",
        checks={"tokens": at_least(2), "repeat": at_least(2)},
    )
    path = model_named(config.weights, config.hf_repo)
    found = [_row(config, path, size.strip()) for size in config.expert_cache.split(",")]
    result = {"model": found[0]["model"], "rows": found}
    written = output.path("experts", str(result["model"]))
    report.write(written, "experts", argv, result)
    note(f"Written to {written}")
    header = ["experts in memory", "of all", "tokens/s", "chosen ones in memory", "file, a token", "disk alone"]
    print(table(header, [_cells(row) for row in found]))


def _row(config: Config, path: str | None, size: str) -> dict[str, Any]:
    """Return the figures of one engine: its "model", the "bytes" of experts in memory and of the "whole", "rate" in
    tokens a second, the share of "hits", the bytes "read" for a token, and the "disk" in bytes a second, or None."""
    settings = EngineConfig(
        weights=path,
        device="cpu",
        threads=config.threads,
        ctx_size=_PROMPT + config.tokens,
        parallel=1,
        kept_sequences=0,
        expert_cache={"": None, _ALL: _MOST}.get(size, size),
    )
    with Engine.load(config=settings, verbose=note) as engine:
        plan, rng = engine.expert_plan, np.random.default_rng(0)
        reads, steps, seconds = [engine.status().experts], 0, 0.0
        for number in range(config.repeat):
            params = SamplingParams(
                max_tokens=config.tokens, temperature=1, top_k=0, top_p=1, min_p=0, seed=number, ignore_eos=True
            )
            prompt = rng.choice(len(engine.model.vocabulary), _PROMPT).tolist()
            usage = engine.generate(prompt, params).usage
            if number:
                steps, seconds = steps + config.tokens - 1, seconds + usage.generation_seconds
            reads.append(engine.status().experts)
        found: dict[str, Any] = {"model": engine.model.name, "rate": steps / seconds}
        first, last = reads[1], reads[-1]
        if isinstance(plan, ExpertPlan) and first is not None and last is not None:
            hits, misses = last.hits - first.hits, last.misses - first.misses
            tokens = (config.repeat - 1) * (_PROMPT + config.tokens - 1)
            file = max(engine.model.weights.files(), key=lambda one: one.stat().st_size)
            found |= {
                "bytes": plan.bytes,
                "whole": plan.whole,
                "hits": hits / (hits + misses),
                "read": (last.bytes - first.bytes) / tokens,
                "disk": disk_rate(file, (last.bytes - first.bytes) // max(1, misses) or _MIB),
            }
        return found


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


def _cells(row: Mapping[str, Any]) -> list[str]:
    rate = f"{row['rate']:.1f}"
    if "hits" not in row:
        return [_ALL, "", rate, "", "", ""]
    disk = f"{row['disk'] / row['read']:.1f} tokens/s" if row["disk"] and row["read"] else ""
    sizes = [format_bytes(row["bytes"]), format_bytes(row["whole"])]
    return [*sizes, rate, f"{row['hits']:.0%}", format_bytes(row["read"]), disk]


if __name__ == "__main__":
    sys.exit(main())
