"""What is measured on a GPU: sections of tasks, each in the order of importance."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.gpu import families
from polarlm.bench.gpu.attention import measure_attention, measure_encoding
from polarlm.bench.gpu.cache import Content
from polarlm.bench.gpu.peer import PeerTime
from polarlm.bench.gpu.products import FORMATS, MATRICES, measure_products, torch_products
from polarlm.bench.gpu.requests import LLAMA_CPP, Asked, ServerTimes, batched_bench, server_times
from polarlm.bench.gpu.setup import Gpu, Sizes
from polarlm.bench.gpu.tables import Limits, Row
from polarlm.bench.random_weights import RandomMatrix
from polarlm.engine.backends.cuda.device import Array
from polarlm.engine.errors import EngineError
from polarlm.model_loaders.config import ModelConfig

Peers = Callable[[ModelConfig, int, int, int, int], "list[PeerTime]"]
Task = tuple[str, Callable[[], Sequence[Row]]]

# Section → its share of the budget; the most wanted comes first. What one leaves goes to the next.
SHARES = {"prompts": 60, "sequences": 90, "rates": 150, "server": 50, "families": 50, "kernels": 140}
_LAST_SECONDS = 30.0  # for another command to write what it has, once it is stopped


@dataclass
class Plan:
    """The tasks of every section. model: a path; None for the demonstration model. llama_bench: the program's path.

    rates_output: the flags that say where the rates' own file goes.
    """

    gpu: Gpu
    sizes: Sizes
    peers: Peers
    types: Sequence[CacheType]
    contexts: Sequence[int]
    batches: Sequence[int]
    model: str | None
    llama_bench: str | None
    rates_output: Sequence[str]
    end: float = 0.0  # when the section that is measured has to end, by `time.monotonic`

    def __post_init__(self) -> None:
        attention = self.sizes.config.attention
        self._content = Content.random(self.sizes.blocks, self.sizes.block_size, attention.kv_heads, attention.head_dim)
        self._asked: Asked | EngineError | None = None  # or why there is none
        self._of_model = self.types[:2]
        self.sections: Mapping[str, Callable[[], Iterator[Task]]] = {
            "prompts": self._prompts,
            "sequences": self._sequences,
            "rates": self._rates,
            "server": self._server,
            "families": self._families,
            "kernels": self._kernels,
        }

    # -- a model ---------------------------------------------------------------------------------------------------

    def _loaded(self) -> Asked:
        if self._asked is None:
            self.gpu.clock.free()
            try:
                self._asked = Asked(self.model, self.sizes, self.types[0])
            except EngineError as error:
                self._asked = error
        if isinstance(self._asked, EngineError):
            raise EngineError(f"there is no model: {self._asked}")
        return self._asked

    def unload(self) -> None:
        """Free the model's memory."""
        if isinstance(self._asked, Asked):
            self._asked.close()
        self._asked = None
        self.gpu.clock.free()

    def _prompts(self) -> Iterator[Task]:
        for types in self._of_model:
            for tokens in self.sizes.prompts:

                def measure(types: CacheType = types, tokens: int = tokens) -> Sequence[Row]:
                    return [self._loaded().prompt(self.gpu, types, tokens)]

                yield f"prompt of {tokens}, {types.label}", measure

    def _sequences(self) -> Iterator[Task]:
        for count in self.sizes.sequences:

            def measure(count: int = count) -> Sequence[Row]:
                return [self._loaded().sequences(self.types[0], count)]

            yield f"{count} sequences", measure
        if self.llama_bench and self.model:
            program = Path(self.llama_bench).with_name("llama-batched-bench")
            yield "sequences, llama.cpp", lambda: batched_bench(str(program), str(self.model), self.sizes, self._left())

    def _rates(self) -> Iterator[Task]:
        flags = ["--device", "cuda", "--only", "rates", "--types", ",".join(types.label for types in self._of_model)]
        flags += ["--peer-types", "f16", "--peer", f"{LLAMA_CPP}={self.llama_bench}"] if self.llama_bench else []
        flags += [] if self.llama_bench else ["--peer-types", "none"]
        flags += ["--prompt", "64,512,2048", "--depth", "2048,32768", "--repeat", "2", *self.rates_output]
        yield "rates, by polarlm speed", lambda: self._other("speed", flags)

    def _server(self) -> Iterator[Task]:
        clients, (prompt, answer) = self.sizes.clients, self.sizes.of_client

        def measure() -> Sequence[ServerTimes]:
            with tempfile.TemporaryDirectory() as folder:
                output = Path(folder) / "serving.json"
                flags = ["--clients", str(clients), "--requests", str(3 * clients), "--rate", "500", "--seconds", "30"]
                flags += ["--prompt-tokens", str(prompt), "--shared-prefix", "0", "--max-tokens", str(answer)]
                self._other("serving", [*flags, "--output", str(output)])
                return [server_times(json.loads(output.read_text(encoding="utf-8")))]

        yield f"server of {clients} clients", measure

    def _other(self, kind: str, flags: Sequence[str]) -> Sequence[Row]:
        """Run another measurement of the same model in a process of its own. Raises EngineError."""
        self.unload()
        weights = [] if self.model is None else ["--weights", self.model]
        process = subprocess.Popen([sys.executable, "-m", f"polarlm.bench.{kind}", *weights, *flags])
        try:
            code = process.wait(self._left())
        except subprocess.TimeoutExpired:
            raise EngineError("was not finished in its time; its file has what was measured") from None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(_LAST_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
        if code:
            raise EngineError(f"polarlm.bench.{kind} ended with exit code {code}")
        return []

    def _left(self) -> float:
        return max(1.0, self.end - time.monotonic())

    # -- families and kernels --------------------------------------------------------------------------------------

    def _families(self) -> Iterator[Task]:
        self.unload()
        try:
            every = families.every()
        except EngineError as error:
            yield "families", partial(_raise, error)
            return
        pool = families.processes()
        running = [(one, pool.submit(families.measure_family, *one)) for one in every]
        for (family, types), future in running:
            yield f"{family}, {types}", lambda future=future: [future.result(self._left())]
        pool.shutdown(wait=False, cancel_futures=True)

    def _kernels(self) -> Iterator[Task]:
        self.unload()
        yield "limits of the device", self._limits
        yield from self._attention(self.batches[0])
        for weights in FORMATS:
            for name in MATRICES:
                work = partial(measure_products, self.gpu, self.sizes, weights, name)
                yield f"{name}, {weights}", partial(self._afresh, work)
        for name in MATRICES:
            yield f"{name}, PyTorch", partial(torch_products, self.sizes, name)
        yield "encoding", self._encoding
        for batch in self.batches[1:]:
            yield from self._attention(batch)

    def _afresh(self, work: Callable[[], Sequence[Row]]) -> Sequence[Row]:
        """The result of `work`, after the memory of earlier measurements has been freed."""
        self.gpu.clock.free()
        return work()

    def _limits(self) -> list[Row]:
        _, device = self.gpu.open()
        clock, sizes, n = self.gpu.clock, self.sizes, self.sizes.gemm

        def random(rows: int, columns: int) -> Array:
            return device.from_host(RandomMatrix("bf16", rows, columns).raw(slice(0, rows)).view(np.uint16))

        source = random(sizes.copied // (2 * n), n)
        to = device.empty(source.shape, source.dtype)
        copied = clock.seconds(lambda: clock.copy(to, source), sizes.runs)
        x, weight, y = random(n, n), random(n, n), device.empty((n, n), "float32")
        multiplied = clock.seconds(lambda: device.gemm(y, x, weight, add=False), sizes.runs)
        return [Limits(2 * source.nbytes / copied, 2 * n**3 / multiplied)]

    def _attention(self, batch: int) -> Iterator[Task]:
        sizes = self.sizes
        for context in self.contexts:
            shape = sizes.config, context, batch, sizes.rotated, sizes.runs
            yield f"fp16 kernels of PyTorch, {context} × {batch}", partial(self.peers, *shape)
            for types in self.types:

                def measure(types: CacheType = types, context: int = context) -> Sequence[Row]:
                    return [measure_attention(self.gpu, sizes, self._content, types, context, batch)]

                yield f"attention, {types.label}, {context} × {batch}", partial(self._afresh, measure)

    def _encoding(self) -> Sequence[Row]:
        return measure_encoding(self.gpu, self.sizes, self._content, self.types[0])


def _raise(error: Exception) -> Any:
    raise error
