"""Gated delta rules: rows are added to slots, block by block; see `engine.backends.numpy.gated_delta`.

Every sum of a row has its terms in the order of the tokens, so that it does not depend on which rows are computed with
it, and rows that are computed one at a time leave the same state as rows that are computed together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.multiply import Left, pieces, product
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.records import Float32, Int64, Pointer
from polarlm.engine.jit.lang.values import F32, I32, I64, Value, vector
from polarlm.engine.jit.run.workers import SCRATCH

_STEP_TILE, _PROMPT_TILE = 2, 6  # rows whose sums stay in registers
_LENGTH_EPS = 1e-6
_LOG_TERMS = 9  # of atanh(z) / z for z up to 1/3


@dataclass(frozen=True)
class Delta:
    """The properties that a kernel is specialized for.

    shared: value heads of a key head. block: N. is_prompt: whether the launch has many rows, and slots advance.
    """

    key_heads: int
    shared: int
    key_dim: int
    value_dim: int
    block: int
    width: int
    tiled: bool
    is_prompt: bool

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def value_heads(self) -> int:
        return self.key_heads * self.shared

    @property
    def columns(self) -> int:
        """Of a projected row: q, k, v, z, b, a."""
        return self.channels + self.value_heads * (self.value_dim + 2)

    @property
    def name(self) -> str:
        sizes = f"{self.key_heads}x{self.shared}_{self.key_dim}x{self.value_dim}_{self.block}_{self.width}"
        return f"gated_delta_{sizes}{'_tiled' * self.tiled}{'_prompt' * self.is_prompt}"


class _Scratch:
    """Offsets in bytes of a unit's arrays in scratch, float32. n: the rows of a block.

    rows (2n, A): keys, then queries. scores (2n, N): products with the block's keys. weights (2n, N): of updates, in
    later updates and in results. read (2n, D): what keys and queries read of M, then the results. scaled (N, D):
    updates, decayed to the end of the block. beta, since (n,): σ(b), and how much M has decayed.
    """

    def __init__(self, spec: Delta) -> None:
        self.end, n = 0, spec.block
        self.rows = self._room(2 * n * spec.key_dim)
        self.scores = self._room(2 * n * n)
        self.weights = self._room(2 * n * n)
        self.read = self._room(2 * n * spec.value_dim)
        self.scaled = self._room(n * spec.value_dim)
        self.beta, self.since = self._room(n), self._room(n)

    def _room(self, numbers: int) -> int:
        start = self.end
        self.end += -(-numbers // 16) * 64
        return start


def supports(spec: Delta) -> bool:
    """Whether scratch has room for a unit."""
    return _Scratch(spec).end <= SCRATCH


class DeltaArguments(NamedTuple):
    """Arguments of `gated_delta`. kept (blocks,) int32: for the end of each block, its row of `end_matrices` and
    `end_inputs`, or −1; for a prompt alone."""

    projected: Pointer
    out: Pointer
    conv: Pointer
    decay: Pointer
    dt_bias: Pointer
    norm: Pointer
    matrices: Pointer
    keys: Pointer
    updates: Pointer
    decays: Pointer
    inputs: Pointer
    spans: Pointer
    kept: Pointer
    end_matrices: Pointer
    end_inputs: Pointer
    eps: Float32
    blocks: Int64


@cache
def gated_delta(spec: Delta) -> Kernel[DeltaArguments]:
    """See `Ops.gated_delta`; one unit per span and key head."""

    def emit(e: Emitter, args: DeltaArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            head, span = unit % spec.key_heads, args.spans + unit // spec.key_heads * 16
            slot, first, count, place = (e.load(span + 4 * field, I32).sext(I64) for field in range(4))
            own = _Unit(e, spec, args, scratch, slot, head)
            row, left, at, number = (e.variable(value) for value in (first, count, place, e.i64(0)))
            with e.repeat_while() as condition:
                now = e.imin(left.get(), -at.get() + spec.block)
                own.add(row.get(), now, at.get())
                row.add(now)
                left.add(-now)
                at.add(now)
                if spec.is_prompt:
                    with e.when(at.get() >= spec.block):
                        own.advance(number.get())
                        number.add(1)
                        at.set(e.i64(0))
                condition.append(left.get() > 0)

    return Kernel(spec.name, emit, DeltaArguments, scratch=_Scratch(spec).end)


class _Unit:
    """Emits the work of a unit: of one key head in one slot."""

    def __init__(self, e: Emitter, spec: Delta, args: DeltaArguments, scratch: Value, slot: Value, head: Value) -> None:
        layout = _Scratch(spec)
        self._e, self._spec, self._args, self._slot, self._head = e, spec, args, slot, head
        self._rows, self._scores, self._weights, self._read, self._scaled, self._beta, self._since = (
            scratch + at
            for at in (
                *(layout.rows, layout.scores, layout.weights, layout.read, layout.scaled),
                *(layout.beta, layout.since),
            )
        )
        self._keys = args.keys + (slot * spec.key_heads + head) * (4 * spec.key_dim * spec.block)
        self._inputs = args.inputs + slot * (4 * spec.channels * (spec.width - 1 + spec.block))
        rows, vectors = e.level.float_tile
        self._tile = min(rows, _PROMPT_TILE if spec.is_prompt else _STEP_TILE)
        self._vectors = max(n for n in (1, 2, 4) if n <= vectors)

    def _parts(self) -> list[tuple[Value, int]]:
        """The first channel, and the number of channels, of this head's queries and keys."""
        spec, own = self._spec, self._head * self._spec.key_dim
        return [(own, spec.key_dim), (own + spec.key_heads * spec.key_dim, spec.key_dim)]

    def _value_head(self, member: Value) -> Value:
        """The number of a value head that has this key."""
        spec = self._spec
        return self._head + member * spec.key_heads if spec.tiled else self._head * spec.shared + member

    def _value_channel(self, head: Value) -> Value:
        return head * self._spec.value_dim + 2 * self._spec.key_heads * self._spec.key_dim

    def _product(
        self,
        left: Left,
        right: tuple[Value, int],
        start: Callable[..., Value],
        finish: Callable[..., None],
        *,
        seen: Value | None = None,
        tile: int = 0,
    ) -> None:
        """See `product`; tile: 0 for the launch's own."""
        product(self._e, left, right, start, finish, (tile or self._tile, self._vectors), seen)

    # -- rows --------------------------------------------------------------------------------------------------

    def add(self, row: Value, count: Value, place: Value) -> None:
        """Add `count` rows from `row` on, the first of which has this place in the block, and compute their results."""
        e, spec = self._e, self._spec
        key_row = 4 * spec.key_dim
        (query, _), (key, _) = self._parts()
        with e.loop(0, count) as i:
            at, projected = place + i, self._args.projected + (row + i) * (4 * spec.columns)
            own, other = self._rows + i * key_row, self._rows + (count + i) * key_row
            self._normed(key, at, projected, own, 1.0)
            self._normed(query, at, projected, other, spec.key_dim**-0.5)
            with e.loop(0, spec.key_dim) as channel:
                e.store(e.load(own + channel * 4, F32), self._keys + (channel * spec.block + at) * 4)
        self._product(
            Left(self._rows, key_row, count * 2, e.i64(spec.key_dim)),
            (self._keys, spec.block),
            lambda i, first, lanes: e.zero(vector(F32, lanes)),
            lambda i, first, value: e.store(value, self._scores + i * (4 * spec.block), 4 * first),
            seen=place + count,
        )
        with e.loop(0, spec.shared) as member:
            self._add_to(self._value_head(member), row, count, place)

    def _normed(self, channel: Value, at: Value, projected: Value, target: Value, length: float) -> None:
        """Convolve a query or a key, the token of this place, into `target`, with this length."""
        e = self._e
        squares = e.variable(e.constant(F32, _LENGTH_EPS))
        values = [
            (first, self._convolved(channel, at, projected, first, lanes))
            for first, lanes in pieces(self._spec.key_dim)
        ]
        for first, x in values:
            squares.add(e.sum_lanes(x * x) if x.lanes > 1 else e.extract(x, 0) * e.extract(x, 0))
            e.store(x, target, 4 * first)
        factor = e.like(length, squares.get()) / e.sqrt(squares.get())
        for first, x in values:
            e.store(x * factor, target, 4 * first)

    def _convolved(self, channel: Value, at: Value, projected: Value, first: int, lanes: int) -> Value:
        """silu of the convolution of `lanes` channels from `channel` + first on; their newest inputs are kept."""
        e, spec, kind = self._e, self._spec, vector(F32, lanes)
        row_bytes, before = 4 * spec.channels, spec.width - 1
        own = self._inputs + at * row_bytes + channel * 4
        weights = self._args.conv + channel * 4
        newest = e.load(projected + channel * 4, kind, 4 * first)
        e.store(newest, own, 4 * first + before * row_bytes)
        total = e.zero(kind)
        for back in range(before):
            x = e.load(own, kind, 4 * first + back * row_bytes)
            total = e.fma(x, e.load(weights, kind, 4 * first + back * row_bytes), total)
        total = e.fma(newest, e.load(weights, kind, 4 * first + before * row_bytes), total)
        return self._silu(total)

    def _add_to(self, head: Value, row: Value, count: Value, place: Value) -> None:
        """Add rows to a value head, and compute its results; `rows` and `scores` are those of its key head."""
        e, spec, args = self._e, self._spec, self._args
        of_slot = self._slot * spec.value_heads + head
        matrix = args.matrices + of_slot * (4 * spec.key_dim * spec.value_dim)
        updates = args.updates + of_slot * (4 * spec.block * spec.value_dim)
        decays = args.decays + of_slot * (4 * spec.block)
        value_row, block_row = 4 * spec.value_dim, 4 * spec.block
        read, weights = self._read, self._weights
        self._gates(head, row, count, place, decays)
        self._product(
            Left(self._rows, 4 * spec.key_dim, count * 2, e.i64(spec.key_dim)),
            (matrix, spec.value_dim),
            lambda i, first, lanes: e.zero(vector(F32, lanes)),
            lambda i, first, value: e.store(value, read + i * value_row, 4 * first),
        )
        self._weigh(count, place, decays)
        channel = self._value_channel(head)
        with e.loop(0, count) as i:
            at, projected = place + i, args.projected + (row + i) * (4 * spec.columns)
            beta, since = (e.load(where + i * 4, F32) for where in (self._beta, self._since))
            for first, lanes in pieces(spec.value_dim):
                v = self._convolved(channel, at, projected, first, lanes)
                known = e.load(read + i * value_row, v.type, 4 * first)
                e.store((v - known * since) * beta, updates + at * value_row, 4 * first)
                queried = read + (count + i) * value_row
                e.store(e.load(queried, v.type, 4 * first) * since, queried, 4 * first)
        with e.loop(0, count) as i:
            at = place + i
            self._product(
                Left(weights + i * block_row, block_row, e.i64(1), at),
                (updates, spec.value_dim),
                lambda _, first, lanes, at=at: e.load(updates + at * value_row, vector(F32, lanes), 4 * first),
                lambda _, first, value, at=at: e.store(value, updates + at * value_row, 4 * first),
                tile=1,
            )
        results = read + count * value_row
        self._product(
            Left(weights + count * block_row, block_row, count, place + count),
            (updates, spec.value_dim),
            lambda i, first, lanes: e.load(results + i * value_row, vector(F32, lanes), 4 * first),
            lambda i, first, value: e.store(value, results + i * value_row, 4 * first),
        )
        self._gate(head, row, count, results)

    def _gates(self, head: Value, row: Value, count: Value, place: Value, decays: Value) -> None:
        """Add the rows' decays, and compute `beta` and `since`."""
        e, spec, args = self._e, self._spec, self._args
        before = e.load(decays + e.imax(place - 1, 0) * 4, F32)
        total = e.variable(e.select(place > 0, before, e.constant(F32, 0.0)))
        rate, bias = e.load(args.decay + head * 4, F32), e.load(args.dt_bias + head * 4, F32)
        with e.loop(0, count) as i:
            own = args.projected + ((row + i) * spec.columns + head) * 4
            offset = 4 * (spec.channels + spec.value_heads * spec.value_dim)
            b, a = e.load(own, F32, offset), e.load(own, F32, offset + 4 * spec.value_heads)
            total.add(rate * _softplus(e, a + bias))
            e.store(total.get(), decays + (place + i) * 4)
            e.store(e.exp(total.get()), self._since + i * 4)
            e.store(e.like(1.0, b) / (e.exp(-b) + 1.0), self._beta + i * 4)

    def _weigh(self, count: Value, place: Value, decays: Value) -> None:
        """`scores` → `weights`: what the updates of the block's tokens weigh in the rows' updates and results."""
        e, block_row = self._e, 4 * self._spec.block
        with e.loop(0, count) as i:
            at = place + i
            own, beta = e.load(decays + at * 4, F32), e.load(self._beta + i * 4, F32)
            last = at.trunc(I32)
            for first, lanes in pieces(self._spec.block):
                numbers = e.constant(vector(I32, lanes), list(range(first, first + lanes)))
                between = e.exp(-e.load(decays, vector(F32, lanes), 4 * first) + own)
                zero, key, query = e.zero(between.type), i * block_row, (count + i) * block_row
                known = between * e.load(self._scores + key, between.type, 4 * first) * -beta
                e.store(e.select(numbers < last, known, zero), self._weights + key, 4 * first)
                queried = between * e.load(self._scores + query, between.type, 4 * first)
                e.store(e.select(numbers <= last, queried, zero), self._weights + query, 4 * first)

    def _gate(self, head: Value, row: Value, count: Value, results: Value) -> None:
        """RMSNorm(results) · silu(z) → out."""
        e, spec, args = self._e, self._spec, self._args
        with e.loop(0, count) as i:
            own = results + i * (4 * spec.value_dim)
            z = args.projected + ((row + i) * spec.columns + head * spec.value_dim) * 4
            target = args.out + ((row + i) * spec.value_heads + head) * (4 * spec.value_dim)
            squares = e.variable(e.constant(F32, 0.0))
            parts = [(first, vector(F32, lanes)) for first, lanes in pieces(spec.value_dim)]
            for first, kind in parts:
                x = e.load(own, kind, 4 * first)
                squares.add(e.sum_lanes(x * x))
            mean = squares.get() * (1.0 / spec.value_dim) + args.eps
            factor = e.like(1.0, mean) / e.sqrt(mean)
            for first, kind in parts:
                gate = self._silu(e.load(z, kind, 4 * (spec.channels + first)))
                x = e.load(own, kind, 4 * first) * factor * e.load(args.norm, kind, 4 * first)
                e.store(x * gate, target, 4 * first)

    def _silu(self, x: Value) -> Value:
        return x / (self._e.exp(-x) + 1.0)

    # -- the end of a block ------------------------------------------------------------------------------------

    def advance(self, number: Value) -> None:
        """Make the state at the end of the block that at the start of the next one, and keep it if it is asked for."""
        e, spec, args = self._e, self._spec, self._args
        before = 4 * spec.channels * (spec.width - 1)
        kept = e.variable(e.i64(-1))
        with e.when(number < args.blocks):
            kept.set(e.load(args.kept + number * 4, I32).sext(I64))
        with e.loop(0, spec.shared) as member:
            head = self._value_head(member)
            self._advance_matrix(head, kept.get())
            self._advance_inputs(self._value_channel(head), spec.value_dim, kept.get(), before)
        for channel, count in self._parts():
            self._advance_inputs(channel, count, kept.get(), before)

    def _advance_matrix(self, head: Value, kept: Value) -> None:
        e, spec, args = self._e, self._spec, self._args
        of_slot, size = self._slot * spec.value_heads + head, 4 * spec.key_dim * spec.value_dim
        matrix = args.matrices + of_slot * size
        decays = args.decays + of_slot * (4 * spec.block)
        value_row = 4 * spec.value_dim
        at_end = e.load(decays, F32, 4 * (spec.block - 1))
        with e.loop(0, spec.block) as i:
            factor = e.exp(at_end - e.load(decays + i * 4, F32))
            update = args.updates + (of_slot * spec.block + i) * value_row
            for first, lanes in pieces(spec.value_dim):
                e.store(e.load(update, vector(F32, lanes), 4 * first) * factor, self._scaled + i * value_row, 4 * first)
        whole = e.exp(at_end)
        self._product(
            Left(self._keys, 4 * spec.block, e.i64(spec.key_dim), e.i64(spec.block)),
            (self._scaled, spec.value_dim),
            lambda i, first, lanes: e.load(matrix + i * value_row, vector(F32, lanes), 4 * first) * whole,
            lambda i, first, value: e.store(value, matrix + i * value_row, 4 * first),
        )
        with e.when(kept >= 0):
            target = args.end_matrices + (kept * spec.value_heads + head) * size
            with e.loop(0, spec.key_dim) as i:
                for first, lanes in pieces(spec.value_dim):
                    at = i * value_row
                    e.store(e.load(matrix + at, vector(F32, lanes), 4 * first), target + at, 4 * first)

    def _advance_inputs(self, channel: Value, count: int, kept: Value, before: int) -> None:
        e, spec = self._e, self._spec
        for back in range(spec.width - 1):
            at = self._inputs + channel * 4 + e.i64(4 * spec.channels * back)
            for first, lanes in pieces(count):
                x = e.load(at + e.i64(4 * spec.channels * spec.block), vector(F32, lanes), 4 * first)
                e.store(x, at, 4 * first)
                with e.when(kept >= 0):
                    target = self._args.end_inputs + kept * before + channel * 4 + e.i64(4 * spec.channels * back)
                    e.store(x, target, 4 * first)


def _softplus(e: Emitter, x: Value) -> Value:
    """log(1 + e^x) of a float32: max(x, 0) + 2 atanh(y / (2 + y)) with y = e^−|x|."""
    y = e.exp(-e.absolute(x))
    z = y / (y + 2.0)
    square, total = z * z, e.like(1.0 / (2 * _LOG_TERMS - 1), x)
    for term in range(_LOG_TERMS - 2, -1, -1):
        total = e.fma(total, square, e.like(1.0 / (2 * term + 1), x))
    return e.fmax(x, 0.0) + z * total * 2.0
