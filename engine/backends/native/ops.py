"""The ops with compiled kernels, and NumPy's for layers that have none; see `engine.backends.ops.Ops`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.native.attention_ops.latent import ExpansionOps
from polarlm.engine.backends.native.attention_ops.prompts import EncoderOps
from polarlm.engine.backends.native.attention_ops.steps import AttentionOps
from polarlm.engine.backends.native.graphs import Graphs
from polarlm.engine.backends.native.kernels.linear.tiling import short_prompts
from polarlm.engine.backends.native.kernels.rows import BestArguments, best_of_rows
from polarlm.engine.backends.native.kv.cache import CacheOps
from polarlm.engine.backends.native.kv.encoding import EncodingOps
from polarlm.engine.backends.native.launch import Launcher, WarmUpLauncher
from polarlm.engine.backends.native.product_ops.products import ExpertOps, LinearOps
from polarlm.engine.backends.native.recurrent_ops import RecurrentOps
from polarlm.engine.backends.native.self_test import choose
from polarlm.engine.backends.native.thread_count import thread_count
from polarlm.engine.backends.numpy import blas, host_memory
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Result, WarmUp
from polarlm.engine.config import AUTO
from polarlm.engine.jit.run.workers import workers
from polarlm.engine.outputs import Threads
from polarlm.engine.sampling.sample import Sampled, SamplerInput, sample_all
from polarlm.engine.weight_formats import WeightFormat

_MATRIX_ROWS = 256  # of a batch of prompts: weights become matrices once for all of them


class NativeOps(LinearOps, ExpertOps, RecurrentOps, AttentionOps, EncoderOps, ExpansionOps, EncodingOps, CacheOps):
    """The ops on a CPU. NumPy computes what `tests/backends/test_contract.py` lists: it copies memory of the host, and
    computes layers without a kernel; `numpy_fallbacks` says which these are."""

    backend = "native"
    stored_as = transfer.TILES

    def __init__(self, threads: int = 0) -> None:
        """Raises KernelError if kernels do not work here, EngineError if POLARLM_CPU_LEVEL names no level of this CPU.

        threads: as in `thread_count`. The attribute `note` is a sentence for the user, or empty.
        """
        choice = choose()
        self.note = choice.note
        self._count = thread_count(threads)
        if threads:
            blas.use_threads(self._count.number)
        super().__init__(Launcher(self._count.number, choice.level))
        self._graphs, self._heads = Graphs(self._launch), {}

    @property
    def unit_layers(self) -> int:  # type: ignore[override]
        return max(1, self._launch.threads // 2)  # as many as take as long as one on two threads

    @property
    def batch_rows(self) -> int:  # type: ignore[override]
        return _MATRIX_ROWS if self.input_bits == "bf16" and self._launch.level.matrices else NumpyOps.batch_rows

    @property
    def input_bits(self) -> str:
        return self._launch.input_bits

    def set_input_bits(self, bits: str) -> str:
        level = self._launch.level
        if bits == AUTO:
            bits = "bf16" if level.matrices is not None else "16"
        is_possible = {"8": level.most_code > 0, "bf16": level.matrices is not None}.get(bits, True)
        self._launch.input_bits = bits if is_possible else "16"
        what = "bytes" if bits == "8" else "bfloat16"
        return "" if is_possible else f"kernels for {level.name} have no fast instructions that multiply {what}"

    @property
    def is_replayable(self) -> bool:
        return bool(self._launch.level.fuses)  # as `generic` does not

    @property
    def inputs(self) -> str:
        level, bits = self._launch.level, self.input_bits
        limit = f" for codes of up to {level.most_code.bit_length()}, else of 16" if level.most_code < 255 else ""
        of_bits = {"8": f"8 bits{limit}", "bf16": "16 bits, many rows of bfloat16"}
        return f"inputs of {of_bits.get(bits, '16 bits')}"

    def warm_up(self) -> WarmUp:
        ops, launch = copy(self), WarmUpLauncher(self._launch)
        ops._launch, ops._graphs = launch, Graphs(launch)
        return WarmUp(ops, launch.wait, (), short_prompts(launch.level))

    def run_graph(self, key: Hashable, work: Callable[..., Result], inputs: Sequence[Any]) -> Result:
        return self._graphs.run(key, work, inputs)

    def as_step(self) -> AbstractContextManager[None]:
        return self._launch.graph()

    @property
    def stream(self) -> Callable[[], AbstractContextManager[None]]:  # type: ignore[override]
        return self._launch.stream

    def forget(self) -> None:
        self._graphs.forget()

    def memory_left(self, weights: int) -> int:
        return host_memory.memory_left(weights)

    def threads(self) -> Threads:
        """The number of threads; the reason, which also names the CPU level and kernels that failed to compile."""
        number, why, library = self._count.number, self._count.why, self._launch.library
        if (started := workers().start(number)) < number:
            number, why = started, f"{why}: {number}, of which the system starts no more"
        why = f"{why}; kernels compiled for {library.level.name}, {self.inputs}"
        if failed_names := library.failed_names:
            why += f"; without {', '.join(failed_names)}, which cannot be compiled"
        return Threads(number, why, tuple(library.names))

    def stored_format(self, format: WeightFormat) -> WeightFormat:
        return format

    def sample(
        self, logits: np.ndarray, sampler_inputs: Sequence[SamplerInput], newest: np.ndarray | None = None
    ) -> np.ndarray:
        """The ids of the largest logits, (B,) int32; −1 where a logit of the row is not finite.

        `fetch_tokens` does the sampling: it needs the logits of a step that has run.
        """
        best = self._launch.empty((len(logits),), np.int32)
        arguments = BestArguments(x=logits, best=best, columns=sampler_inputs[0].vocabulary, stride=logits.strides[0])
        self._launch(best_of_rows(), len(logits), arguments, grain=1)
        return best

    def fetch_tokens(
        self, chosen: np.ndarray, logits: np.ndarray, sampler_inputs: Sequence[SamplerInput]
    ) -> list[Sampled]:
        return sample_all(logits, sampler_inputs, chosen.tolist())
