"""The ops with compiled kernels, and NumPy's for layers that have none; see `engine.backends.ops.Ops`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.native.attention_ops.heads import HeadOps
from polarlm.engine.backends.native.attention_ops.steps import AttentionOps
from polarlm.engine.backends.native.attention_ops.texts import EncoderOps
from polarlm.engine.backends.native.graphs import Graphs
from polarlm.engine.backends.native.kernels.linear.tiling import short_prompts
from polarlm.engine.backends.native.kernels.rows import BestArguments, best_of_rows
from polarlm.engine.backends.native.kv.cache import CacheOps
from polarlm.engine.backends.native.kv.encoding import EncodingOps
from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.backends.native.product_ops.experts import ExpertOps
from polarlm.engine.backends.native.product_ops.linear import LinearOps
from polarlm.engine.backends.native.recurrent_ops import ConvOps, DeltaOps
from polarlm.engine.backends.native.self_test import choose
from polarlm.engine.backends.native.thread_count import thread_count
from polarlm.engine.backends.native.warm_up import WarmUpLauncher
from polarlm.engine.backends.numpy import host_memory
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import WarmUp
from polarlm.engine.jit.run.workers import workers
from polarlm.engine.outputs import Threads
from polarlm.engine.sampling.sample import Sampled, SamplerInput, sample_all
from polarlm.engine.weight_formats import WeightFormat


class NativeOps:
    """The ops on a CPU, composed of the classes of this folder."""

    name = NumpyOps.name
    backend = "native"
    host = None
    forkable = NumpyOps.forkable
    stored_as = transfer.TILES
    keeps_tiles = True
    prefill_rows = NumpyOps.prefill_rows
    fetch_later = NumpyOps.fetch_later

    def __init__(self, threads: int = 0) -> None:
        """Raises KernelError if kernels do not work here, EngineError if POLARLM_CPU_LEVEL names no level of this CPU.

        threads: as in `thread_count`. The attribute `note` is a sentence for the user, or empty.
        """
        choice = choose()
        self.note = choice.note
        self._count = thread_count(threads)
        plain = NumpyOps(self._count.number if threads else 0)
        self._compose(plain, Launcher(self._count.number, choice.level))

    def _compose(self, plain: NumpyOps, launch: Launcher) -> None:
        """Set every op: a method of this folder's classes, or of `plain`."""
        self._plain, self._launch = plain, launch

        self._matrices = matrices = LinearOps(launch)
        self.matrix_bytes = matrices.matrix_bytes
        self.load = matrices.load
        self.load_experts = matrices.load_experts
        self.cache_experts = matrices.cache_experts
        self.rows = matrices.rows
        self.embed = matrices.embed
        self.rms_norm = matrices.rms_norm
        self.linear = matrices.linear
        self.softcap = matrices.softcap
        self.activate = matrices.activate
        self.activate_halves = matrices.activate_halves
        self.scale = matrices.scale

        experts = ExpertOps(launch)
        self.route = experts.route
        self.experts = experts.experts
        self.gate = experts.gate

        self.short_conv = ConvOps(launch).short_conv
        delta = DeltaOps(launch)
        self.gated_delta = delta.gated_delta
        self.mamba2 = delta.mamba2
        self.advance_delta = delta.advance_delta
        self.check_recurrent = plain.check_recurrent
        self.assign = plain.assign
        self.keep_states = plain.keep_states
        self.restore_states = plain.restore_states
        self.empty = plain.empty

        heads = HeadOps(launch)
        self.prepare = heads.prepare
        self.transform_heads = heads.transform_heads
        self.place_kv = heads.place_kv
        self.copy_full = heads.copy_full
        self.of_encoders = EncoderOps(launch, heads)

        caches = CacheOps(plain)
        self.cache_bytes = caches.cache_bytes
        self.cache = caches.cache
        self.in_numpy = caches.in_numpy
        self.buffer = plain.buffer
        self.append_kv = plain.append_kv  # used only by calibration; other paths use `place_kv`
        attention = AttentionOps(launch, plain)
        self.spans = attention.spans
        self.attention = attention.attention
        self.decode_blocks = attention.decode_blocks
        encoding = EncodingOps(launch, plain)
        self.round_trip = encoding.round_trip
        self.encode_blocks = encoding.encode_blocks
        self.read_blocks = plain.read_blocks
        self.write_blocks = plain.write_blocks
        self.read_full = plain.read_full
        self.write_full = plain.write_full

        self.run_graph = Graphs(launch).run

        self.pack_sampler_inputs = plain.pack_sampler_inputs
        self.to_device = plain.to_device
        self.to_host = plain.to_host
        self.wait = plain.wait
        self.free_memory = plain.free_memory
        self.work_bytes = plain.work_bytes
        self.set_aside = plain.set_aside

    def warm_up(self) -> WarmUp:
        launch = WarmUpLauncher(self._launch)
        ops = copy(self)
        ops._compose(self._plain, launch)
        ops.load, ops.load_experts = ops._matrices.load_shapes, ops._matrices.load_expert_shapes
        return WarmUp(ops, launch.wait, (), short_prompts(launch.level))

    def room_beside(self, weights: int) -> int:
        return host_memory.room_beside(weights)

    def of_layer(self, layer: int) -> NativeOps:
        return self

    def threads(self) -> Threads:
        """The number of threads; the reason, which also names the CPU level and kernels that failed to compile."""
        number, why, library = self._count.number, self._count.why, self._launch.library
        if (started := workers().start(number)) < number:
            number, why = started, f"{why}: {number}, of which the system starts no more"
        why = f"{why}; kernels compiled for {library.level.name}"
        if failed := library.failed:
            why += f"; without {', '.join(failed)}, which cannot be compiled"
        return Threads(number, why, tuple(library.names))

    def kept_as(self, format: WeightFormat) -> WeightFormat:
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
