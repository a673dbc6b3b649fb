"""The launches of a step of generation, without a GPU: the ops decide as on a real one, and a device notes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.gpu.shares import SLICE, Plan
from polarlm.bench.gpu.weights import MIXED, has_larger_types
from polarlm.engine import codecs
from polarlm.engine.backends.cuda import launch_configs, packed
from polarlm.engine.backends.cuda.device.kernel_source import can_read
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.kv import CacheFormat, HeadTransform, KVLocation, SpanView
from polarlm.engine.config import SamplingParams
from polarlm.engine.sampling.sample import SamplerInput, resolve
from polarlm.engine.weight_formats import Linear, Matrix, available, get
from polarlm.model_loaders.config import GenerationDefaults, ModelConfig

BLOCK_SIZE = 64
LIBRARY = "gemm"  # a product by a library


@dataclass(frozen=True)
class Launch:
    """kernel: its name without `_kernel`, or LIBRARY. activations: bytes of the float32 and 16-bit arrays
    among its arguments. inputs: bytes of the first array that it reads, which in a product is x; blocks of one column
    of the grid read all of it. shared: bytes of a block's dynamic shared memory. flops: of a library's product."""

    kernel: str
    text: str
    grid: tuple[int, ...]
    threads: int
    activations: int
    inputs: int = 0
    shared: int = 0
    flops: int = 0


class PaperDevice:
    """See `engine.backends.cuda.device.Device`. Nothing is computed; every launch is noted."""

    name = "a GPU on paper"
    overlaps = False

    def __init__(self, processors: int, shared_memory: int):
        self.processors, self.shared_memory = processors, shared_memory
        self.launches: list[Launch] = []

    def memory(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)  # the system gives no memory to what is never written

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def from_host(self, x: np.ndarray) -> np.ndarray:
        return x.copy()

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return x.copy()

    def to_host_later(self, x: np.ndarray) -> tuple[np.ndarray, Callable[[], np.ndarray]]:
        return x, x.copy

    def wait(self) -> None:
        """Nothing runs."""

    def launch(
        self, kernel: str, text: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        inputs = next((arg.nbytes for arg in args[1:] if isinstance(arg, np.ndarray)), 0)
        name, moved = kernel.removesuffix("_kernel"), _activations(args)
        self.launches.append(Launch(name, text, tuple(grid), block[0], moved, inputs, shared))

    def expect(self, text: str) -> None:
        """Nothing is compiled."""

    def wait_for(self, text: str) -> None:
        """No text is expected."""

    def gemm(self, y: np.ndarray, x: np.ndarray, weight: np.ndarray, *, add: bool) -> None:
        flops = 2 * x.shape[0] * x.shape[1] * y.shape[1]
        self.launches.append(Launch(LIBRARY, "", (1,), 0, _activations([y, x]) + weight.nbytes, flops=flops))

    def run_graph(self, key: Hashable, work: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        return work(*inputs)

    def set_aside(self, size: int) -> None:
        """There is no memory to keep."""


def _activations(args: Sequence[Any]) -> int:
    """Bytes of the arrays of float32, or of 16 bits, among `args`."""
    kinds = np.float32, np.float16, np.uint16
    return sum(arg.nbytes for arg in args if isinstance(arg, np.ndarray) and arg.dtype in kinds)


@dataclass(frozen=True)
class Part:
    """A part of a step or of a prompt. repeats: how often it is there. bytes: what one of them must read from memory:
    weights, or codes and full-precision blocks. products: the number of weights and the bytes of each matrix. units: of
    attention in a step, which all multiprocessors share (see cuda/attention/shares.cuh); unit_tokens: of one. prompt:
    tokens of the prompt whose attention this is.
    """

    name: str
    repeats: int
    launches: Sequence[Launch]
    bytes: int
    products: Sequence[tuple[int, int]] = ()
    units: int = 0
    unit_tokens: int = BLOCK_SIZE
    prompt: int = 0


def known_weights() -> tuple[str, ...]:
    """Formats of weights that a step can have: those that kernels read, and the mixture. The engine makes f32 f16."""
    return MIXED, *(name for name in available() if name != "f32" and can_read(name))


def matrix_formats(weights: str, name: str, layers: int) -> list[tuple[int, tuple[str, ...]]]:
    """(how often, formats) of the matrix `name` of a model; of two formats the second is that of the values."""
    count = 1 if name in ("embedding", "head") else layers
    if weights != MIXED:
        return [(count, (weights,))]
    if name == "head":
        return [(1, ("q6_k",))]
    if name not in ("qkv", "down"):
        return [(count, ("q4_k",))]
    larger = sum(has_larger_types(layer, layers) for layer in range(layers))
    return [(layers - larger, ("q4_k",)), (larger, ("q4_k", "q6_k") if name == "qkv" else ("q6_k",))]


class Notes:
    """The parts of a forward pass, noted as their kernels are launched. weight: one of `known_weights`."""

    def __init__(self, config: ModelConfig, weight: str, device: PaperDevice):
        self.parts: list[Part] = []
        self.ops = CudaOps(device)
        self._config, self._weight, self._device = config, weight, device

    def note(self, name: str, repeats: int, work: Callable[[], Any], nbytes: int = 0, **more: Any) -> Any:
        """What `work` returns. nbytes, more: of the part."""
        first = len(self._device.launches)
        result = work()
        self.parts.append(Part(name, repeats, self._device.launches[first:], nbytes, **more))
        return result

    def product(self, name: str, x: np.ndarray, rows: tuple[int, ...], times: int = 1, **given: Any) -> Any:
        """rows: of the matrices that may differ in their formats. times: that a layer has it."""
        choices = matrix_formats(self._weight, name, len(self._config.layers))
        for repeats, formats in choices:
            pieces = rows if len(formats) == len(rows) else (sum(rows),)
            w = Linear(tuple(matrix(*piece, x.shape[1]) for piece in zip(formats, pieces, strict=True)))
            own = name if len(choices) == 1 else f"{name} ({', '.join(formats)})"
            products = [(part.shape[0] * part.shape[1], part.data.nbytes) for part in w.parts]
            work = partial(self.ops.linear, x, w, **given)
            y = self.note(own, times * repeats, work, sum(nbytes for _, nbytes in products), products=products)
        return y

    def following(self, name: str, rows: int, columns: int) -> Linear:
        """The matrix `name` for the op before it, as `then`."""
        ((_, (taken, *_)), *_) = matrix_formats(self._weight, name, len(self._config.layers))
        return Linear((matrix(taken, rows, columns),))

    def embed(self, ids: np.ndarray, times: int = 1) -> np.ndarray:
        ((_, (embedded,)),) = matrix_formats(self._weight, "embedding", len(self._config.layers))
        config = self._config
        table = matrix(embedded, config.vocab_size, config.hidden_size)
        nbytes = table.data.nbytes // config.vocab_size * len(ids)
        return self.note("embedding", times, lambda: self.ops.embed(table, ids), nbytes)

    def choose(self, logits: np.ndarray) -> None:
        sampler_input = SamplerInput(resolve(SamplingParams(), GenerationDefaults()), [], 0.5, self._config.vocab_size)
        sampler_inputs = [sampler_input] * len(logits)
        self.note(
            "sampling", 1, lambda: self.ops.sample(logits, self.ops.pack_sampler_inputs(sampler_inputs)), logits.nbytes
        )


def cache_format(config: ModelConfig, cache_type: CacheType) -> CacheFormat:
    """Of a layer."""
    key, value = codecs.get(cache_type.key), codecs.get(cache_type.value)
    mean_bits = 8 if cache_type.key_conditioning and cache_type.key != codecs.FULL else 0
    return CacheFormat(
        key, value, None, None, mean_bits, BLOCK_SIZE, config.attention.kv_heads, config.attention.head_dim
    )


def head_transform(config: ModelConfig, cache_type: CacheType) -> HeadTransform:
    """Of a layer: the rotations of its codecs."""
    rotations = (codecs.get(name).rotation(config.attention.head_dim) for name in (cache_type.key, cache_type.value))
    return HeadTransform(config.attention.kv_heads, None, *rotations)


def step_parts(
    config: ModelConfig, weight: str, cache_type: CacheType, context: int, batch: int, device: PaperDevice
) -> list[Part]:
    """The parts of a step of `batch` sequences of `context` tokens each. weight: one of `known_weights`.

    Raises EngineError for a cache type without kernels.
    """
    notes, e, dim = Notes(config, weight, device), config.hidden_size, config.attention.head_dim
    ops, note, product = notes.ops, notes.note, partial(notes.product, recorded=True)
    x = notes.embed(np.zeros(batch, np.int32))
    norm = np.ones(e, np.float32), config.norm_eps
    heads = config.attention.heads + 2 * config.attention.kv_heads
    qkv = product("qkv", x, ((heads - config.attention.kv_heads) * dim, config.attention.kv_heads * dim), norm=norm)
    qkv = qkv.reshape(batch, heads, dim)

    shape = cache_format(config, cache_type)
    cache = ops.cache(shape, 1, 2)
    quantized_bytes, full_bytes = ops.cache_bytes(shape)
    (transform,) = ops.prepare([head_transform(config, cache_type)])
    newest = context - 1
    start = newest // BLOCK_SIZE * BLOCK_SIZE
    ids_of_blocks = [0] * (start // BLOCK_SIZE - 1)
    views = [
        SpanView(slice(row, row + 1), newest, KVLocation(None, 1), start, 0, ids_of_blocks, BLOCK_SIZE)
        for row in range(batch)
    ]  # fmt: skip
    spans = ops.spans(views, BLOCK_SIZE)
    rope = np.zeros((batch, dim // 2), np.float32), np.zeros((batch, dim // 2), np.float32)
    q = note("place_kv", len(config.layers), lambda: ops.place_kv(qkv, rope, transform, cache, spans))
    held = batch * (len(ids_of_blocks) * quantized_bytes + 2 * full_bytes)
    group, all_full = (
        config.attention.heads // config.attention.kv_heads,
        not any(side.is_quantized for side in cache.layouts),
    )
    plan = Plan(
        [spans.header(row) for row in range(batch)],
        config.attention.kv_heads,
        group,
        launch_configs.decode_cells(group)[1],
        BLOCK_SIZE,
        device.processors,
        all_full=all_full,
    )
    out = notes.following("out", e, config.attention.heads * dim)
    mixed = note(
        "attention",
        len(config.layers),
        lambda: ops.attention(q, cache, spans, dim**-0.5, None, transform, out),
        held,
        units=plan.total,
        unit_tokens=SLICE if all_full else BLOCK_SIZE,
    )
    product("out", mixed.reshape(batch, -1), (e,), residual=x)
    down = notes.following("down", e, config.ffn.size)
    activated = product("gate_up", x, (2 * config.ffn.size,), norm=norm, activation=config.ffn.activation, then=down)
    product("down", activated, (e,), residual=x)
    logits = product("head", x, (config.vocab_size,), norm=norm)
    notes.choose(logits)
    return notes.parts


def matrix(name: str, rows: int, columns: int) -> Matrix:
    """A matrix in the format `name`, as the device holds it; its values are not written."""
    format = get(name)
    shape = packed.tiles(format, rows, columns) if packed.is_packed(format) else (rows, format.size(columns))
    return Matrix(format, np.empty(shape, np.uint8), (rows, columns))
