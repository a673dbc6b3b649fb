"""What is measured on a GPU: sections of tasks, each in the order of importance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.gpu.attention import measure_attention, measure_encoding
from polarlm.bench.gpu.cache import Content
from polarlm.bench.gpu.peer import half_attention
from polarlm.bench.gpu.products import FORMATS, MATRICES, measure_products, torch_products
from polarlm.bench.gpu.requests import LoadedModel, batched_bench, llama_bench, serve
from polarlm.bench.gpu.setup import Gpu, Sizes
from polarlm.bench.random_weights import RandomMatrix
from polarlm.bench.result import Result
from polarlm.engine.backends.cuda.device import Array
from polarlm.engine.errors import EngineError

Work = Callable[[Result], None]
Task = tuple[str, Work]

DEVICE = "device"  # a subject: its limits
# Section → its share of the budget; the most wanted comes first. What one leaves goes to the next.
SHARES = {"prompts": 80, "rates": 90, "sequences": 90, "server": 60, "kernels": 160}


def _with(measure: Callable[..., None], *arguments: Any) -> Work:
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
        self._load_result: LoadedModel | EngineError | None = None  # or why there is none
        self._of_model = self.types[:2]

    def section(self, name: str) -> Iterator[Task]:
        """The tasks of a section of SHARES. Raises EngineError."""
        return iter(getattr(self, f"_{name}")())

    # -- a model ---------------------------------------------------------------------------------------------------

    def _loaded(self) -> LoadedModel:
        if self._load_result is None:
            try:
                self._load_result = LoadedModel(self.model, self.sizes, self.types[0])
            except EngineError as error:
                self._load_result = error
        if isinstance(self._load_result, EngineError):
            raise EngineError(f"there is no model: {self._load_result}")
        return self._load_result

    def unload(self) -> None:
        """Free the model's memory."""
        if isinstance(self._load_result, LoadedModel):
            self._load_result.close()
        self._load_result = None

    def _prompts(self) -> Iterator[Task]:
        for tokens in self.sizes.prompts:  # what has no time lacks it for all types alike
            for types in self._of_model:
                yield f"prompt of {tokens}, {types.label}", self._asking("prompt", self.gpu, types, tokens)

    def _rates(self) -> Iterator[Task]:
        for types in self._of_model:
            for depth in self.sizes.depths:
                yield f"generation at {depth}, {types.label}", self._asking("generation", types, depth)
        yield from self._peer("llama-bench", llama_bench)

    def _sequences(self) -> Iterator[Task]:
        for count in self.sizes.sequences:
            yield f"{count} sequences", self._asking("sequences", self.types[0], count)
        yield from self._peer("llama-batched-bench", batched_bench)

    def _asking(self, name: str, *arguments: Any) -> Work:
        return lambda result: getattr(self._loaded(), name)(result, *arguments)

    def _peer(self, program: str, measure: Callable[..., None]) -> Iterator[Task]:
        if self.llama_cpp and self.model:
            path, model = Path(self.llama_cpp) / program, self.model
            yield program, lambda result: measure(result, path, model, self.sizes, self.left())

    def _server(self) -> Iterator[Task]:
        self.unload()
        yield f"server of {self.sizes.clients} clients", lambda result: serve(result, self.model, self.sizes)

    # -- kernels ---------------------------------------------------------------------------------------------------

    def _kernels(self) -> Iterator[Task]:
        self.unload()
        yield "limits of the device", self._limits
        yield from self._attention(self.batches[0])
        for weights in FORMATS:
            for name in MATRICES:
                yield f"{name}, {weights}", _with(measure_products, self.gpu, self.sizes, weights, name)
        for name in MATRICES:
            yield f"{name}, PyTorch", _with(torch_products, self.sizes, name)
        yield "encoding", _with(measure_encoding, self.gpu, self.sizes, self._content, self.types[0].older)
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
            yield f"fp16 kernels of PyTorch, {context} × {batch}", _with(half_attention, *shape)
            for types in self.types:
                work = _with(measure_attention, self.gpu, sizes, self._content, types, context, batch)
                yield f"attention, {types.label}, {context} × {batch}", work
