"""`python -m polarlm.bench.tiers`: time to the first token of a long prompt, computed or read from the disk.

An engine computes a prompt and keeps its blocks in a folder. Others read them, as after a restart: one in its first
request, which uses all kernels for the first time, and one in a later request. If other programs run, compare CPU time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polarlm.bench.command import HF_REPO_HELP, WEIGHTS_HELP, at_least, model_named
from polarlm.engine import Engine, EngineConfig, SamplingParams
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import parse
from polarlm.engine.config import setting
from polarlm.engine.state.plan import format_bytes

_FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
_ROOM = 64  # tokens of context after the prompt


@dataclass(frozen=True)
class Config:
    """The flags of the measurement."""

    weights: str | None = setting(None, "--weights", "-m", metavar="PATH", help=WEIGHTS_HELP)
    hf_repo: str | None = setting(None, "-hf", "--hf-repo", metavar="REPO", help=HF_REPO_HELP)
    tokens: int = setting(4096, "--tokens", metavar="N", help="tokens of the prompt")
    threads: int = setting(0, "-t", "--threads", metavar="N", help="CPU threads; 0 takes all")
    device: str = setting("auto", "--device", choices=("auto", "cpu", "cuda"), help="where the model runs")
    cache_type: str = setting("balanced", "--cache-type", metavar="TYPE", help="cache type")


@command
def main(argv: Sequence[str]) -> None:
    """Measures, and prints a line for each way to the first token."""
    (config,) = parse(
        argv,
        {"Measurement": Config},
        prog="python -m polarlm.bench.tiers",
        description="Time to the first token of a prompt that is computed, and of one that is read from the disk.",
        checks={"tokens": at_least(128)},
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = EngineConfig(
            weights=model_named(config.weights, config.hf_repo),
            device=config.device,
            threads=config.threads,
            cache_type=config.cache_type,
            ctx_size=config.tokens + _ROOM,
            cache_disk="64G",
            cache_disk_folder=folder,
        )
        with Engine.load(config=settings, verbose=note) as engine:
            vocabulary = engine.model.vocabulary
            rng = np.random.default_rng(0)
            ids, other = (rng.integers(vocabulary.start, vocabulary.stop, config.tokens).tolist() for _ in "ab")
            computed = _seconds(engine, ids, 0)
            ids.append(other[0])  # a next turn with a single new token to compute
            stored = _seconds(engine, ids, config.tokens)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        with Engine.load(config=settings) as engine:
            first = _seconds(engine, ids, config.tokens)
        with Engine.load(config=settings) as engine:
            _seconds(engine, other[: config.tokens // 8], 0)  # uses the kernels for the first time
            second = _seconds(engine, ids, config.tokens)
    print(f"{config.tokens:,} tokens; {format_bytes(size)} on the disk")
    for what, (seconds, busy) in (
        ("computed", computed),
        ("from the KV store", stored),
        ("from the disk, first request after a restart", first),
        ("from the disk, a later request", second),
    ):
        share = f"{100 * seconds / computed[0]:.1f} % of the time"
        print(f"{what}: {1000 * seconds:.0f} ms, {share}; {100 * busy / computed[1]:.1f} % of the CPU time")


def _seconds(engine: Engine, ids: Sequence[int], cached: int) -> tuple[float, float]:
    """The time to the first token, and the process's CPU time, for a prompt with `cached` tokens in a tier or the
    store."""
    began, busy = time.perf_counter(), time.process_time()
    found = engine.generate(ids, _FIRST_TOKEN).usage.cached_tokens
    seconds = time.perf_counter() - began, time.process_time() - busy
    if found != cached:
        raise SystemExit(f"{found} tokens were found instead of {cached}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
