"""What is measured on a GPU: sections of tasks, each in the order of importance.

Requests of a model are those of `polarlm speed`, by the same engine: prompts with and without the host, generation, and
many sequences at the same time; `bench.lab.load` measures a server. llama.cpp's programs do the same beside them.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.lab import BETWEEN_TOKENS, FIRST_TOKEN
from polarlm.bench.lab.gpu.attention import measure_attention, measure_encoding
from polarlm.bench.lab.gpu.cache import Content
from polarlm.bench.lab.gpu.peer import half_attention
from polarlm.bench.lab.gpu.products import FORMATS, MATRICES, measure_products, torch_products
from polarlm.bench.lab.gpu.setup import Gpu, Sizes
from polarlm.bench.random_weights import RandomMatrix
from polarlm.bench.result import Output, Result, read
from polarlm.bench.speed.contestants import GENERATION, OURS, PROMPT, RATE, add_sequences, subject_of
from polarlm.bench.speed.ours import Ours
from polarlm.engine.backends.cuda.device import Array
from polarlm.engine.errors import EngineError

Work = Callable[[Result], None]
Task = tuple[str, Work]

DEVICE = "device"  # a subject: its limits
SERVER = "server"  # a subject
LLAMA_CPP = "llama.cpp"
_ON_GPU = "-ngl", "99", "-fa", "1"  # llama.cpp's layers, and its flash attention
# Section → its share of the budget; the most wanted comes first. What one leaves goes to the next.
SHARES = {"prompts": 80, "rates": 90, "sequences": 90, "server": 60, "kernels": 160}


def _work(measure: Callable[..., None], *arguments: Any) -> Work:
    return lambda result: measure(result, *arguments)


@dataclass
class Plan:
    """The tasks of every section. model: a path; None for the demonstration model. llama_cpp: a folder of programs."""

    gpu: Gpu
    sizes: Sizes
    types: Sequence[CacheType]
    contexts: Sequence[int]
    batches: Sequence[int]
    model: str | None
    llama_cpp: str | None
    left: Callable[[], float]  # the seconds that the section that is measured has

    def __post_init__(self) -> None:
        attention = self.sizes.config.attention
        self._content = Content.random(self.sizes.blocks, self.sizes.block_size, attention.kv_heads, attention.head_dim)
        self._engines: dict[CacheType, Ours] = {}  # all with the weights of the first
        self._absence = ""  # why there is no model
        self._of_model = self.types[:2]
        self._rng = np.random.default_rng(0)

    def section(self, name: str) -> Iterator[Task]:
        """The tasks of a section of SHARES. Raises EngineError."""
        return iter(getattr(self, f"_{name}")())

    # -- a model ---------------------------------------------------------------------------------------------------

    def _ours(self, types: CacheType) -> Ours:
        """The engine of a cache type, which is loaded if necessary. Raises EngineError."""
        if not self._engines and not self._absence:
            sizes, most = self.sizes, max(self.sizes.sequences)
            context = max(*sizes.prompts, *sizes.depths, most * (sum(sizes.asked) + 4 * most)) + 2 * sizes.steps
            settings = {"device": "cuda", "parallel": most, "kept_sequences": most, **self.types[0].settings()}
            try:
                self._engines[self.types[0]] = Ours(self.model, context, 0, settings)
            except EngineError as error:
                self._absence = f"there is no model: {error}"
        if self._absence:
            raise EngineError(self._absence)
        if types not in self._engines:
            self._engines[types] = self._engines[self.types[0]].with_settings(types.settings())
        return self._engines[types]

    def unload(self) -> None:
        """Free the model's memory."""
        if self._engines:
            self._engines[self.types[0]].close()
            self._engines.clear()

    def _ids(self, ours: Ours, count: int) -> list[int]:
        return self._rng.integers(ours.vocabulary.start, ours.vocabulary.stop, count).tolist()

    def _prompts(self) -> Iterator[Task]:
        for tokens in self.sizes.prompts:  # what has no time lacks it for all types alike
            for types in self._of_model:
                yield f"prompt of {tokens}, {types.label}", _work(self._prompt, types, tokens)

    def _prompt(self, result: Result, types: CacheType, tokens: int) -> None:
        """Add the rate of a prompt, its seconds up to the first token, and those on the device if all is launched
        before it begins."""
        ours, runs = self._ours(types), self.sizes.runs
        ids = self._ids(ours, tokens)
        device = self.gpu.clock.held(lambda: ours.prompt_rate(ids), runs)
        rates = [ours.prompt_rate(ids) for _ in range(runs)]
        _add_rate(result, f"{OURS} {types.label}", PROMPT, tokens, rates)
        times = {"seconds": tokens / statistics.median(rates), "device": device}
        result.add_all(subject_of(PROMPT, tokens), f"{OURS} {types.label}", times, tokens=tokens)

    def _rates(self) -> Iterator[Task]:
        for types in self._of_model:
            for depth in self.sizes.depths:
                yield f"generation at {depth}, {types.label}", _work(self._generation, types, depth)
        yield from self._peer("llama-bench", llama_bench)

    def _generation(self, result: Result, types: CacheType, depth: int) -> None:
        ours = self._ours(types)
        ids, following = self._ids(ours, depth), self._ids(ours, self.sizes.steps + 1)
        _, *runs = [ours.generation_rate(ids, following) for _ in range(1 + self.sizes.runs)]  # the first compiles
        _add_rate(result, f"{OURS} {types.label}", GENERATION, depth, runs)

    def _sequences(self) -> Iterator[Task]:
        for count in self.sizes.sequences:
            yield f"{count} sequences", _work(self._together, self.types[0], count)
        yield from self._peer("llama-batched-bench", batched_bench)

    def _together(self, result: Result, types: CacheType, count: int) -> None:
        """Add the times of `count` sequences that are asked at the same time: of whole answers, then of longer ones,
        whose prompts are not computed again."""
        ours, (prompt, answer) = self._ours(types), self.sizes.asked
        prompts = [self._ids(ours, prompt) for _ in range(count)]
        ours.together([self._ids(ours, prompt) for _ in range(count)], answer)  # compiles, and records steps
        whole = ours.together(prompts, answer)
        steps = ours.together(prompts, answer + 4 * count, True)["steps"]  # long enough for all to run together
        runs = {"first": [whole["first"]], "seconds": [whole["seconds"]], "step": steps}
        add_sequences(result, f"{OURS} {types.label}", count, runs, prompt=prompt, answer=answer)

    def _peer(self, program: str, measure: Callable[..., None]) -> Iterator[Task]:
        if self.llama_cpp and self.model:
            path, model = Path(self.llama_cpp) / program, self.model
            yield program, lambda result: measure(result, path, model, self.sizes, self.left())

    def _server(self) -> Iterator[Task]:
        self.unload()
        yield f"server of {self.sizes.clients} clients", _work(serve, self.model, self.sizes)

    # -- kernels ---------------------------------------------------------------------------------------------------

    def _kernels(self) -> Iterator[Task]:
        self.unload()
        yield "limits of the device", self._limits
        yield from self._attention(self.batches[0])
        for weights in FORMATS:
            for name in MATRICES:
                yield f"{name}, {weights}", _work(measure_products, self.gpu, self.sizes, weights, name)
        for name in MATRICES:
            yield f"{name}, PyTorch", _work(torch_products, self.sizes, name)
        yield "encoding", _work(measure_encoding, self.gpu, self.sizes, self._content, self.types[0].codes)
        for batch in self.batches[1:]:
            yield from self._attention(batch)

    def _limits(self, result: Result) -> None:
        _, device = self.gpu.open()
        clock, sizes, n = self.gpu.clock, self.sizes, self.sizes.gemm

        def random(rows: int, columns: int) -> Array:
            return device.from_host(RandomMatrix("bf16", rows, columns).raw(slice(0, rows)).view(np.uint16))

        source = random(sizes.copied // (2 * n), n)
        to = device.empty(source.shape, source.dtype)
        copied = clock.seconds(lambda: clock.copy(to, source), sizes.runs)
        x, weight, y = random(n, n), random(n, n), device.empty((n, n), "float32")
        multiplied = clock.seconds(lambda: device.gemm(y, x, weight, add=False), sizes.runs)
        result.add(DEVICE, "copy", "bytes/s", value=2 * source.nbytes / copied)  # read and written
        result.add(DEVICE, "bf16 product", "FLOP/s", value=2 * n**3 / multiplied)

    def _attention(self, batch: int) -> Iterator[Task]:
        sizes = self.sizes
        for context in self.contexts:
            shape = sizes.config, context, batch, sizes.rotated, sizes.runs
            yield f"fp16 kernels of PyTorch, {context} × {batch}", _work(half_attention, *shape)
            for types in self.types:
                work = _work(measure_attention, self.gpu, sizes, self._content, types, context, batch)
                yield f"attention, {types.label}, {context} × {batch}", work


# -- rows of a model -----------------------------------------------------------------------------------------------


def _add_rate(result: Result, who: str, kind: str, tokens: int, runs: Sequence[float]) -> None:
    """Add tokens/s of a PROMPT of so many tokens, or of GENERATION after them."""
    result.add(subject_of(kind, tokens), who, RATE, runs, section=kind, tokens=tokens)


def serve(result: Result, path: str | None, sizes: Sizes) -> None:
    """Add what `bench.lab.load` measures of a server of the model under load. Raises EngineError."""
    from polarlm.bench.lab.load import LoadOptions, run  # needs httpx

    prompt, answer = sizes.of_client
    load = LoadOptions(
        weights=path,
        max_tokens=answer,
        clients=sizes.clients,
        rate=500,
        requests=3 * sizes.clients,
        prompt_tokens=prompt,
        shared_prefix=0,
        warm_up=sizes.clients,
    )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "serving.json"
        run(load, Output(str(output)), [])
        for row in read(output).rows(RATE, FIRST_TOKEN, BETWEEN_TOKENS):
            more: dict[str, Any] = {"clients": sizes.clients, "prompt": prompt, "answer": answer}
            runs = [row.runs[50], row.runs[95]] if row.quantity != RATE else row.runs  # percentiles
            result.add(SERVER, OURS, row.quantity, runs, value=row.value, **more)


# -- llama.cpp's programs, whose tokens are random, too; nothing is sampled ----------------------------------------


def llama_bench(result: Result, program: Path, path: str, sizes: Sizes, seconds: float) -> None:
    """Add the same prompts and steps by `llama-bench`. Raises EngineError."""
    prompts, depths = (",".join(map(str, counts)) for counts in (sizes.prompts, sizes.depths))
    for flags in (("-p", prompts, "-n", "0"), ("-p", "0", "-n", str(sizes.steps), "-d", depths)):
        printed = _output([str(program), "-m", path, *_ON_GPU, "-r", "3", "-o", "json", *flags], seconds)
        for row in json.loads(printed):
            kind, tokens = (PROMPT, row["n_prompt"]) if row["n_prompt"] else (GENERATION, row["n_depth"])
            _add_rate(result, f"{LLAMA_CPP} f16", kind, tokens, row["samples_ts"])


def batched_bench(result: Result, program: Path, path: str, sizes: Sizes, seconds: float) -> None:
    """Add the same sequences by `llama-batched-bench`. Raises EngineError."""
    prompt, answer = sizes.asked
    counts, context = ",".join(map(str, sizes.sequences)), max(sizes.sequences) * (prompt + answer)
    flags = ["-c", str(context), "-npp", str(prompt), "-ntg", str(answer), "-npl", counts, "--output-format", "jsonl"]
    for line in _output([str(program), "-m", path, *_ON_GPU, *flags], seconds).splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            first, steps = row["t_pp"], row["t_tg"]
            runs = {"first": [first], "seconds": [first + steps], "step": [steps / row["tg"]]}
            add_sequences(result, f"{LLAMA_CPP} f16", row["pl"], runs, prompt=row["pp"], answer=row["tg"])


def _output(command: Sequence[str], seconds: float) -> str:
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"{command[0]} has no figures: {error}") from None
