"""Times of a whole model on a GPU: its matrices one by one, steps of generation, the prefill of a prompt."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import numpy as np

from polarlm.bench.gpu.model import Cell, RandomModel
from polarlm.bench.gpu.setup import Gpu, Sizes
from polarlm.bench.gpu.shapes import parameters
from polarlm.engine.backends.cuda.device import Array
from polarlm.engine.errors import EngineError
from polarlm.engine.model.forward import Transformer
from polarlm.engine.params import SamplingParams
from polarlm.engine.sampling.sample import Sampled, SamplerInput, resolve
from polarlm.engine.state.store import SequenceKV
from polarlm.model_loaders.config import GenerationDefaults

# Steps before the measured ones: the first compiles, the second is recorded and fills a block.
_FIRST_STEPS = 4
_PREFILLS = 3  # the first compiles


@dataclass(frozen=True)
class MatrixTime:
    """Seconds of x (rows, in) times a matrix of `bytes` bytes, mean of all layers.

    weights: a key of `bench.gpu.model.FORMATS`.
    """

    weights: str
    name: str
    rows: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, one token per sequence. bytes: its reads of weights, codes and full-precision blocks.

    weights: a key of `bench.gpu.model.FORMATS`. context, shortest: tokens of the first sequence and of the others.
    seconds: the mean over a whole block, with its encoding, if the host waits for each step's tokens; median: the
    median of these steps; device: the recorded graph alone, without the host; ahead: the mean over a whole block if
    each step starts before the previous one's tokens are on the host, as in the engine. overlapped: whether launches
    overlap.
    """

    weights: str
    context: int
    shortest: int
    batch: int
    seconds: float
    median: float
    device: float
    bytes: int
    ahead: float
    overlapped: bool = False


@dataclass(frozen=True)
class PrefillTime:
    """Seconds and FLOPs of a prompt up to its first token, and of one layer's attention."""

    weights: str
    tokens: int
    seconds: float
    matrix_flops: float
    attention_seconds: float
    attention_flops: float


def measure_matrix(gpu: Gpu, sizes: Sizes, random: RandomModel, name: str, rows: int) -> MatrixTime:
    """The mean time of a product with each layer's matrix in turn, or with the head three times: more than caches
    hold."""
    ops, weights = random.ops, random.model.weights
    matrices = [weights.head] * 3 if name == "head" else [layer.matrices[name] for layer in weights.layers]
    x = ops.to_device(np.random.default_rng(4).standard_normal((rows, matrices[0].shape[1]), np.float32))

    def all_matrices(_: Array) -> Array:
        for matrix in matrices:
            y = ops.linear(x, matrix, recorded=True)
        return y

    nothing = np.zeros(1, np.int32)
    seconds = gpu.clock.seconds(lambda: ops.run_graph((name, rows), all_matrices, [nothing]), sizes.runs)
    nbytes = sum(matrix.nbytes for matrix in matrices) // len(matrices)
    return MatrixTime(random.weights, name, rows, seconds / len(matrices), nbytes)


def measure_steps(gpu: Gpu, sizes: Sizes, random: RandomModel, cell: Cell) -> StepTime:
    """The times of steps near the contexts of the cell. Raises EngineError if its K/V do not fit."""
    if not random.fits[cell]:
        raise EngineError("its K/V do not fit into the memory that the weights leave")
    model, n = random.model, sizes.block_size
    sequences = [random.stored_sequence(context - n - 2) for context in cell]
    sampler_inputs, ids, times = [default_input(model)] * len(cell), [1] * len(cell), []
    try:
        with mock.patch.object(model.ops, "run_graph", wraps=model.ops.run_graph) as recorded:
            for _ in range(_FIRST_STEPS):
                ids = _step(model, sequences, ids, sampler_inputs)
            for _ in range(n):
                started = time.perf_counter()
                ids = _step(model, sequences, ids, sampler_inputs)
                times.append(time.perf_counter() - started)
            call = recorded.call_args.args
        device = gpu.clock.seconds(lambda: model.ops.run_graph(*call), sizes.runs)
        held = sum(model.store.bytes_held(sequence) for sequence in sequences)
        ahead = _seconds_ahead(model, sequences, ids, sampler_inputs)
    finally:
        for sequence in sequences:
            model.store.release(sequence)
    layers = (layer.matrices.values() for layer in model.weights.layers)
    read = sum(matrix.nbytes for matrix in (*itertools.chain(*layers), model.weights.head))
    return StepTime(
        *(random.weights, cell[0], min(cell), len(cell), statistics.fmean(times), statistics.median(times)),
        *(device, read + held, ahead, random.device.overlaps),
    )


def _seconds_ahead(
    model: Transformer, sequences: list[SequenceKV], ids: list[int], sampler_inputs: list[SamplerInput]
) -> float:
    """The mean seconds of as many steps as a block has tokens, each started before the previous one's tokens arrive."""
    count, spans = model.store.shape.block_size, [model.store.open_step(sequence) for sequence in sequences]
    step = model.step_ahead(spans, ids, sampler_inputs)
    started = time.perf_counter()
    for _ in range(count):
        model.store.commit_steps(spans)
        spans = [model.store.open_step(sequence) for sequence in sequences]
        last, step = step, model.step_ahead(spans, step, sampler_inputs)
        _tokens(last.wait())
    seconds = time.perf_counter() - started
    _tokens(step.wait())
    model.store.commit_steps(spans)
    return seconds / count


def _step(
    model: Transformer, sequences: list[SequenceKV], ids: list[int], sampler_inputs: list[SamplerInput]
) -> list[int]:
    spans = [model.store.open_step(sequence) for sequence in sequences]
    following = _tokens(model.step(spans, ids, sampler_inputs))
    model.store.commit_steps(spans)
    return following


def _tokens(chosen: list[Sampled]) -> list[int]:
    for token in chosen:
        if isinstance(token, EngineError):
            raise token
    return [token for token in chosen if isinstance(token, int)]


def default_input(model: Transformer) -> SamplerInput:
    return SamplerInput(resolve(SamplingParams(), GenerationDefaults()), [], 0.5, model.config.vocab_size)


def measure_prefill(gpu: Gpu, sizes: Sizes, random: RandomModel) -> PrefillTime:
    """The times of a forward pass of a random prompt, and of attention of all its rows in one layer."""
    model, config, tokens = random.model, random.config, sizes.prompt
    ids = np.random.default_rng(5).integers(config.vocab_size, size=tokens).tolist()
    seconds = min([_timed(lambda: _prefill(model, ids)) for _ in range(_PREFILLS)][1:])
    return PrefillTime(
        weights=random.weights,
        tokens=tokens,
        seconds=seconds,
        matrix_flops=2.0 * parameters(config)[0] * tokens,
        attention_seconds=_prompt_attention(gpu, sizes, random),
        # Two products; each row attends to itself and all earlier rows.
        attention_flops=4.0 * config.attention.heads * config.attention.head_dim * tokens * (tokens + 1) / 2,
    )


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _prefill(model: Transformer, ids: list[int]) -> int:
    """The token after the prompt. It reaches the host only when the device has finished."""
    sequence = model.store.new_sequence()
    span = model.store.open(sequence, len(ids))
    units = model.forward_units([span], ids, outputs=1)
    while True:
        try:
            next(units)
        except StopIteration as end:
            (token,) = _tokens(model.choose(end.value, [default_input(model)]))
            model.store.commit(span)
            model.store.release(sequence)
            return token


def _prompt_attention(gpu: Gpu, sizes: Sizes, random: RandomModel) -> float:
    """Seconds of one layer's attention over all rows of the prompt at once."""
    ops, store, config, tokens = random.ops, random.model.store, random.config, sizes.prompt
    rng, cache = np.random.default_rng(6), store.cache(0)
    sequence = store.new_sequence()
    span = store.open(sequence, tokens)
    spans = ops.spans([store.view(0, span, slice(0, tokens), 0)], sizes.block_size)

    def rows(heads: int) -> Array:
        return ops.to_device(rng.standard_normal((tokens, heads, config.attention.head_dim), np.float32))

    ops.append_kv(cache, spans, rows(config.attention.kv_heads), rows(config.attention.kv_heads))
    q = rows(config.attention.heads)

    def attend() -> Array:
        return ops.attention(q, cache, spans, config.attention.head_dim**-0.5, None)

    seconds = gpu.clock.seconds(attend, sizes.runs)
    store.abort(span)
    return seconds
