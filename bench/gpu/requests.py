"""What a model's requests take on a GPU, beside llama.cpp's programs: prompts with and without the host, generation,
many sequences at the same time, a server."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.gpu.setup import Gpu, Sizes
from polarlm.bench.result import Output
from polarlm.bench.serving.options import LoadOptions, Options
from polarlm.bench.speed.contestants import OURS
from polarlm.bench.speed.ours import Ours
from polarlm.engine.errors import EngineError

LLAMA_CPP = "llama.cpp"
PROMPT, GENERATION = "prompt", "generation"
_ON_GPU = "-ngl", "99", "-fa", "1"  # llama.cpp's layers, and its flash attention


@dataclass(frozen=True)
class PromptTime:
    """Seconds of a prompt up to its first token; device: if all is launched before the device begins."""

    cache_type: str
    tokens: int
    seconds: float
    device: float


@dataclass(frozen=True)
class Rate:
    """Tokens per second of each run: of a PROMPT of so many tokens, or of GENERATION after them.

    engine: OURS or LLAMA_CPP.
    """

    engine: str
    cache_type: str
    kind: str
    tokens: int
    runs: list[float]


@dataclass(frozen=True)
class SequencesTime:
    """Seconds of `sequences` prompts that are asked at the same time: until all have their first token, until all have
    ended, and the median of a step of all; None if they did not run together. prompt, answer: tokens of each."""

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


class LoadedModel:
    """A model on the GPU with a KV store for each cache type that it is asked for."""

    def __init__(self, path: str | None, sizes: Sizes, types: CacheType) -> None:
        """path: None for the demonstration model. Raises EngineError."""
        self._sizes, most = sizes, max(sizes.sequences)
        context = max(*sizes.prompts, *sizes.depths, most * (sum(sizes.asked) + 4 * most)) + 2 * sizes.steps
        settings = {"device": "cuda", "parallel": most, "kept_sequences": most, **types.settings()}
        self._first = Ours(path, context, 0, settings)
        self._by_type = {types: self._first}
        self._rng = np.random.default_rng(0)

    def _use(self, types: CacheType) -> Ours:
        if types not in self._by_type:
            self._by_type[types] = self._first.with_settings(types.settings())
        return self._by_type[types]

    def close(self) -> None:
        """Free the memory."""
        self._first.close()
        del self._first, self._by_type

    def _ids(self, count: int) -> list[int]:
        return self._rng.integers(self._first.vocabulary.start, self._first.vocabulary.stop, count).tolist()

    def prompt(self, gpu: Gpu, types: CacheType, tokens: int) -> PromptTime:
        """The times of prompts of `tokens` tokens. Raises EngineError."""
        ours, ids, runs = self._use(types), self._ids(tokens), self._sizes.runs
        device = gpu.clock.held(lambda: ours.prompt_rate(ids), runs)
        rate = statistics.median(ours.prompt_rate(ids) for _ in range(runs))
        return PromptTime(types.label, tokens, tokens / rate, device)

    def generation(self, types: CacheType, depth: int) -> Rate:
        """The rates of steps after `depth` tokens. Raises EngineError."""
        ours, ids, following = self._use(types), self._ids(depth), self._ids(self._sizes.steps + 1)
        _, *runs = [ours.generation_rate(ids, following) for _ in range(1 + self._sizes.runs)]  # the first compiles
        return Rate(OURS, types.label, GENERATION, depth, runs)

    def sequences(self, types: CacheType, count: int) -> SequencesTime:
        """The times of `count` sequences: of whole answers, then of longer ones, whose prompts are not computed again.

        Raises EngineError.
        """
        ours, (prompt, answer) = self._use(types), self._sizes.asked
        prompts = [self._ids(prompt) for _ in range(count)]
        ours.together([self._ids(prompt) for _ in range(count)], answer)  # compiles, and records steps
        whole = ours.together(prompts, answer)
        steps = ours.together(prompts, answer + 4 * count, True)["steps"]  # long enough for all to run together
        step = statistics.median(steps) if steps else None
        return SequencesTime(OURS, types.label, count, prompt, answer, whole["first"], whole["seconds"], step)


def serve(path: str | None, sizes: Sizes) -> ServerTimes:
    """A server of the model under load (`bench.serving`), which it starts. Raises EngineError."""
    from polarlm.bench.serving.load import run  # needs httpx

    prompt, answer = sizes.of_client
    load = LoadOptions(
        sizes.clients,
        rate=500,
        requests=3 * sizes.clients,
        prompt_tokens=prompt,
        shared_prefix=0,
        warm_up=sizes.clients,
    )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "serving.json"
        run(Options(max_tokens=answer), load, path, Output(str(output)), [])
        measured = json.loads(output.read_text(encoding="utf-8"))

    def at(name: str) -> tuple[float, float]:
        percentiles = measured["latencies"][f"{name}_seconds"]["percentiles"]
        return percentiles[50], percentiles[95]

    rate = measured["tokens_per_second"]
    return ServerTimes(sizes.clients, prompt, answer, rate, at("first_token"), at("between_tokens"))


# -- llama.cpp's programs, whose tokens are random, too; nothing is sampled ----------------------------------------


def llama_bench(program: Path, path: str, sizes: Sizes, seconds: float) -> Iterator[Rate]:
    """The same prompts and steps by `llama-bench`. Raises EngineError."""
    prompts, depths = (",".join(map(str, counts)) for counts in (sizes.prompts, sizes.depths))
    for flags in (("-p", prompts, "-n", "0"), ("-p", "0", "-n", str(sizes.steps), "-d", depths)):
        printed = _printed([str(program), "-m", path, *_ON_GPU, "-r", "3", "-o", "json", *flags], seconds)
        for row in json.loads(printed):
            kind, tokens = (PROMPT, row["n_prompt"]) if row["n_prompt"] else (GENERATION, row["n_depth"])
            yield Rate(LLAMA_CPP, "f16", kind, tokens, row["samples_ts"])


def batched_bench(program: Path, path: str, sizes: Sizes, seconds: float) -> Iterator[SequencesTime]:
    """The same sequences by `llama-batched-bench`. Raises EngineError."""
    prompt, answer = sizes.asked
    counts, context = ",".join(map(str, sizes.sequences)), max(sizes.sequences) * (prompt + answer)
    flags = ["-c", str(context), "-npp", str(prompt), "-ntg", str(answer), "-npl", counts, "--output-format", "jsonl"]
    for line in _printed([str(program), "-m", path, *_ON_GPU, *flags], seconds).splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            first, steps = row["t_pp"], row["t_tg"]
            tokens = row["pp"], row["tg"]
            yield SequencesTime(LLAMA_CPP, "f16", row["pl"], *tokens, first, first + steps, steps / row["tg"])


def _printed(command: Sequence[str], seconds: float) -> str:
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"{command[0]} has no figures: {error}") from None
