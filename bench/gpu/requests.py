"""What a model's requests take on a GPU: prompts with and without the host, and many sequences at the same time."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.gpu.setup import Gpu, Sizes
from polarlm.bench.speed.contestants import OURS
from polarlm.bench.speed.ours import Ours
from polarlm.engine.errors import EngineError

LLAMA_CPP = "llama.cpp"


@dataclass(frozen=True)
class PromptTime:
    """Seconds of a prompt up to its first token; device: if all is launched before the device begins."""

    cache_type: str
    tokens: int
    seconds: float
    device: float


@dataclass(frozen=True)
class SequencesTime:
    """Seconds of `sequences` prompts that are asked at the same time: until all have their first token, until all have
    ended, and the median of a step of all; None if they did not run together.

    engine: OURS or LLAMA_CPP. prompt, answer: tokens of each.
    """

    engine: str
    cache_type: str
    sequences: int
    prompt: int
    answer: int
    first: float
    seconds: float
    step: float | None


@dataclass(frozen=True)
class ServerTimes:
    """A server under load: tokens of answers a second; the seconds to the first token and between two, each in the
    median and at 95 %. prompt, answer: tokens of each."""

    clients: int
    prompt: int
    answer: int
    tokens_per_second: float
    first_token: tuple[float, float]
    between_tokens: tuple[float, float]


def server_times(measured: Mapping[str, Any]) -> ServerTimes:
    """What a measurement of `bench.serving` says."""

    def at(name: str) -> tuple[float, float]:
        percentiles = measured["latencies"][f"{name}_seconds"]["percentiles"]
        return percentiles[50], percentiles[95]

    load = measured["load"]
    return ServerTimes(
        *(load["clients"], load["prompt_tokens"], load["max_tokens"], measured["tokens_per_second"]),
        *(at("first_token"), at("between_tokens")),
    )


class Asked:
    """A model on the GPU with a cache type at a time."""

    def __init__(self, path: str | None, sizes: Sizes, types: CacheType) -> None:
        """Raises EngineError."""
        self._sizes, most = sizes, max(sizes.sequences)
        self._answer = sizes.asked[1] + 2 * most  # tokens with which all run together for a while
        context = max(max(sizes.prompts) + sizes.asked[1], most * (sizes.asked[0] + self._answer))
        settings = {"device": "cuda", "parallel": most, "kept_sequences": most, **types.settings()}
        self._ours, self._type = Ours(path, context, 0, settings), types
        self._rng = np.random.default_rng(0)
        self.about: dict[str, Any] = self._ours.about()

    def use(self, types: CacheType) -> None:
        """Have a cache of another type. Raises EngineError."""
        if types != self._type:
            self._ours, self._type = self._ours.with_settings(types.settings()), types

    def close(self) -> None:
        """Free the memory."""
        self._ours.close()
        del self._ours

    def _ids(self, count: int) -> list[int]:
        return self._rng.integers(self._ours.vocabulary.start, self._ours.vocabulary.stop, count).tolist()

    def prompt(self, gpu: Gpu, types: CacheType, tokens: int) -> PromptTime:
        """The times of prompts of `tokens` tokens. Raises EngineError."""
        self.use(types)
        ids, runs = self._ids(tokens), self._sizes.runs
        device = gpu.clock.held(lambda: self._ours.prompt_rate(ids), runs)
        seconds = statistics.median(tokens / self._ours.prompt_rate(ids) for _ in range(runs))
        return PromptTime(types.label, tokens, seconds, device)

    def sequences(self, types: CacheType, count: int) -> SequencesTime:
        """The times of `count` sequences: of whole answers, then of longer ones, whose prompts are not computed again.

        Raises EngineError.
        """
        self.use(types)
        prompt, answer = self._sizes.asked
        prompts = [self._ids(prompt) for _ in range(count)]
        self._ours.together([self._ids(prompt) for _ in range(count)], 2)  # compiles
        whole = self._ours.together(prompts, answer)
        steps = self._ours.together(prompts, answer + 2 * count, cached=True)["steps"]
        step = statistics.median(steps) if steps else None
        return SequencesTime(OURS, types.label, count, prompt, answer, whole["first"], whole["seconds"], step)


def batched_bench(program: str, path: str, sizes: Sizes, timeout: float) -> Sequence[SequencesTime]:
    """The same by llama.cpp's `llama-batched-bench`, whose prompts are random, too; nothing is sampled.

    Raises EngineError.
    """
    prompt, answer = sizes.asked
    context = max(sizes.sequences) * (prompt + answer)
    command = [program, "-m", path, "-c", str(context), "-npp", str(prompt), "-ntg", str(answer)]
    command += ["-npl", ",".join(map(str, sizes.sequences)), "-ngl", "99", "-fa", "1", "--output-format", "jsonl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"{program} has no figures: {error}") from None
    return list(_rows(done.stdout))


def _rows(printed: str) -> Iterator[SequencesTime]:
    for line in printed.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            first, steps = row["t_pp"], row["t_tg"]
            yield SequencesTime(
                LLAMA_CPP, "f16", row["pl"], row["pp"], row["tg"], first, first + steps, steps / row["tg"]
            )
