"""The launches of a step and of a prompt, without a GPU: the ops decide as on a real one, and a trace notes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.gpu.shares import SLICE, Plan
from polarlm.bench.gpu.weights import MIXED, has_larger_types
from polarlm.engine import codecs
from polarlm.engine.backends.cuda import launch_configs, packed
from polarlm.engine.backends.cuda.device import tracing
from polarlm.engine.backends.cuda.device.kernel_source import can_read
from polarlm.engine.backends.cuda.device.tracing import TracingArray, TracingDevice
from polarlm.engine.backends.cuda.kv.cache import SpanTable
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan, DeltaWeights
from polarlm.engine.backends.kv import CacheFormat, HeadTransform, KVLocation, SpanView
from polarlm.engine.config import SamplingParams
from polarlm.engine.sampling.sample import SamplerInput, resolve
from polarlm.engine.state.delta import DeltaShape
from polarlm.engine.weight_formats import ExpertLinear, Linear, Matrix, available, get
from polarlm.model_loaders.config import Experts, GatedDelta, GenerationDefaults, ModelConfig

BLOCK_SIZE = 64
MIXED_EXPERTS = "mxfp4_moe"  # as in files of gpt-oss: experts in MXFP4, all other matrices in Q8_0
LIBRARY = tracing.GEMM  # a product by a library
DELTA = ("delta_blocks", "delta_scan")  # kernels of prompts that multiply in float32


@dataclass(frozen=True)
class Launch:
    """kernel: its name without `_kernel`, or LIBRARY. activations: bytes of the float32 and 16-bit arrays
    among its arguments. inputs: bytes of x, in a product, that the blocks of one column of the grid read: all of it, or
    of each pair of a row and an expert that row. shared: bytes of a block's dynamic shared memory. flops: of a
    library's product."""

    kernel: str
    text: str
    grid: tuple[int, ...]
    threads: int
    activations: int
    inputs: int = 0
    shared: int = 0
    flops: int = 0


def _launch(traced: tracing.Launch) -> Launch:
    arrays = [arg for arg in traced.args if isinstance(arg, TracingArray)]
    moved = sum(x.nbytes for x in arrays if x.dtype in (np.float32, np.float16, np.uint16))
    if traced.kernel == LIBRARY:
        y, x, _ = arrays
        return Launch(LIBRARY, "", (1,), 0, moved, flops=2 * x.size * y.shape[1])
    name, grid = traced.kernel.removesuffix("_kernel"), tuple(traced.grid)
    inputs = next((arg.nbytes for arg in traced.args[1:] if isinstance(arg, TracingArray)), 0)
    flops = 0
    if "#define EXPERTS 1" in traced.text:  # y has a row for each pair
        y, x, *_ = arrays
        inputs = len(y) * x.nbytes // len(x)
        flops = 2 * y.size * x.shape[1] * (2 if "#define ACTIVATION " in traced.text else 1)
    if name == "delta_results":  # it reads as many gates as results, and few of the other numbers of a row
        moved = 3 * arrays[0].nbytes
    if name == "delta_inputs":
        moved = 2 * arrays[0].nbytes
    if name in DELTA:
        flops = _delta_flops(name, *(array.shape for array in arrays if array.ndim == 4 and array.dtype == np.float32))
    return Launch(name, traced.text, grid, traced.block[0], moved, inputs, traced.shared, flops)


def _delta_flops(kernel: str, *shapes: tuple[int, ...]) -> int:
    """Of the kernels of a prompt. shapes: of delta_blocks first that of queries, of both last those of reads, news and
    weights."""
    (blocks, heads, n, a), (*_, d) = shapes[-3:-1]
    if kernel == "delta_blocks":
        keys = shapes[0][1]
        return blocks * (4 * keys * n * n * a + heads * n * n * (a + d))
    return 2 * blocks * heads * n * d * (3 * a + n)


class Multiplied(NamedTuple):
    """A product with weights. weights: how many are multiplied by rows that share them. bytes: of these weights, as
    often as they are read. distinct: bytes that are read from memory, where rows choose some experts alike."""

    weights: int
    bytes: int
    distinct: int


@dataclass(frozen=True)
class Part:
    """A part of a step or of a prompt. repeats: how often it is there. bytes: what one of them must read from memory:
    weights, or codes and full-precision blocks. products: of its kernels in `cuda/linear`, in their order. units: of
    attention in a step, which all multiprocessors share (see cuda/attention/shares.cuh); unit_tokens: of one. prompt:
    tokens of the prompt whose attention this is; visible: how many of them all of its tokens see together.
    """

    name: str
    repeats: int
    launches: Sequence[Launch]
    bytes: int
    products: Sequence[Multiplied] = ()
    units: int = 0
    unit_tokens: int = BLOCK_SIZE
    prompt: int = 0
    visible: int = 0


def known_weights() -> tuple[str, ...]:
    """Formats of weights that a step can have: those that kernels read, and the mixtures. The engine makes f32 f16."""
    return MIXED, MIXED_EXPERTS, *(name for name in available() if name != "f32" and can_read(name))


def matrix_formats(weights: str, name: str, layers: int) -> list[tuple[int, tuple[str, ...]]]:
    """(how often, formats) of the matrix `name` of a model; of two formats the second is that of the values."""
    count = 1 if name in ("embedding", "head") else layers
    if name == "router":
        return [(count, ("f16",))]
    if weights == MIXED_EXPERTS:
        return [(count, ("mxfp4" if name.startswith("experts") else "q8_0",))]
    if weights != MIXED:
        return [(count, (weights,))]
    if name == "head":
        return [(1, ("q6_k",))]
    if name not in ("qkv", "down", "experts down"):
        return [(count, ("q4_k",))]
    larger = sum(has_larger_types(layer, layers) for layer in range(layers))
    return [(layers - larger, ("q4_k",)), (larger, ("q4_k", "q6_k") if name == "qkv" else ("q6_k",))]


class Seen(NamedTuple):
    """What layers with one window attend to. spans: of each time that a layer takes rows. read: of their part."""

    spans: Sequence[SpanTable]
    read: Mapping[str, int]


class Delta(NamedTuple):
    """What layers with gated delta rules take. spans: int32 (spans, 4), see DeltaSpan. slots: states."""

    spans: np.ndarray
    slots: int
    is_prompt: bool

    def read(self, rule: GatedDelta) -> int:
        """Bytes that are read of states: matrices, and what the tokens of the current block have added."""
        of_token = rule.key_heads * rule.key_dim + rule.value_heads * (rule.value_dim + 1)
        matrices = rule.value_heads * rule.key_dim * rule.value_dim
        return 4 * sum(matrices + span.place * of_token for span in map(DeltaSpan._make, self.spans.tolist()))


class _Pass:
    """The parts of a forward pass of a model, noted as their kernels are launched. Layers are alike."""

    def __init__(self, config: ModelConfig, weight: str, cache_type: CacheType, processors: int, shared_memory: int):
        """weight: one of `known_weights`. Raises EngineError for a cache type without kernels."""
        self.parts: list[Part] = []
        self.config, self._weight, attention = config, weight, config.attention
        self._launches: list[Launch] = []
        device = TracingDevice(lambda traced: self._launches.append(_launch(traced)), processors, shared_memory)
        self.array, self.ops = device.empty, CudaOps(device)
        key, value = codecs.get(cache_type.key), codecs.get(cache_type.value)
        mean_bits = 8 if cache_type.key_conditioning and cache_type.key != codecs.FULL else 0
        self.format = CacheFormat(key, value, None, None, mean_bits, BLOCK_SIZE, attention.kv_heads, attention.head_dim)
        self.cache = self.ops.cache(self.format, 1, 2)
        key_rotation, value_rotation = (codec.rotation(attention.head_dim) for codec in (key, value))
        (self._transform,) = self.ops.prepare([HeadTransform(attention.kv_heads, None, key_rotation, value_rotation)])

    def embed(self, tokens: int) -> TracingArray:
        """(tokens, E)."""
        (table,) = self._one("embedding", self.config.vocab_size, self.config.hidden_size).parts
        ids, nbytes = self.array((tokens,), np.int32), table.data.nbytes // self.config.vocab_size * tokens
        return self._note("embedding", 1, lambda: self.ops.embed(table, ids), nbytes)

    def run(
        self,
        x: TracingArray,
        place: str,
        seen: Mapping[int | None, Seen],
        delta: Delta,
        *,
        outputs: int,
        recorded: bool,
    ) -> list[Part]:
        """The parts of a pass of x (T, E), after its embedding.

        place: name of the part that places keys and values. seen: of layers with each window. delta: of layers with
        gated delta rules. outputs: rows that have logits. recorded: see `Ops.linear`.
        """
        config, attention, ops, note = self.config, self.config.attention, self.ops, self._note
        heads, kv_heads, dim, layers = attention.heads, attention.kv_heads, attention.head_dim, len(config.attentions)
        (rows, e), spans = x.shape, next(iter(seen.values())).spans
        times = len(spans)
        product = partial(self._product, times=times, recorded=recorded)
        norm = self.array((e,), np.float32), config.norm_eps
        for rule, count in Counter(
            layer.mixer for layer in config.layers if isinstance(layer.mixer, GatedDelta)
        ).items():
            self._delta_rule(x, rule, count, delta, norm=norm, times=times, recorded=recorded)
        qkv = product("qkv", x, ((heads + kv_heads) * dim, kv_heads * dim), norm=norm, layers=layers)
        qkv = qkv.reshape(rows, heads + 2 * kv_heads, dim)
        rope = self.array((rows, dim // 2), np.float32), self.array((rows, dim // 2), np.float32)
        q = note(place, times * layers, lambda: ops.place_kv(qkv, rope, self._transform, self.cache, spans[0]))
        out = self._one("out", e, heads * dim)
        for mixer, count in Counter(config.attentions.values()).items():
            given = mixer.score_scale, mixer.window, self._transform, out
            more = {
                "softcap": mixer.softcap,
                "sink_scores": self.array((heads,), np.float32) if mixer.sink_scores else None,
            }
            attend = partial(_each, partial(ops.attention, q, self.cache), seen[mixer.window].spans, *given, **more)
            name = "attention" if mixer.window is None else f"attention, window of {mixer.window}"
            mixed = note(name, count, attend, **seen[mixer.window].read)
        mixed = mixed.reshape(rows, -1)
        if attention.output_gate:
            gate = product("output gate", x, (heads * dim,), norm=norm, layers=layers)
            note("gating", times * layers, lambda: ops.gate(mixed, gate))
        product("out", mixed, (e,), residual=x, layers=layers)
        if isinstance(config.ffn, Experts):
            self._experts(x, config.ffn, times, norm=norm, recorded=recorded)
        else:
            activation, down = config.ffn.activation, self._one("down", e, config.ffn.size)
            activated = product("gate_up", x, (2 * config.ffn.size,), norm=norm, activation=activation, then=down)
            product("down", activated, (e,), residual=x)
        logits = self._product("head", x[rows - outputs :], (config.vocab_size,), norm=norm, recorded=recorded)
        self._choose(logits)
        return self.parts

    def _delta_rule(
        self, x: TracingArray, rule: GatedDelta, layers: int, delta: Delta, *, times: int, recorded: bool, norm: Any
    ) -> None:
        """The parts of layers with a gated delta rule."""
        product = partial(self._product, times=times, recorded=recorded, layers=layers)
        inner, heads = rule.value_heads * rule.value_dim, rule.value_heads
        projected = product("delta inputs", x, (rule.channels + inner + 2 * heads,), norm=norm)
        conv, norm_weight = (
            self.array((rule.width, rule.channels), np.float32),
            self.array((rule.value_dim,), np.float32),
        )
        decay, bias = (self.array((heads,), np.float32) for _ in range(2))
        w = DeltaWeights(conv, decay, bias, norm_weight, self.config.norm_eps, rule.tiled)
        arrays = DeltaShape(rule).full_arrays(BLOCK_SIZE)
        slots = DeltaSlots(*(self.array((delta.slots, *one.shape), np.float32) for one in arrays))
        spans: Any = delta.spans if delta.is_prompt else self.array(delta.spans.shape, np.int32)
        kept = (self.array((0, *array.shape[1:]), np.float32) for array in (slots.matrices, slots.inputs))
        ends = DeltaEnds([], *kept) if delta.is_prompt else None
        work = partial(self.ops.gated_delta, projected, w, slots, spans, ends)
        y = self._note("delta rule", times * layers, work, delta.read(rule))
        product("delta out", y, (x.shape[1],), residual=x)

    def _note(self, name: str, repeats: int, work: Callable[[], Any], bytes: int = 0, **more: Any) -> Any:
        """What `work` returns. bytes, more: of the part."""
        first = len(self._launches)
        result = work()
        self.parts.append(Part(name, repeats, self._launches[first:], bytes, **more))
        return result

    def _product(
        self, name: str, x: TracingArray, rows: tuple[int, ...], times: int = 1, layers: int = 0, **given: Any
    ) -> Any:
        """rows: of the matrices that may differ in their formats. times: that a layer has it. layers: that have it; 0
        for all."""
        choices = matrix_formats(self._weight, name, layers or len(self.config.layers))
        for repeats, formats in choices:
            pieces = rows if len(formats) == len(rows) else (sum(rows),)
            w = Linear(tuple(self._matrix(*piece, x.shape[1]) for piece in zip(formats, pieces, strict=True)))
            own = name if len(choices) == 1 else f"{name} ({', '.join(formats)})"
            products = [_whole(part) for part in w.parts]
            work = partial(self.ops.linear, x, w, **given)
            y = self._note(own, times * repeats, work, sum(part.bytes for part in products), products=products)
        return y

    def _experts(self, x: TracingArray, ffn: Experts, times: int, *, norm: Any, recorded: bool) -> None:
        """The parts of a mixture of experts. Rows choose independently of each other, and all experts alike."""
        logits = self._product("router", x, (ffn.count,), times, norm=norm, recorded=recorded)
        bias = self.array((ffn.count,), np.float32) if ffn.choice_bias else None
        (rows, e), layers = x.shape, len(self.config.layers)
        routing = self._note("choice of experts", times * layers, lambda: self.ops.route(logits, ffn, bias))
        ((_, (format, *_)), *_) = matrix_formats(self._weight, "experts", layers)
        for repeats, (down_format,) in matrix_formats(self._weight, "experts down", layers):
            shapes = (format, 2 * ffn.size, e), (down_format, e, ffn.size)
            matrices = [self._matrix(name, ffn.count * out, width) for name, out, width in shapes]
            biases = (self.array((ffn.count, out), np.float32) if ffn.bias else None for _, out, _ in shapes)
            gate_up, down = (ExpertLinear(ffn.count, (w,), own) for w, own in zip(matrices, biases, strict=True))
            work = partial(self.ops.experts, x, routing, gate_up, down, ffn.activation, norm=norm, residual=x)
            products = [
                _chosen(_whole(w), ffn, min(rows - first, launch_configs.EXPERT_ROWS))
                for first in range(0, rows, launch_configs.EXPERT_ROWS)
                for w in matrices
            ]
            own = "experts" if format == down_format else f"experts ({format}, {down_format})"
            nbytes = sum(part.distinct for part in products)
            self._note(own, times * repeats, partial(work, recorded=recorded), nbytes, products=products)

    def _one(self, name: str, rows: int, columns: int) -> Linear:
        """The matrix `name`; where layers have it in several formats, in that of the first."""
        ((_, (taken, *_)), *_) = matrix_formats(self._weight, name, len(self.config.layers))
        return Linear((self._matrix(taken, rows, columns),))

    def _choose(self, logits: TracingArray) -> None:
        sampler_input = SamplerInput(resolve(SamplingParams(), GenerationDefaults()), [], 0.5, self.config.vocab_size)
        sampler_inputs = self.ops.pack_sampler_inputs([sampler_input] * len(logits))
        self._note("sampling", 1, lambda: self.ops.sample(logits, sampler_inputs), logits.nbytes)

    def _matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """A matrix in the format `name`, as the device holds it."""
        format = get(name)
        shape = packed.tiles(format, rows, columns) if packed.is_packed(format) else (rows, format.size(columns))
        return Matrix(format, self.array(shape, np.uint8), (rows, columns))


def _each(work: Callable[..., Any], spans: Sequence[SpanTable], *given: Any, **more: Any) -> Any:
    return [work(one, *given, **more) for one in spans][-1]


def _whole(matrix: Matrix) -> Multiplied:
    return Multiplied(matrix.shape[0] * matrix.shape[1], matrix.data.nbytes, matrix.data.nbytes)


def _chosen(of: Multiplied, ffn: Experts, rows: int) -> Multiplied:
    """What `rows` rows multiply with a matrix `of` all experts."""
    pairs = rows * ffn.top_k
    chosen = ffn.count * (1 - (1 - ffn.top_k / ffn.count) ** rows)  # the expected number of experts
    read = float(pairs)
    if launch_configs.groups_pairs(pairs, ffn.count):
        config, _, _ = launch_configs.gemm_groups(pairs, ffn.count)
        read = chosen * math.ceil(pairs / chosen / int(config.defines["ROWS"]))
    one, distinct = read / ffn.count, chosen / ffn.count
    return Multiplied(round(one * of.weights), round(one * of.bytes), round(distinct * of.bytes))


def step_parts(
    config: ModelConfig,
    weight: str,
    cache_type: CacheType,
    context: int,
    batch: int,
    processors: int,
    shared_memory: int,
) -> list[Part]:
    """The parts of a step of `batch` sequences of `context` tokens each. weight: one of `known_weights`.

    Raises EngineError for a cache type without kernels.
    """
    step = _Pass(config, weight, cache_type, processors, shared_memory)
    quantized_bytes, full_bytes = step.ops.cache_bytes(step.format)
    attention = config.attention
    group = attention.heads // attention.kv_heads
    all_full = not any(side.is_quantized for side in step.cache.layouts)
    cells = launch_configs.decode_cells(group)[1]

    def seen(window: int | None) -> Seen:
        views = [_view(row, context, window) for row in range(batch)]
        spans = step.ops.spans(views, BLOCK_SIZE)
        headers = [spans.header(row) for row in range(batch)]
        plan = Plan(headers, attention.kv_heads, group, cells, BLOCK_SIZE, processors, all_full=all_full)
        full = 1 if views[0].sink is None else 2
        nbytes = batch * (len(views[0].table) * quantized_bytes + full * full_bytes)
        return Seen([spans], {"bytes": nbytes, "units": plan.total, "unit_tokens": SLICE if all_full else BLOCK_SIZE})

    windows = {mixer.window: seen(mixer.window) for mixer in config.attentions.values()}
    spans = [DeltaSpan(row, row, 1, (context - 1) % BLOCK_SIZE) for row in range(batch)]
    delta = Delta(np.array(spans, np.int32), batch, is_prompt=False)
    return step.run(step.embed(batch), "place_kv", windows, delta, outputs=batch, recorded=True)


def _view(row: int, context: int, window: int | None) -> SpanView:
    """What the newest token of the sequence in `row` sees of `context` tokens. What its window lacks is released."""
    newest = context - 1
    start = newest // BLOCK_SIZE * BLOCK_SIZE
    first = 0 if window is None else max(0, context - window) // BLOCK_SIZE * BLOCK_SIZE
    sink, table_start = (0, BLOCK_SIZE) if first == 0 else (None, first)
    ids = [0] * ((start - table_start) // BLOCK_SIZE)
    return SpanView(slice(row, row + 1), newest, KVLocation(None, 1), start, sink, ids, table_start)


def prompt_parts(
    config: ModelConfig, weight: str, cache_type: CacheType, tokens: int, processors: int, shared_memory: int
) -> list[Part]:
    """The parts of a first prompt up to its first token, without the encoding of its blocks. weight: one of
    `known_weights`. Layers take as many rows at a time as the engine gives them; the last of these may be fewer, and
    count as the others.

    Raises EngineError for a cache type without kernels.
    """
    prompt = _Pass(config, weight, cache_type, processors, shared_memory)
    rows, buffer = min(tokens, prompt.ops.prefill_rows), prompt.ops.buffer(prompt.format, tokens)
    spans = [
        prompt.ops.spans([SpanView(slice(0, rows), first, KVLocation(buffer, 0), 0, None, (), 0)], BLOCK_SIZE)
        for first in range(0, tokens, rows)
    ]

    def seen(window: int | None) -> Seen:
        unseen = 0 if window is None else max(0, tokens - window)
        visible = tokens * (tokens + 1) // 2 - unseen * (unseen + 1) // 2
        return Seen(spans, {"prompt": tokens, "visible": visible})

    windows = {mixer.window: seen(mixer.window) for mixer in config.attentions.values()}
    delta = Delta(np.array([DeltaSpan(0, 0, rows, 0)], np.int32), 1, is_prompt=True)
    return prompt.run(prompt.embed(tokens)[:rows], "heads", windows, delta, outputs=1, recorded=False)
