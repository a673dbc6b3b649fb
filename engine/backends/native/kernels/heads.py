"""QK-norm, RoPE, scale and rotation of heads, and the stores of their keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.attention.partials import RowPlace
from polarlm.engine.backends.native.kernels.multiply import pieces, rotate, rotate_dense
from polarlm.engine.backends.native.kernels.rows import for_each_column, inverse_rms
from polarlm.engine.codecs.schema.arrays import HALF_MAX
from polarlm.engine.jit.lang import F32, I32, Emitter, Float32, Int64, Kernel, Pointer, Value, read, vector

_VECTORS_AT_ONCE = 4  # vectors that share a pass over a dense rotation


@dataclass(frozen=True)
class HeadsSpec:
    """The properties that a kernel is specialized for.

    keys, values: whether they are multiplied by a factor, and the order of their rotation (see `Rotation`); queries are
    treated as keys. in_slots: keys and values go to full-precision slots, which `places` names. queries_alone: there
    are no keys and values, and one unit has all heads of a row. keys_alone: there are no values.
    """

    dim: int
    has_norms: bool
    keys: tuple[bool, int]
    values: tuple[bool, int]
    in_slots: bool
    has_value_norm: bool = False
    queries_alone: bool = False
    keys_alone: bool = False

    @property
    def name(self) -> str:
        sides = "_".join(f"{'scaled' * scaled}{order}" for scaled, order in (self.keys, self.values))
        norms = f"{'_norm' * self.has_norms}{'_vnorm' * self.has_value_norm}"
        alone = "_alone" * self.queries_alone + "_keys" * self.keys_alone
        return f"heads_{self.dim}{norms}_{sides}{'_slots' * self.in_slots}{alone}"


class HeadArguments(NamedTuple):
    qkv: Pointer
    cos: Pointer
    sin: Pointer
    q_norm: Pointer
    k_norm: Pointer
    key_factor: Pointer
    value_factor: Pointer
    key_rotation: Pointer
    value_rotation: Pointer
    q: Pointer
    k: Pointer
    v: Pointer
    places: Pointer
    group: Int64
    kv_heads: Int64
    row_stride: Int64
    head_stride: Int64
    key_factor_stride: Int64
    value_factor_stride: Int64
    eps: Float32
    value_eps: Float32


@cache
def transform(spec: HeadsSpec) -> Kernel[HeadArguments]:
    """qkv (T, H + 2K, D), or without values (T, H + K, D) → q (T, H, D), and keys and values in k and v; one unit per
    row and KV head.

    group: H / K. cos, sin (T, D/2). key_factor (H + K, D) and value_factor (K, D), or one row for all heads, if
    *_factor_stride, bytes from head to head, is 0. key_rotation, value_rotation: memory of a `Rotation`. Row t of KV
    head j goes to k and v at a byte offset: as float32 t · row_stride + j · head_stride; or, in slots, as float16
    slot · row_stride + j · head_stride + offset · 2D, with slot and offset from `places` (T, 2) int64.
    """
    dim, row_bytes, order = spec.dim, 4 * spec.dim, spec.keys[1]

    def emit(e: Emitter, args: HeadArguments, begin: Value, end: Value, scratch: Value) -> None:
        group, kv_heads = args.group, args.kv_heads
        queries = group * kv_heads
        with e.loop(begin, end) as unit:
            row, head = unit // kv_heads, unit % kv_heads
            heads = queries if spec.queries_alone else queries + kv_heads * (1 if spec.keys_alone else 2)
            last = group - 1 if spec.queries_alone else group
            heads_at, half_at = args.qkv + row * heads * row_bytes, row * (row_bytes // 2)
            if spec.in_slots:
                row_place = read(e, RowPlace, args.places, row)
                place = row_place.slot * args.row_stride + head * args.head_stride + row_place.offset * (2 * dim)
                # Float32 before it is rounded into a slot: in scratch, after the vectors for a dense rotation.
                own_k = own_v = scratch + (group + (1 + _VECTORS_AT_ONCE)) * row_bytes
            else:
                place = row * args.row_stride + head * args.head_stride
                own_k, own_v = args.k + place, args.v + place

            def target_of(i: Value) -> Value:
                """The address for query i of the group, or for its key if i = group."""
                query = args.q + (row * queries + head * group + i) * row_bytes
                return e.select(i >= group, own_k, query)

            # For a dense rotation all are collected in scratch first, so that several share each pass over the matrix.
            with e.loop(0, last + 1) as i:
                is_key = i >= group
                number = e.select(is_key, queries + head, head * group + i)
                weight = e.select(is_key, args.k_norm, args.q_norm)
                source, factor = heads_at + number * row_bytes, args.key_factor + number * args.key_factor_stride
                transformed = scratch + i * row_bytes if order == 0 else scratch
                turns = args.cos + half_at, args.sin + half_at
                _norm_and_rope(e, spec, source, transformed, weight, args.eps, *turns, factor)
                if order != 0:
                    rotate(e, scratch, target_of(i), args.key_rotation, dim, order)
            if order == 0:
                with e.loop(0, last + 1, _VECTORS_AT_ONCE) as first:
                    vectors_at = scratch + first * row_bytes
                    for offset, vectors in rotate_dense(e, vectors_at, args.key_rotation, dim, _VECTORS_AT_ONCE):
                        for member, value in enumerate(vectors):
                            with e.when(first + member <= last):
                                e.store(value, target_of(first + member), offset)
            if not spec.queries_alone and spec.in_slots:
                _store_halves(e, own_k, args.k + place, dim)
            if not (spec.queries_alone or spec.keys_alone):
                source = heads_at + (queries + kv_heads + head) * row_bytes
                if spec.values[0] or spec.has_value_norm:
                    factor = args.value_factor + head * args.value_factor_stride
                    inverse = inverse_rms(e, source, e.i64(dim), args.value_eps) if spec.has_value_norm else None
                    for channel, lanes in pieces(dim):
                        kind, offset = vector(F32, lanes), 4 * channel
                        value = e.load(source, kind, offset)
                        value = value if inverse is None else value * inverse
                        e.store(value * e.load(factor, kind, offset) if spec.values[0] else value, scratch, offset)
                    source = scratch
                rotate(e, source, own_v, args.value_rotation, dim, spec.values[1])
                if spec.in_slots:
                    _store_halves(e, own_v, args.v + place, dim)

    return Kernel(spec.name, emit, HeadArguments, scratch=row_bytes)


class JoinArguments(NamedTuple):
    own: Pointer
    rotated: Pointer
    joined: Pointer
    heads: Int64
    own_size: Int64
    own_row: Int64
    own_head: Int64
    rotated_size: Int64
    rotated_row: Int64
    rotated_head: Int64
    rotated_half: Int64
    columns: Int64
    row: Int64
    head: Int64


@cache
def join_heads() -> Kernel[JoinArguments]:
    """Both parts of heads → heads, each half of which has half of `rotated`, zeros, then half of `own`; one unit per
    row and head.

    own_size, rotated_size, columns: of a head. The others are bytes from row to row and from head to head of what is
    read and of `joined`, and from half to half.
    """

    def emit(e: Emitter, args: JoinArguments, begin: Value, end: Value, scratch: Value) -> None:
        own_half, rotated_half, half = args.own_size // 2, args.rotated_size // 2, args.columns // 2
        with e.loop(begin, end) as unit:
            row, head = unit // args.heads, unit % args.heads
            own = args.own + row * args.own_row + head * args.own_head
            rotated = args.rotated + row * args.rotated_row + head * args.rotated_head
            for side in range(2):
                target = args.joined + row * args.row + head * args.head + half * (4 * side)
                zeros, count = target + rotated_half * 4, half - rotated_half - own_half
                _copy(e, rotated + args.rotated_half * side, target, rotated_half)
                for_each_column(e, count, lambda offset, kind, zeros=zeros: e.store(e.zero(kind), zeros + offset))  # type: ignore[misc]
                _copy(e, own + own_half * (4 * side), target + (half - own_half) * 4, own_half)

    return Kernel("join_heads", emit, JoinArguments)


class TakeArguments(NamedTuple):
    x: Pointer
    out: Pointer
    columns: Int64
    latent: Int64


@cache
def take_latents() -> Kernel[TakeArguments]:
    """See `Ops.take_latents`; one unit per row and head. columns, latent: D and L."""

    def emit(e: Emitter, args: TakeArguments, begin: Value, end: Value, scratch: Value) -> None:
        half, half_latent = args.columns // 2, args.latent // 2
        with e.loop(begin, end) as unit:
            for side in range(2):
                source = args.x + unit * args.columns * 4 + (half * (side + 1) - half_latent) * 4
                _copy(e, source, args.out + unit * args.latent * 4 + half_latent * (4 * side), half_latent)

    return Kernel("take_latents", emit, TakeArguments)


def _copy(e: Emitter, source: Value, target: Value, count: Value) -> None:
    for_each_column(e, count, lambda offset, kind: e.store(e.load(source + offset, kind), target + offset))


def _norm_and_rope(
    e: Emitter, spec: HeadsSpec, x: Value, out: Value, weight: Value, eps: Value, cos: Value, sin: Value, factor: Value
) -> None:
    """Norm (if there are norms), RoPE and factor of a query or key x (D,) → out (D,)."""
    half = spec.dim // 2
    inverse = inverse_rms(e, x, e.i64(spec.dim), eps) if spec.has_norms else None
    for first, lanes in pieces(half):
        kind, places = vector(F32, lanes), (4 * first, 4 * (first + half))
        low, high = (e.load(x, kind, place) for place in places)
        if inverse is not None:
            low, high = (
                part * inverse * e.load(weight, kind, place) for part, place in zip((low, high), places, strict=True)
            )
        c, s = e.load(cos, kind, 4 * first), e.load(sin, kind, 4 * first)
        rotated_pair = e.fma(low, c, -(high * s)), e.fma(high, c, low * s)
        for part, place in zip(rotated_pair, places, strict=True):
            e.store(part * e.load(factor, kind, place) if spec.keys[0] else part, out, place)


class SlotArguments(NamedTuple):
    from_k: Pointer
    from_v: Pointer
    to_k: Pointer
    to_v: Pointer
    tokens: Int64
    from_stride: Int64
    to_stride: Int64


@cache
def to_slot(dim: int) -> Kernel[SlotArguments]:
    """k, v (K, tokens, D) float32 → a slot, float16; one unit per KV head. Strides: bytes from head to head."""

    def emit(e: Emitter, args: SlotArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as head, e.loop(0, args.tokens) as token:
            for source, target in ((args.from_k, args.to_k), (args.from_v, args.to_v)):
                rows, place = source + head * args.from_stride, target + head * args.to_stride
                _store_halves(e, rows + token * (4 * dim), place + token * (2 * dim), dim)

    return Kernel(f"to_slot_{dim}", emit, SlotArguments)


def _store_halves(e: Emitter, x: Value, target: Value, dim: int) -> None:
    """x (D,) float32 → target (D,) float16, rounded for full-precision slots as `numpy.attention.rounded` does."""
    limit = float(HALF_MAX)
    for first, lanes in pieces(dim):
        value = e.load(x, vector(F32, lanes), 4 * first)
        clipped = e.select(
            value > limit, e.const_like(limit, value), e.select(value < -limit, e.const_like(-limit, value), value)
        )
        half, is_finite = e.float_to_half(clipped), (value.bits(vector(I32, lanes)) & 0x7FFFFFFF) < 0x7F800000
        e.store(e.select(is_finite, half, e.const_like(0x7E00, half)), target, 2 * first)
