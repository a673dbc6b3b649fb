"""What a model's requests take on a GPU, beside llama.cpp's programs: prompts with and without the host, generation,
many sequences at the same time, a server."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.gpu.setup import Gpu, Sizes
from polarlm.bench.result import Output, Result, read
from polarlm.bench.serving.options import BETWEEN_TOKENS, FIRST_TOKEN, LoadOptions, Options
from polarlm.bench.speed.contestants import GENERATION, OURS, PROMPT, RATE
from polarlm.bench.speed.ours import Ours
from polarlm.engine.errors import EngineError

LLAMA_CPP = "llama.cpp"
SEQUENCES, SERVER = "sequences", "server"  # subjects; the first with their number before it
_ON_GPU = "-ngl", "99", "-fa", "1"  # llama.cpp's layers, and its flash attention


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

    def prompt(self, result: Result, gpu: Gpu, types: CacheType, tokens: int) -> None:
        """Add the rate of prompts of `tokens` tokens, their seconds up to the first token, and those on the device if
        all is launched before it begins. Raises EngineError."""
        ours, ids, runs = self._use(types), self._ids(tokens), self._sizes.runs
        device = gpu.clock.held(lambda: ours.prompt_rate(ids), runs)
        rates = [ours.prompt_rate(ids) for _ in range(runs)]
        add_rate(result, OURS, types.label, PROMPT, tokens, rates)
        times = {"seconds": tokens / statistics.median(rates), "device": device}
        result.add_all(subject_of(PROMPT, tokens), f"{OURS} {types.label}", times, tokens=tokens)

    def generation(self, result: Result, types: CacheType, depth: int) -> None:
        """Add the rates of steps after `depth` tokens. Raises EngineError."""
        ours, ids, following = self._use(types), self._ids(depth), self._ids(self._sizes.steps + 1)
        _, *runs = [ours.generation_rate(ids, following) for _ in range(1 + self._sizes.runs)]  # the first compiles
        add_rate(result, OURS, types.label, GENERATION, depth, runs)

    def sequences(self, result: Result, types: CacheType, count: int) -> None:
        """Add the times of `count` sequences that are asked at the same time: of whole answers, then of longer ones,
        whose prompts are not computed again. Raises EngineError."""
        ours, (prompt, answer) = self._use(types), self._sizes.asked
        prompts = [self._ids(prompt) for _ in range(count)]
        ours.together([self._ids(prompt) for _ in range(count)], answer)  # compiles, and records steps
        whole = ours.together(prompts, answer)
        steps = ours.together(prompts, answer + 4 * count, True)["steps"]  # long enough for all to run together
        step = statistics.median(steps) if steps else None
        _add_sequences(result, f"{OURS} {types.label}", (count, prompt, answer), whole["first"], whole["seconds"], step)


def subject_of(kind: str, tokens: int) -> str:
    return f"{kind} {'at' if kind == GENERATION else 'of'} {tokens:,}"


def add_rate(result: Result, engine: str, cache: str, kind: str, tokens: int, runs: Sequence[float]) -> None:
    """Add tokens/s of a PROMPT of so many tokens, or of GENERATION after them. engine: OURS or LLAMA_CPP."""
    result.add(subject_of(kind, tokens), f"{engine} {cache}", RATE, runs, section=kind, tokens=tokens)


def _add_sequences(
    result: Result, who: str, sizes: tuple[int, int, int], first: float, seconds: float, step: float | None
) -> None:
    """Add the seconds until all sequences have their first token, until all have ended, and of a step of all; None if
    they did not run together. sizes: their number, and tokens of each prompt and answer."""
    more: dict[str, Any] = dict(zip(("sequences", "prompt", "answer"), sizes, strict=True))
    result.add_all(f"{sizes[0]} {SEQUENCES}", who, {"first": first, "seconds": seconds, "step": step}, **more)


def serve(result: Result, path: str | None, sizes: Sizes) -> None:
    """Add what `bench.serving` measures of a server of the model under load. Raises EngineError."""
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
        for row in read(output).rows(RATE, FIRST_TOKEN, BETWEEN_TOKENS):
            more: dict[str, Any] = {"clients": sizes.clients, "prompt": prompt, "answer": answer}
            runs = [row.runs[50], row.runs[95]] if row.quantity != RATE else row.runs  # percentiles
            result.add(SERVER, OURS, row.quantity, runs, value=row.value, **more)


# -- llama.cpp's programs, whose tokens are random, too; nothing is sampled ----------------------------------------


def llama_bench(result: Result, program: Path, path: str, sizes: Sizes, seconds: float) -> None:
    """Add the same prompts and steps by `llama-bench`. Raises EngineError."""
    prompts, depths = (",".join(map(str, counts)) for counts in (sizes.prompts, sizes.depths))
    for flags in (("-p", prompts, "-n", "0"), ("-p", "0", "-n", str(sizes.steps), "-d", depths)):
        printed = _printed([str(program), "-m", path, *_ON_GPU, "-r", "3", "-o", "json", *flags], seconds)
        for row in json.loads(printed):
            kind, tokens = (PROMPT, row["n_prompt"]) if row["n_prompt"] else (GENERATION, row["n_depth"])
            add_rate(result, LLAMA_CPP, "f16", kind, tokens, row["samples_ts"])


def batched_bench(result: Result, program: Path, path: str, sizes: Sizes, seconds: float) -> None:
    """Add the same sequences by `llama-batched-bench`. Raises EngineError."""
    prompt, answer = sizes.asked
    counts, context = ",".join(map(str, sizes.sequences)), max(sizes.sequences) * (prompt + answer)
    flags = ["-c", str(context), "-npp", str(prompt), "-ntg", str(answer), "-npl", counts, "--output-format", "jsonl"]
    for line in _printed([str(program), "-m", path, *_ON_GPU, *flags], seconds).splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            first, steps, tokens = row["t_pp"], row["t_tg"], (row["pl"], row["pp"], row["tg"])
            _add_sequences(result, f"{LLAMA_CPP} f16", tokens, first, first + steps, steps / row["tg"])


def _printed(command: Sequence[str], seconds: float) -> str:
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"{command[0]} has no figures: {error}") from None
