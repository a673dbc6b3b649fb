"""Every op in NumPy: the reference for other backends, and the fallback on a CPU without compiled kernels.

All is float32; BLAS computes products. Loops are over sequences and tiles that fit caches, not tokens, heads or blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import (
    AttentionRule,
    CacheFormat,
    FilledBlocks,
    HeadRule,
    HeadTransform,
    KVLocation,
    Move,
    PreparedTransform,
    Rope,
    Spans,
    SpanView,
)
from polarlm.engine.backends.numpy import blas, host_memory
from polarlm.engine.backends.numpy.attention import attend_sequence, attend_to_texts, parts_of
from polarlm.engine.backends.numpy.experts import ExpertOps
from polarlm.engine.backends.numpy.kv.cache import Buffer, Fields, LayerCache, Sides, full_slots, stored_blocks
from polarlm.engine.backends.numpy.kv.encoding import encodable_runs, encode_side
from polarlm.engine.backends.numpy.recurrent import RecurrentOps
from polarlm.engine.backends.numpy.rows import (
    apply_activation,
    apply_gate,
    apply_rope,
    quiet,
    rms_norm,
    rotate,
    softcap,
)
from polarlm.engine.backends.ops import (
    PLAIN,
    EncoderOps,
    ExpansionOps,
    ExpertCache,
    Fusion,
    LatentOps,
    Load,
    Result,
    Texts,
    WarmUp,
)
from polarlm.engine.outputs import Threads
from polarlm.engine.quantization.encode import read_back
from polarlm.engine.sampling.sample import Sampled, SamplerInput, sample_all
from polarlm.engine.weight_formats import ExpertLinear, Linear, Matrix, RereadMatrix, StoredMatrix, WeightFormat, get


class NumpyOps(ExpertOps, RecurrentOps):
    """See `engine.backends.ops.Ops`."""

    name = "cpu"
    backend = "numpy"
    host = None
    forkable = True
    stored_as = transfer.FIELDS
    cache_experts: Callable[[Sequence[Sequence[RereadMatrix]], ExpertCache], tuple[Matrix, ...]] | None = None
    prefill_rows = 512  # the feed-forward activations about fit the cache
    unit_layers = 1
    batch_rows = 64  # more would make no row faster, and the first prompt wait
    batches_take_steps = False  # whose rows are computed in another way
    warm_up_rows: tuple[Sequence[int], Sequence[int]] = ((), ())
    encoded_at_once = 1
    expansion_ops: ExpansionOps | None = None
    fetch_later = None
    stream: Callable[[], AbstractContextManager[None]] | None = None
    next_spans = None

    def __init__(self, threads: int = 0):
        """threads: the number for BLAS; 0 keeps BLAS's own."""
        if threads:
            blas.use_threads(threads)
        self._is_set = threads > 0

    def run_between_graphs(self, work: Callable[..., None], arrays: Sequence[Any], *, is_last: bool = False) -> None:
        work(*arrays)

    def as_step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forget(self) -> None:
        """Nothing is recorded."""

    def run_graph(self, key: Hashable, work: Callable[..., Result], inputs: Sequence[Any]) -> Result:
        return work(*inputs)

    def check(self) -> None:
        """A CPU works on."""

    def threads(self) -> Threads:
        return Threads(blas.threads(), "by the setting threads" if self._is_set else "as BLAS has them")

    @property
    def is_replayable(self) -> bool:
        return False

    @property
    def input_bits(self) -> str:
        return "16"

    def set_input_bits(self, bits: str) -> str:
        return "" if bits in ("auto", "16") else "NumPy multiplies float32"

    @property
    def inputs(self) -> str:
        return ""

    def layer_ops(self, layer: int) -> NumpyOps:
        return self

    @property
    def latent_ops(self) -> LatentOps:
        return self

    @property
    def encoder_ops(self) -> EncoderOps:
        return self

    def wait(self) -> None:
        """Returns at once: ops are synchronous."""

    def matrix_bytes(self, format: WeightFormat, count: int) -> int:
        return 4 * count

    def free_memory(self) -> int:
        return host_memory.available()

    def memory_left(self, weights: int) -> int:
        return host_memory.memory_left(weights, " as float32")

    def work_bytes(self, load: Load) -> int:
        # `memory_left` leaves half of the available memory for it, which the inputs of all layers may exceed.
        return 4 * load.tokens * len(load.model.layers) * load.model.layer_embedding

    def reserve_workspace(self, load: Load) -> None:
        """Does nothing: memory is allocated on demand."""

    def warm_up(self) -> WarmUp | None:
        """Returns None: nothing is compiled."""
        return None

    def stored_format(self, format: WeightFormat) -> WeightFormat:
        return get("f32")

    def load(self, matrices: Sequence[StoredMatrix]) -> tuple[Matrix, ...]:
        """All matrices, converted to float32 and joined into one for BLAS."""
        shape = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        whole, end = np.empty(shape, np.float32), 0
        for matrix in matrices:
            part = whole[end : end + matrix.shape[0]]
            end += len(part)
            matrix.dequantize(part)
        return (Matrix(get("f32"), whole, shape),)

    def load_experts(self, matrices: Sequence[Sequence[StoredMatrix]]) -> tuple[Matrix, ...]:
        """All matrices, converted to float32 and joined into one."""
        return self.load([matrix for expert in matrices for matrix in expert])

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.empty(shape, np.float32)

    def rows(self, matrix: Matrix | Linear, rows: slice = slice(None)) -> np.ndarray:
        return _whole(matrix)[rows]

    def to_device(self, x: Any) -> np.ndarray:
        return np.ascontiguousarray(x, np.int32 if np.asarray(x).dtype.kind in "iu" else np.float32)

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return x

    @quiet
    def embed(self, table: Matrix, ids: np.ndarray, scale: float = 1.0) -> np.ndarray:
        x: np.ndarray = table.data[ids]
        return x if scale == 1 else x * np.float32(scale)

    @quiet
    def rms_norm(self, x: np.ndarray, norm: tuple[np.ndarray, float], residual: np.ndarray | None = None) -> None:
        y = rms_norm(x, *norm)
        if residual is None:
            x[...] = y
        else:
            residual += y

    def centre(self, x: np.ndarray) -> None:
        x -= x.mean(axis=-1, keepdims=True)

    @quiet
    def softcap(self, x: np.ndarray, cap: float) -> None:
        softcap(x, cap)

    @quiet
    def activate(self, x: np.ndarray, up: np.ndarray, activation: str) -> None:
        x[:] = apply_gate(activation, x, up)

    @quiet
    def activate_halves(self, x: np.ndarray, activation: str) -> np.ndarray:
        return apply_activation(x, activation)

    @quiet
    def scale(self, x: np.ndarray, factor: np.ndarray) -> None:
        x *= factor
        np.copyto(x, 0, where=factor == 0)

    @quiet
    def linear(
        self, x: np.ndarray, w: Linear, fusion: Fusion = PLAIN, residual: np.ndarray | None = None
    ) -> np.ndarray:
        x, weight = x if fusion.norm is None else rms_norm(x, *fusion.norm), _whole(w)
        y = x @ weight.T
        if w.bias is not None:
            y += w.bias
        if fusion.activation is not None:
            return apply_activation(y, fusion.activation)
        if residual is None:
            return y
        residual += y
        return residual

    @quiet
    def multiply_heads(self, x: np.ndarray, w: ExpertLinear) -> np.ndarray:
        (matrices,), (outputs, inputs) = w.parts, w.shape
        by_head = x.reshape(-1, w.count, inputs).swapaxes(0, 1)  # (H, T, in)
        y = by_head @ matrices.data.reshape(w.count, outputs, inputs).swapaxes(1, 2)
        return y.swapaxes(0, 1).reshape(-1, outputs)

    def join_latents(self, absorbed: np.ndarray, rotated: np.ndarray, kv: np.ndarray) -> np.ndarray:
        tokens, latent, size = len(kv), absorbed.shape[1], rotated.shape[1]
        halves = np.empty((tokens, len(absorbed) // tokens + 1, 2, (latent + size) // 2), np.float32)
        halves[:, :-1, :, : size // 2] = rotated.reshape(tokens, -1, 2, size // 2)
        halves[:, :-1, :, size // 2 :] = absorbed.reshape(tokens, -1, 2, latent // 2)
        halves[:, -1, :, : size // 2] = kv[:, latent:].reshape(tokens, 2, size // 2)
        halves[:, -1, :, size // 2 :] = kv[:, :latent].reshape(tokens, 2, latent // 2)
        return halves.reshape(tokens, -1, latent + size)

    def take_latents(self, x: np.ndarray, latent: int) -> np.ndarray:
        halves = x.reshape(-1, 2, x.shape[-1] // 2)
        return halves[:, :, -(latent // 2) :].reshape(-1, latent)

    def prepare(self, transforms: Sequence[HeadTransform]) -> list[PreparedTransform]:
        return list(transforms)

    @quiet
    def transform_heads(self, qkv: np.ndarray, rope: Rope, rule: HeadRule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        transform, norms = rule
        keys = qkv.shape[1] if transform.values_are_keys else qkv.shape[1] - transform.kv_heads
        queries = keys - transform.kv_heads
        scale_qk, scale_v = (None, None) if transform.scale is None else np.split(transform.scale, [keys])
        qk, v = qkv[:, :keys], qkv[:, keys:]
        if norms is not None:
            q_norm, k_norm, eps = norms
            qk[:, :queries] = rms_norm(qk[:, :queries], q_norm, eps)
            qk[:, queries:] = rms_norm(qk[:, queries:], k_norm, eps)
        if transform.value_eps is not None:
            v = rms_norm(v, np.ones(v.shape[-1], np.float32), transform.value_eps)
        apply_rope(qk, *rope)
        qk = rotate(qk, transform.key_rotation, scale_qk)
        if transform.values_are_keys:
            return qk[:, :queries], qk[:, queries:], qk[:, queries:]
        return qk[:, :queries], qk[:, queries:], rotate(v, transform.value_rotation, scale_v)

    def pack_sampler_inputs(self, sampler_inputs: Sequence[SamplerInput]) -> Sequence[SamplerInput]:
        return sampler_inputs

    def sample(
        self, logits: np.ndarray, sampler_inputs: Sequence[SamplerInput], newest: np.ndarray | None = None
    ) -> Any:
        return sample_all(logits, sampler_inputs)

    def fetch_tokens(self, chosen: Any, logits: np.ndarray, sampler_inputs: Sequence[SamplerInput]) -> list[Sampled]:
        return chosen

    def cache_bytes(self, format: CacheFormat) -> tuple[int, int]:
        quantized = transfer.nbytes(format, transfer.FIELDS)
        return quantized, 2 * len(format.sides) * format.kv_heads * format.block_size * format.head_dim

    def cache(
        self, format: CacheFormat, quantized: int, full: int, earlier_caches: Sequence[LayerCache] = ()
    ) -> LayerCache:
        """See `Ops.cache`. On systems with overcommit, pages that are never written take no memory."""
        blocks = stored_blocks(format, quantized, transfer.FIELDS)
        return LayerCache(format, *blocks, *full_slots(format, full), number=len(earlier_caches))

    def numpy_fallbacks(self, cache: LayerCache) -> dict[str, str]:
        return {}

    def buffer(self, format: CacheFormat, rows: int, *, as_slots: bool = False, layers: int = 1) -> Buffer:
        sides = len(format.sides), layers * format.kv_heads, rows, format.head_dim
        k, *v = np.empty(sides, np.float16 if as_slots else np.float32)
        return k, v[0] if v else k

    def spans(self, spans: Sequence[SpanView], block_size: int) -> Spans:
        return spans

    def append_kv(self, cache: LayerCache, spans: Spans, k: np.ndarray, v: np.ndarray) -> None:
        for span in spans:
            start, count = span.position - span.current_start, span.rows.stop - span.rows.start
            new_kv = k[span.rows].swapaxes(0, 1), v[span.rows].swapaxes(0, 1)
            if not span.following:
                cache.store(span.current, new_kv, start)
                continue
            # The rows of a step that go to more than one slot.
            positions = np.arange(start, start + count)
            slots = np.array([span.current.block, *span.following])[positions // cache.format.block_size]
            for full, new in zip((cache.full_k, cache.full_v), new_kv, strict=True):
                full[slots, :, positions % cache.format.block_size] = transfer.round_to(new.swapaxes(0, 1), full.dtype)

    def place_kv(self, qkv: np.ndarray, rope: Rope, rule: HeadRule, cache: LayerCache, spans: Spans) -> np.ndarray:
        q, k, v = self.transform_heads(qkv, rope, rule)
        self.append_kv(cache, spans, k, v)
        return q

    @quiet
    def attention(self, q: np.ndarray, cache: LayerCache, spans: Spans, rule: AttentionRule) -> np.ndarray:
        out = np.empty(q.shape, np.float32)
        kv_heads = cache.format.kv_heads
        heads, dim = q.shape[1:]
        q = q.reshape(-1, kv_heads, heads // kv_heads, dim) * np.float32(rule.scale)
        for span in spans:
            attend_sequence(q[span.rows], out[span.rows], cache, span, rule)
        if (transform := rule.transform) is None:
            return out
        back = None if transform.value_rotation is None else transform.value_rotation.T
        return rotate(out, back, None if transform.scale_back is None else transform.scale_back[:, None])

    def encode_blocks(self, groups: Sequence[FilledBlocks]) -> None:
        for layers, blocks, sources in encodable_runs(groups):
            (k, mean), (v, _) = (encode_side(layers, sources, side) for side in (0, 1))
            for number, cache in enumerate(layers):
                heads = slice(number * cache.format.kv_heads, (number + 1) * cache.format.kv_heads)
                cache.put(blocks, Sides(*({name: x[heads] for name, x in side.items()} for side in (k, v, mean))))

    def copy_full(self, caches: Sequence[LayerCache], moves: Sequence[Move]) -> None:
        for cache, (target, source, tokens) in itertools.product(caches, moves):
            k, v = cache.full(source)
            cache.store(target, (k[:, :tokens], v[:, :tokens]))

    @quiet
    def round_trip(self, cache: LayerCache, place: KVLocation, tokens: int) -> None:
        k, v = (full[:, :tokens].astype(np.float32) for full in cache.full(place))
        format = cache.format
        k = read_back(format.codec_k, k, format.metric_k, format.block_size, format.mean_bits)
        if format.codec_v is not None:
            v = read_back(format.codec_v, v, format.metric_v, format.block_size)
        cache.store(place, (k, v if format.codec_v is not None else k))

    def read_blocks(self, cache: LayerCache, blocks: Sequence[int]) -> dict[str, np.ndarray]:
        sides = cache.take(np.asarray(blocks, np.intp))._asdict().items()
        return {f"{side}.{name}": x.swapaxes(0, 1) for side, arrays in sides for name, x in arrays.items()}

    def write_blocks(self, cache: LayerCache, blocks: Sequence[int], arrays: Mapping[str, np.ndarray]) -> None:
        sides: dict[str, Fields] = {side: {} for side in Sides._fields}
        for name, x in transfer.convert_blocks(cache.format, len(blocks), arrays, cache.stored_as).items():
            side, _, field = name.partition(".")
            sides[side][field] = x.swapaxes(0, 1)
        cache.put(blocks, Sides(**sides))

    def read_full(self, cache: LayerCache, slot: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = cache.full(KVLocation(None, slot))
        return k[:, :tokens].copy(), v[:, :tokens].copy()

    def write_full(self, cache: LayerCache, slot: int, k: np.ndarray, v: np.ndarray) -> None:
        cache.store(KVLocation(None, slot), transfer.slot_halves(cache.format, k, v))

    @quiet
    def layer_norm(self, x: np.ndarray, norm: tuple[np.ndarray, np.ndarray, float]) -> None:
        weight, bias, eps = norm
        self.centre(x)
        variance = np.vecdot(x, x)[..., None] / np.float32(x.shape[-1])
        x *= 1 / np.sqrt(variance + np.float32(eps))
        x *= weight
        x += bias

    def clip(self, x: np.ndarray, least: float, most: float) -> None:
        np.clip(x, least, most, out=x)

    @quiet
    def self_attention(
        self, qkv: np.ndarray, rope: Rope | None, rule: HeadRule, texts: Texts, scale: float
    ) -> np.ndarray:
        q, k, v = parts_of(qkv, rule.transform) if rope is None else self.transform_heads(qkv, rope, rule)
        return attend_to_texts(q, k, v, texts, scale)


def _whole(matrix: Matrix | Linear) -> np.ndarray:
    """The weights (out, in) float32: `load` joins all parts into one array."""
    if isinstance(matrix, Linear):
        (matrix,) = matrix.parts
    return matrix.data
