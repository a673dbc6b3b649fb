"""The launches of a step and of a prompt, without a GPU: the ops decide as on a real one, and a trace notes them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.gpu.launches import BLOCK_SIZE, Launch, Multiplied, Part, launch_of
from polarlm.bench.gpu.shares import SLICE, Plan
from polarlm.bench.gpu.weights import MIXED, has_larger_types
from polarlm.engine import codecs
from polarlm.engine.backends.cuda import launch_configs, packed
from polarlm.engine.backends.cuda.device.kernel_source import can_read
from polarlm.engine.backends.cuda.device.tracing import TracingArray, TracingDevice
from polarlm.engine.backends.cuda.kv.cache import SpanTable
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan, DeltaWeights, Mamba2Weights
from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, HeadTransform, KVLocation, SpanView
from polarlm.engine.errors import EngineError
from polarlm.engine.params import SamplingParams
from polarlm.engine.sampling.sample import SamplerInput, resolve
from polarlm.engine.state.recurrent.delta import DeltaShape
from polarlm.engine.weight_formats import ExpertLinear, Linear, Matrix, available, get
from polarlm.model_loaders.config import (
    Experts,
    GatedDelta,
    GatedMLP,
    GenerationDefaults,
    Mamba2,
    ModelConfig,
    Recurrent,
    is_gated,
)

MIXED_EXPERTS = "mxfp4_moe"  # as in files of gpt-oss: experts in MXFP4, all other matrices in Q8_0


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


class States(NamedTuple):
    """What layers with states take. spans: int32 (spans, 4), see DeltaSpan. slots: states."""

    spans: np.ndarray
    slots: int
    is_prompt: bool

    def read(self, mixer: Recurrent, key_heads: int) -> int:
        """Bytes of states: matrices, and what the tokens of the current block have added, with keys of so many
        heads."""
        of_token = key_heads * mixer.key_dim + mixer.value_heads * (mixer.value_dim + 1)
        matrices = mixer.value_heads * mixer.key_dim * mixer.value_dim
        return 4 * sum(matrices + span.place * of_token for span in map(DeltaSpan._make, self.spans.tolist()))


class _Pass:
    """The parts of a forward pass of a model, noted as their kernels are launched. Layers are alike."""

    def __init__(
        self,
        config: ModelConfig,
        weight: str,
        cache_type: CacheType,
        processors: int,
        shared_memory: int,
    ):
        """weight: one of `known_weights`. Raises EngineError for a cache type without kernels."""
        self.parts: list[Part] = []
        self.config, self._weight, attention = config, weight, config.attention
        self._launches: list[Launch] = []
        device = TracingDevice(lambda traced: self._launches.append(launch_of(traced)), processors, shared_memory)
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
        states: States,
        *,
        outputs: int,
        recorded: bool,
    ) -> list[Part]:
        """The parts of a pass of x (T, E), after its embedding.

        place: name of the part that places keys and values. seen: of layers with each window. states: of layers with
        gated delta rules or Mamba 2. outputs: rows that have logits. recorded: see `Ops.linear`.
        """
        config, attention, ops, note = self.config, self.config.attention, self.ops, self._note
        heads, kv_heads, dim, layers = attention.heads, attention.kv_heads, attention.head_dim, len(config.attentions)
        (rows, e), spans = x.shape, next(iter(seen.values())).spans
        times = len(spans)
        product = partial(self._product, times=times, recorded=recorded)
        norm = self.array((e,), np.float32), config.norm_eps
        for mixer, count in Counter(
            layer.mixer for layer in config.layers if isinstance(layer.mixer, Recurrent)
        ).items():
            self._recurrent(x, mixer, count, states, norm=norm, times=times, recorded=recorded)
        qkv = product("qkv", x, ((heads + kv_heads) * dim, kv_heads * dim), norm=norm, layers=layers)
        qkv = qkv.reshape(rows, heads + 2 * kv_heads, dim)
        rope = self.array((rows, dim // 2), np.float32), self.array((rows, dim // 2), np.float32)
        q = note(place, times * layers, lambda: ops.place_kv(qkv, rope, self._transform, self.cache, spans[0]))
        out = self._one("out", e, heads * dim)
        for one, count in Counter(config.attentions.values()).items():
            given = one.score_scale, one.window, self._transform, out
            more = {
                "softcap": one.softcap,
                "sink_scores": self.array((heads,), np.float32) if one.sink_scores else None,
            }
            attend = partial(_each, partial(ops.attention, q, self.cache), seen[one.window].spans, *given, **more)
            name = "attention" if one.window is None else f"attention, window of {one.window}"
            mixed = note(name, count, attend, **seen[one.window].read)
        mixed = mixed.reshape(rows, -1)
        if attention.output_gate:
            gate = product("output gate", x, (heads * dim,), norm=norm, layers=layers)
            note("gating", times * layers, lambda: ops.gate(mixed, gate))
        product("out", mixed, (e,), residual=x, layers=layers)
        for ffn, count in Counter(layer.ffn for layer in config.layers if layer.ffn is not None).items():
            if isinstance(ffn, Experts):
                self._experts(x, ffn, count, times=times, norm=norm, recorded=recorded)
            else:
                self._mlp(x, ffn, count, times=times, norm=norm, recorded=recorded)
        logits = self._product("head", x[rows - outputs :], (config.vocab_size,), norm=norm, recorded=recorded)
        self._choose(logits)
        return self.parts

    def encode(self, blocks: int, buffer: Any) -> None:
        """The encoding of so many blocks of every layer, a part of its own."""
        attention, layers = self.config.attention, len(self.config.attentions)
        read = 2 * 2 * blocks * BLOCK_SIZE * attention.kv_heads * attention.head_dim
        filled = FilledBlocks([self.cache], list(range(blocks)), [KVLocation(buffer, i) for i in range(blocks)])
        is_coded = self.format.codec_k.name != codecs.FULL
        self._note("encoding", layers, lambda: self.ops.encode_blocks([filled]), read, is_coded=is_coded)

    def _recurrent(
        self, x: TracingArray, mixer: Recurrent, layers: int, states: States, *, times: int, recorded: bool, norm: Any
    ) -> None:
        """The parts of layers with states."""
        product = partial(self._product, times=times, recorded=recorded, layers=layers)
        is_rule, inner, heads = isinstance(mixer, GatedDelta), mixer.value_heads * mixer.value_dim, mixer.value_heads
        name, whole, gates = ("delta", "delta rule", 2) if is_rule else ("mamba", "mamba 2", 1)
        projected = product(f"{name} inputs", x, (mixer.channels + inner + gates * heads,), norm=norm)
        shapes = [one.shape for one in DeltaShape(mixer).full_arrays(BLOCK_SIZE)]
        slots = DeltaSlots(*(self.array((states.slots, *shape), np.float32) for shape in shapes))
        spans: Any = states.spans if states.is_prompt else self.array(states.spans.shape, np.int32)
        kept = (self.array((0, *array.shape[1:]), np.float32) for array in (slots.matrices, slots.inputs))
        ends = DeltaEnds([], *kept) if states.is_prompt else None
        given = projected, self._state_weights(mixer), slots, spans, ends
        work = partial(self.ops.gated_delta if is_rule else self.ops.mamba2, *given)
        read, by_heads = (states.read(mixer, key_heads) for key_heads in (mixer.key_heads, heads))
        y = self._note(whole, times * layers, work, read, state_bytes=by_heads)
        product(f"{name} out", y, (x.shape[1],), residual=x)

    def _state_weights(self, mixer: Recurrent) -> Any:
        """DeltaWeights or Mamba2Weights."""

        def vector(*shape: int) -> TracingArray:
            return self.array(shape, np.float32)

        heads, eps, channels = mixer.value_heads, self.config.norm_eps, mixer.channels
        conv, decay, dt_bias = vector(mixer.width, channels), vector(heads), vector(heads)
        if not isinstance(mixer, Mamba2):
            return DeltaWeights(conv, decay, dt_bias, vector(mixer.value_dim), eps, mixer.tiled)
        bias, norm = vector(channels) if mixer.conv_bias else None, vector(heads * mixer.value_dim)
        return Mamba2Weights(conv, bias, decay, dt_bias, vector(heads), norm, eps)

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
            read = sum(part.bytes for part in products)
            y = self._note(own, times * repeats, work, read, products=products, alone=self._alone(x, w, given))
        return y

    def _alone(self, x: TracingArray, w: Linear, given: Mapping[str, Any]) -> list[Launch]:
        """The launches of w's parts where some of them are multiplied in one launch; else none."""
        if not any(packed.joins(part, beside, len(x)) for part, beside in itertools.pairwise(w.parts)):
            return []
        first = len(self._launches)
        for part in w.parts:
            self.ops.linear(x, Linear((part,)), **given)
        noted = self._launches[first:]
        del self._launches[first:]
        return [launch for launch in noted if launch.kernel != "narrow"]

    def _mlp(
        self, x: TracingArray, ffn: GatedMLP, layers: int, *, times: int, norm: Any, recorded: bool, of: str = ""
    ) -> None:
        """The parts of a network. of: what their names begin with."""
        product = partial(self._product, times=times, layers=layers, recorded=recorded)
        (_, e), rows, activation = x.shape, (1 + is_gated(ffn.activation)) * ffn.size, ffn.activation
        down = self._one("down", e, ffn.size)
        activated = product(f"{of}gate_up", x, (rows,), norm=norm, activation=activation, then=down)
        product(f"{of}down", activated, (e,), residual=x)

    def _experts(self, x: TracingArray, ffn: Experts, layers: int, *, times: int, norm: Any, recorded: bool) -> None:
        """The parts of a mixture of experts. Rows choose independently of each other, and all experts alike."""
        logits = self._product("router", x, (ffn.count,), times, layers, norm=norm, recorded=recorded)
        bias = self.array((ffn.count,), np.float32) if ffn.choice_bias else None
        rows, e = x.shape
        routing = self._note("choice of experts", times * layers, lambda: self.ops.route(logits, ffn, bias))
        ((_, (format, *_)), *_) = matrix_formats(self._weight, "experts", layers)
        for repeats, (down_format,) in matrix_formats(self._weight, "experts down", layers):
            shapes = (format, (1 + is_gated(ffn.activation)) * ffn.size, e), (down_format, e, ffn.size)
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
        if ffn.shared is not None:
            self._mlp(x, ffn.shared, layers, of="shared ", times=times, norm=norm, recorded=recorded)

    def _one(self, name: str, rows: int, columns: int) -> Linear:
        """The matrix `name`; where layers have it in several formats, in that of the first."""
        ((_, (taken, *_)), *_) = matrix_formats(self._weight, name, len(self.config.layers))
        return Linear((self._matrix(taken, rows, columns),))

    def _choose(self, logits: TracingArray) -> None:
        sampler_input = SamplerInput(resolve(SamplingParams(), GenerationDefaults()), [], 0.5, self.config.vocab_size)
        sampler_inputs = self.ops.pack_sampler_inputs([sampler_input] * len(logits))
        self._note("sampling", 1, lambda: self.ops.sample(logits, sampler_inputs), logits.nbytes)

    def _matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """A matrix in the format `name`, as the device holds it. Raises EngineError for rows of parts of its blocks."""
        format = get(name)
        if columns % format.values:
            raise EngineError(
                f"A matrix of this model has rows of {columns:,} numbers, which are no whole blocks of {name}: "
                "choose other weights, such as q8_0"
            )
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

    Raises EngineError for a cache type without kernels, and for weights that the model's rows cannot have.
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
    states = States(np.array(spans, np.int32), batch, is_prompt=False)
    return step.run(step.embed(batch), "place_kv", windows, states, outputs=batch, recorded=True)


def _view(row: int, context: int, window: int | None) -> SpanView:
    """What the newest token of the sequence in `row` sees of `context` tokens. What its window lacks is released."""
    newest = context - 1
    start = newest // BLOCK_SIZE * BLOCK_SIZE
    first = 0 if window is None else max(0, context - window) // BLOCK_SIZE * BLOCK_SIZE
    sink, table_start = (0, BLOCK_SIZE) if first == 0 else (None, first)
    ids = [0] * ((start - table_start) // BLOCK_SIZE)
    return SpanView(slice(row, row + 1), newest, KVLocation(None, 1), start, sink, ids, table_start)


def prompt_parts(
    config: ModelConfig,
    weight: str,
    cache_type: CacheType,
    tokens: int,
    processors: int,
    shared_memory: int,
) -> list[Part]:
    """The parts of a first prompt up to its first token. weight: one of `known_weights`.

    Layers take as many rows at a time as the engine gives them; the last of these may be fewer, and count as others.

    Raises EngineError for a cache type without kernels, and for weights that the model's rows cannot have.
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
    states = States(np.array([DeltaSpan(0, 0, rows, 0)], np.int32), 1, is_prompt=True)
    prompt.run(prompt.embed(tokens)[:rows], "heads", windows, states, outputs=1, recorded=False)
    prompt.encode(tokens // BLOCK_SIZE - 1, buffer)  # all complete blocks but the sink
    return prompt.parts
