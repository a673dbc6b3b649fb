"""The ops as launches of the kernels in `cuda/`; see `engine.backends.ops.Ops`. Kernels are compiled before they are
needed: those that a trace of the first requests launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from polarlm.engine.backends import transfer
from polarlm.engine.backends.cuda import sampling
from polarlm.engine.backends.cuda.attention import AttentionOps, EncoderOps
from polarlm.engine.backends.cuda.batches import first_rows, pad_rows
from polarlm.engine.backends.cuda.device import Array, Device, PaddedInput, PeerCopy
from polarlm.engine.backends.cuda.device.tracing import TracedLaunch, TracingDevice
from polarlm.engine.backends.cuda.experts import ExpertOps
from polarlm.engine.backends.cuda.heads import prepare
from polarlm.engine.backends.cuda.kv.cache import HostTable, SpanTable, next_spans, pack_spans
from polarlm.engine.backends.cuda.kv.store import CacheOps
from polarlm.engine.backends.cuda.launch_configs import ROWS_WITH_KERNELS
from polarlm.engine.backends.cuda.memory import prompt_bytes, step_bytes
from polarlm.engine.backends.cuda.recurrent import RecurrentOps
from polarlm.engine.backends.cuda.sampling import pack_sampler_inputs
from polarlm.engine.backends.cuda.wide import GROUP_ROWS
from polarlm.engine.backends.ops import Load, Ops, PeerArray, Result, WarmUp
from polarlm.engine.errors import DeviceLost, EngineError
from polarlm.engine.outputs import Threads
from polarlm.engine.weight_formats import Matrix, StoredMatrix, WeightFormat
from polarlm.model_loaders.config import is_gated


class ExpectedKernels:
    """The texts of launches, which devices compile in the background."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._texts: dict[str, None] = {}  # in the order of need

    def add(self, launch: TracedLaunch) -> None:
        """Expect the text of a launch; a library's product has none."""
        if launch.text and launch.text not in self._texts:
            self._texts[launch.text] = None
            for device in self._devices:
                device.expect(launch.text)

    def wait(self, progress: Callable[[int, int], None]) -> None:
        """Wait until what has been added so far is compiled; progress(texts done, all) is called on the way."""
        texts = list(self._texts)
        for done, text in enumerate(texts):
            progress(done, len(texts))
            for device in self._devices:
                device.wait_for(text)
        progress(len(texts), len(texts))


@dataclass(frozen=True)
class FirstRow:
    """A matrix for which one row of zeros is loaded, and nothing is read; see `StoredMatrix`."""

    matrix: StoredMatrix

    @property
    def format(self) -> WeightFormat:
        return self.matrix.format

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    def dequantize(self, out: np.ndarray) -> None:
        raise NotImplementedError("a GPU takes the bytes of a file")

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        yield slice(0, 1), np.zeros((1, self.format.size(self.shape[1])), np.uint8)


# Rows of a unit of a prompt. More rows dequantize packed weights less often (8,192 tokens of an 8B model of 4-bit
# weights take 9 % less time on an H100), but other sequences wait longer for their next step, and the activations of an
# 8B model take 1 GB. A GPU with that much memory is fast enough for longer chunks, and has room for their activations.
_ROWS, _MANY_ROWS, _LARGE_MEMORY = 2048, 8192, 40 << 30
_BATCH_ROWS = 2048  # of several prompts: the host is no limit from there on

# Left free for what `memory.py` does not count: compiled kernels, graphs, libraries, fragmentation, the
# DEQUANTIZED_BYTES of products with packed matrices, and rows of recorded batches beyond a step's.
_UNCOUNTED_BYTES, _UNCOUNTED_SHARE = 512 << 20, 0.1  # bytes, or this share of free memory if that is less


class CudaOps(ExpertOps, CacheOps, AttentionOps, RecurrentOps, EncoderOps):
    """The ops on one GPU."""

    backend = "cuda"
    forkable = False
    batches_take_steps = True
    stream: Callable[[], AbstractContextManager[None]] | None = None  # nothing is waited for
    cache_experts = None
    expansion_ops = None
    is_replayable = False
    inputs = ""
    stored_as = transfer.RECORDS
    unit_layers = 1
    warm_up_rows: tuple[Sequence[int], Sequence[int]] = ((16, 64, 128, 256), (1, 2, 4, 8))

    def __init__(self, device: Device, host: Ops | None = None):
        super().__init__(device, host)
        self.name = device.name
        self._same_devices = [device]  # devices that get the same kernels
        self.others: Callable[[], Sequence[CudaOps]] = tuple  # the ops of the other GPUs of this process
        self.prefill_rows = _MANY_ROWS if device.memory()[1] >= _LARGE_MEMORY else _ROWS
        self.batch_rows = min(self.prefill_rows, _BATCH_ROWS)
        self.encoded_at_once = 4 * device.processors
        self.prepare = partial(prepare, device)
        self.spans = pack_spans
        self.next_spans = next_spans
        self.pack_sampler_inputs = pack_sampler_inputs
        self.sample = partial(sampling.sample, device, self._launch)
        self.fetch_tokens = partial(sampling.fetch_tokens, device, self._launch)
        self.fetch_later = partial(sampling.fetch_later, device)

    def with_host(self, host: Ops) -> CudaOps:
        """The ops on the same GPU, with the host's ops."""
        return CudaOps(self._device, host)

    def empty(self, shape: tuple[int, ...]) -> Array:
        return self._device.empty(shape, np.float32)

    def activate_halves(self, x: Array, activation: str) -> Array:
        if not is_gated(activation):
            self.activate(x, x, activation)
            return x
        y = self.empty((len(x), x.shape[1] // 2))
        self.activate_mul(y, x, activation)
        return y

    def run_between_graphs(self, work: Callable[..., None], arrays: Sequence[Array], *, is_last: bool = False) -> None:
        self._device.run_between_graphs(work, arrays, is_last=is_last)

    def as_step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forget(self) -> None:
        self._device.forget()

    def run_graph(self, key: Hashable, work: Callable[..., Result], inputs: Sequence[Any]) -> Result:
        inputs = [self._peer_copy(x) if isinstance(x, PeerArray) else x for x in inputs]
        rows, inputs = inputs[0].shape[0], pad_rows(inputs)

        def on_device(*arrays: Array) -> Result:
            tables = [
                replace(host, copies={self._device: array}) if isinstance(host, HostTable) else array
                for host, array in zip(inputs, arrays, strict=True)
            ]
            return work(*tables)

        key = key, work, *(x.most_rows for x in inputs if isinstance(x, SpanTable))
        result = self._device.run_graph(key, on_device, [_on_host(x) for x in inputs])
        return result if rows == inputs[0].shape[0] else first_rows(result, rows)

    def _peer_copy(self, x: PeerArray) -> PeerCopy:
        assert isinstance(x.ops, CudaOps)
        return PeerCopy(x.array, x.ops._device, len(x.array))

    def layer_ops(self, layer: int) -> CudaOps:
        return self

    @property
    def encoder_ops(self) -> CudaOps:
        return self

    @property
    def latent_ops(self) -> CudaOps:
        return self

    def wait(self) -> None:
        self._device.wait()

    def check(self) -> None:
        if (error := self._device.lasting_error()) is not None:
            reason = str(error).strip() or type(error).__name__
            raise DeviceLost(f"{self.name} has stopped with an error ({reason}): start this program again") from error

    @property
    def input_bits(self) -> str:
        return "16" if self.host is None else self.host.input_bits

    def set_input_bits(self, bits: str) -> str:
        if self.host is not None:
            return self.host.set_input_bits(bits)
        return "" if bits in ("auto", "16") else "it is for CPUs"

    def threads(self) -> Threads | None:
        return None if self.host is None else self.host.threads()

    def numpy_fallbacks(self, cache: Any) -> dict[str, str]:
        return {}

    def _memory(self) -> tuple[int, int]:
        """Free bytes, total bytes."""
        return self._device.memory()

    def free_memory(self) -> int:
        return self._memory()[0]

    def memory_left(self, weights: int) -> int:
        free, total = self._memory()
        if weights > free:
            raise EngineError(
                f"The model's weights take {_gib(weights)} on {self.name}, but only {_gib(free)} of its "
                f"{_gib(total)} are free: choose a smaller model, or run it with device=cpu",
                "out_of_memory",
                ("device",),
                lacking=weights - free,
            )
        uncounted = min(_UNCOUNTED_BYTES, int(_UNCOUNTED_SHARE * free))
        return max(0, free - uncounted - weights)

    def work_bytes(self, load: Load) -> int:
        sizes = self.cache_bytes(load.format)[1], self.prefill_rows, self.encoded_at_once
        return prompt_bytes(load, *sizes) + step_bytes(load, self._device)

    def reserve_workspace(self, load: Load) -> None:
        self._device.reserve_workspace(step_bytes(load, self._device))

    def warm_up(self) -> WarmUp:
        device, expected = self._device, ExpectedKernels(self._same_devices)
        sizes = device.processors, device.shared_memory, device.memory()
        host = None if self.host is None else self.host.warm_up()
        ops = _FirstRows(TracingDevice(expected.add, *sizes, device.overlaps), host and host.ops)

        def wait(progress: Callable[[int, int], None]) -> None:
            if host is not None:
                host.wait(progress)
            expected.wait(progress)

        return WarmUp(ops, wait, ROWS_WITH_KERNELS)

    def to_device(self, x: ArrayLike | PeerArray) -> Array:
        if isinstance(x, PeerArray):
            return self._device.from_device(*self._peer_copy(x)[:2])
        x = np.asarray(x)
        return self._device.from_host(np.ascontiguousarray(x, np.int32 if x.dtype.kind in "iu" else np.float32))

    def to_host(self, x: Array) -> np.ndarray:
        return self._device.to_host(x).astype(np.float32, copy=False)


class _FirstRows(CudaOps):
    """The ops of a warm-up, which load one row of each matrix."""

    def load(self, matrices: Sequence[StoredMatrix]) -> tuple[Matrix, ...]:
        loaded = super().load([FirstRow(matrix) for matrix in matrices])
        for matrix in loaded:
            self.rows(matrix, slice(0, 1))  # loading reads rows, for the KV store's scales and the fingerprint
        return loaded

    def load_experts(self, matrices: Sequence[Sequence[StoredMatrix]]) -> tuple[Matrix, ...]:
        return super().load_experts([[FirstRow(matrix) for matrix in expert] for expert in matrices])

    def _group_rows(self, pairs: int, count: int) -> Sequence[int]:
        return GROUP_ROWS  # a longer prompt takes another one


def _on_host(x: Any) -> Any:
    """An input of `Ops.run_graph` as `Device.run_graph` takes it."""
    if isinstance(x, HostTable):
        return x.table
    return x if isinstance(x, PaddedInput | PeerCopy) else np.ascontiguousarray(x)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
