"""Delta rules: rows are added to slots, block by block; see `engine.backends.numpy.recurrent`.

Every sum of a row has its terms in the order of the tokens, so that it does not depend on which rows are computed with
it, and rows that are computed one at a time leave the same state as rows that are computed together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from polarlm.engine.backends.native.kernels.multiply import LeftMatrix, offsets, pieces, product
from polarlm.engine.backends.native.kernels.recurrent import common
from polarlm.engine.backends.native.kernels.recurrent.common import RecurrentArguments
from polarlm.engine.jit.lang import F32, I32, Emitter, Kernel, Type, Value, vector
from polarlm.engine.jit.run.workers import SCRATCH

_PREFETCHED = 256  # bytes at a time
_LENGTH_EPS = 1e-6


@dataclass(frozen=True)
class DeltaSpec:
    """The properties that a kernel is specialized for.

    shared: value heads of a key head. block: N. is_prompt: whether the launch has many rows, and slots advance.
    by_channel: whether it is `Ops.channel_delta`; then every value head has a key of its own.
    """

    key_heads: int
    shared: int
    key_dim: int
    value_dim: int
    block: int
    width: int
    tiled: bool
    is_prompt: bool
    by_channel: bool = False

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
        kind = "channel" if self.by_channel else "gated"
        return f"{kind}_delta_{sizes}{'_tiled' * self.tiled}{'_prompt' * self.is_prompt}"


def _arrays(spec: DeltaSpec) -> list[int]:
    """Offsets of a unit's arrays in scratch, float32, and their end. n: the rows of a block.

    rows (2n, A): keys, then queries. scores (2n, N): products with the block's keys. weights (2n, N): of updates, in
    later updates and in results. read (2n, D): what keys and queries read of M, then the results. scaled (N, D):
    updates, decayed to the end of the block; or (A, N): keys. beta, since (n,): σ(b), and how much M has decayed. Where
    channels decay by themselves, totals (1 + n, A): the logarithms of how much they have, before and after each row.
    """
    n, value_dim = spec.block, spec.value_dim
    scaled, totals = (n * spec.key_dim, (n + 1) * spec.key_dim) if spec.by_channel else (n * value_dim, 0)
    return offsets(2 * n * spec.key_dim, 2 * n * n, 2 * n * n, 2 * n * value_dim, scaled, n, n, totals)


def supports(spec: DeltaSpec) -> bool:
    """Whether scratch has room for a unit."""
    return _arrays(spec)[-1] <= SCRATCH


@cache
def gated_delta(spec: DeltaSpec) -> Kernel[RecurrentArguments]:
    """See `Ops.gated_delta` and `Ops.channel_delta`; one unit per span and key head."""
    unit_class = _ChannelUnit if spec.by_channel else _Unit

    def emit(e: Emitter, args: RecurrentArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            head, span = unit % spec.key_heads, common.span_of(e, args.spans, unit // spec.key_heads)
            arguments = e, spec, args, scratch, span.slot, head

            def add(row: Value, count: Value, place: Value, number: Value) -> None:
                unit_class(*arguments).add(row, count, place)
                if spec.is_prompt:
                    with e.when(place + count >= spec.block):
                        unit_class(*arguments).advance(number)

            common.for_each_block(e, spec.block, span, add)

    return Kernel(spec.name, emit, RecurrentArguments, scratch=_arrays(spec)[-1])


class _Unit:
    """Emits the work on one key head in one slot."""

    def __init__(
        self, e: Emitter, spec: DeltaSpec, args: RecurrentArguments, scratch: Value, slot: Value, head: Value
    ) -> None:
        self.e, self.spec, self.args, self.slot, self.head = e, spec, args, slot, head
        self.rows, self.scores, self.weights, self.read, self.scaled, self.beta, self.start_decay, self.totals = (
            scratch + offset for offset in _arrays(spec)[:-1]
        )
        self.keys = args.keys + (slot * spec.key_heads + head) * (4 * spec.key_dim * spec.block)
        self.inputs = args.inputs + slot * (4 * spec.channels * (spec.width - 1 + spec.block))
        self.tile = common.product_tile(e, spec.is_prompt)

    def parts(self) -> list[tuple[Value, int]]:
        """The first channel, and the number of channels, of this head's queries and keys."""
        spec, first = self.spec, self.head * self.spec.key_dim
        return [(first, spec.key_dim), (first + spec.key_heads * spec.key_dim, spec.key_dim)]

    def value_head(self, member: Value) -> Value:
        """The number of a value head that has this key."""
        spec = self.spec
        return self.head + member * spec.key_heads if spec.tiled else self.head * spec.shared + member

    def value_channel(self, head: Value) -> Value:
        return head * self.spec.value_dim + 2 * self.spec.key_heads * self.spec.key_dim

    def state(self, head: Value) -> common.StateMatrix:
        spec, number = self.spec, self.slot * self.spec.value_heads + head
        sizes = spec.key_dim, spec.value_dim, spec.block
        return common.StateMatrix.from_arguments(self.args, number, self.keys, sizes, by_channel=spec.by_channel)

    def row_address(self, row: Value) -> Value:
        """The address of a row's q, k, v and what follows."""
        return self.args.projected + row * (4 * self.spec.columns)

    def add(self, row: Value, count: Value, place: Value) -> None:
        """Add `count` rows from `row` on, the first at this place in the block, and compute their results."""
        e, spec = self.e, self.spec
        if not spec.is_prompt:
            self._prefetch()
        key_row = 4 * spec.key_dim
        (query, _), (key, _) = self.parts()
        with e.loop(0, count) as i:
            token, projected = place + i, self.row_address(row + i)
            key_at, other = self.rows + i * key_row, self.rows + (count + i) * key_row
            self._normalize(key, token, projected, key_at, 1.0)
            self._normalize(query, token, projected, other, spec.key_dim**-0.5)
            with e.loop(0, spec.key_dim) as channel:
                e.store(e.load(key_at + channel * 4, F32), self.keys + (channel * spec.block + token) * 4)
        self._score(count, place)
        with e.loop(0, spec.shared) as member:
            self._add_to(self.value_head(member), row, count, place)

    def _score(self, count: Value, place: Value) -> None:
        """Multiply keys and queries with the keys of the block."""
        e, spec = self.e, self.spec
        product(
            e,
            LeftMatrix(self.rows, 4 * spec.key_dim, count * 2, e.i64(spec.key_dim)),
            (self.keys, spec.block),
            lambda i, first, lanes: e.zero(vector(F32, lanes)),
            lambda i, first, value: e.store(value, self.scores + i * (4 * spec.block), 4 * first),
            self.tile,
            visible_columns=place + count,
        )

    def _prefetch(self) -> None:
        """Prefetch the matrices, which a step reads once and which its other work leaves time for."""
        e, spec = self.e, self.spec
        size = 4 * spec.key_dim * spec.value_dim
        with e.loop(0, spec.shared) as member:
            matrix = self.state(self.value_head(member)).matrix
            with e.loop(0, size // _PREFETCHED * _PREFETCHED, _PREFETCHED) as offset:
                e.prefetch(matrix + offset, _PREFETCHED)

    def _normalize(self, channel: Value, token: Value, projected: Value, target: Value, length: float) -> None:
        """Convolve a query or a key, the token of this place, into `target`, with this length."""
        e = self.e
        squares = e.variable(e.constant(F32, _LENGTH_EPS))
        values = [
            (first, self._convolve(channel, token, projected, first, lanes))
            for first, lanes in pieces(self.spec.key_dim)
        ]
        for first, x in values:
            squares.add(e.sum_lanes(x * x) if x.lanes > 1 else e.extract(x, 0) * e.extract(x, 0))
            e.store(x, target, 4 * first)
        factor = e.const_like(length, squares.get()) / e.sqrt(squares.get())
        for first, x in values:
            e.store(x * factor, target, 4 * first)

    def _convolve(self, channel: Value, token: Value, projected: Value, first: int, lanes: int) -> Value:
        """silu of the convolution of `lanes` channels from `channel` + first on; their newest inputs are kept."""
        e, offset = self.e, channel * 4 + 4 * first
        inputs = self.inputs + token * (4 * self.spec.channels) + offset
        start = e.zero(vector(F32, lanes))
        return common.convolution(e, self.spec, projected + offset, inputs, self.args.conv + offset, start)

    def _add_to(self, head: Value, row: Value, count: Value, place: Value) -> None:
        """Add rows to a value head, and compute its results; `rows` and `scores` are its key head's."""
        e, spec = self.e, self.spec
        state = self.state(head)
        updates, decays = state.updates, state.decays
        value_row, block_row = 4 * spec.value_dim, 4 * spec.block
        read, weights = self.read, self.weights
        self._gates(head, row, count, place, decays)
        product(
            e,
            LeftMatrix(self.rows, 4 * spec.key_dim, count * 2, e.i64(spec.key_dim)),
            (state.matrix, spec.value_dim),
            lambda i, first, lanes: e.zero(vector(F32, lanes)),
            lambda i, first, value: e.store(value, read + i * value_row, 4 * first),
            self.tile,
        )
        self._weigh(count, place, decays)
        channel = self.value_channel(head)
        with e.loop(0, count) as i:
            token, projected = place + i, self.row_address(row + i)
            beta, start_decay = (e.load(where + i * 4, F32) for where in (self.beta, self.start_decay))
            for first, lanes in pieces(spec.value_dim):
                v = self._convolve(channel, token, projected, first, lanes)
                key_read = e.load(read + i * value_row, v.type, 4 * first)
                e.store((v - key_read * start_decay) * beta, updates + token * value_row, 4 * first)
                query_read = read + (count + i) * value_row
                e.store(e.load(query_read, v.type, 4 * first) * start_decay, query_read, 4 * first)
        with e.loop(0, count) as i:
            token = place + i
            product(
                e,
                LeftMatrix(weights + i * block_row, block_row, e.i64(1), token),
                (updates, spec.value_dim),
                lambda _, first, lanes: e.load(updates + token * value_row, vector(F32, lanes), 4 * first),
                lambda _, first, value: e.store(value, updates + token * value_row, 4 * first),
                (1, self.tile[1]),
            )
        results = read + count * value_row
        product(
            e,
            LeftMatrix(weights + count * block_row, block_row, count, place + count),
            (updates, spec.value_dim),
            lambda i, first, lanes: e.load(results + i * value_row, vector(F32, lanes), 4 * first),
            lambda i, first, value: e.store(value, results + i * value_row, 4 * first),
            self.tile,
        )
        self._gate(head, row, count, results)

    def _gates(self, head: Value, row: Value, count: Value, place: Value, decays: Value) -> None:
        """Add the rows' decays, and compute `beta` and `start_decay`."""
        e, spec, args = self.e, self.spec, self.args
        rows_before = e.load(decays + e.imax(place - 1, 0) * 4, F32)
        total = e.variable(e.select(place > 0, rows_before, e.constant(F32, 0.0)))
        rate, bias = e.load(args.decay + head * 4, F32), e.load(args.dt_bias + head * 4, F32)
        with e.loop(0, count) as i:
            logits = args.projected + ((row + i) * spec.columns + head) * 4
            offset = 4 * (spec.channels + spec.value_heads * spec.value_dim)
            b, a = e.load(logits, F32, offset), e.load(logits, F32, offset + 4 * spec.value_heads)
            total.add(rate * common.softplus(e, a + bias))
            e.store(total.get(), decays + (place + i) * 4)
            e.store(e.exp(total.get()), self.start_decay + i * 4)
            e.store(common.sigmoid(e, b), self.beta + i * 4)

    def _weigh(self, count: Value, place: Value, decays: Value) -> None:
        """`scores` → `weights`: what the updates of the block's tokens weigh in the rows' updates and results."""
        e, block_row = self.e, 4 * self.spec.block
        with e.loop(0, count) as i:
            token = place + i
            decay, beta = e.load(decays + token * 4, F32), e.load(self.beta + i * 4, F32)
            last = token.trunc(I32)
            for first, lanes in pieces(self.spec.block):
                numbers = e.constant(vector(I32, lanes), list(range(first, first + lanes)))
                pair_decay = e.exp(-e.load(decays, vector(F32, lanes), 4 * first) + decay)
                zero, key, query = e.zero(pair_decay.type), i * block_row, (count + i) * block_row
                key_read = pair_decay * e.load(self.scores + key, pair_decay.type, 4 * first) * -beta
                e.store(e.select(numbers < last, key_read, zero), self.weights + key, 4 * first)
                query_read = pair_decay * e.load(self.scores + query, pair_decay.type, 4 * first)
                e.store(e.select(numbers <= last, query_read, zero), self.weights + query, 4 * first)

    def _gate(self, head: Value, row: Value, count: Value, results: Value) -> None:
        """RMSNorm(results) · common.silu(z) → out."""
        e, spec, args = self.e, self.spec, self.args
        with e.loop(0, count) as i:
            result = results + i * (4 * spec.value_dim)
            target = args.out + ((row + i) * spec.value_heads + head) * (4 * spec.value_dim)
            squares = e.variable(e.constant(F32, 0.0))
            parts = [(first, vector(F32, lanes)) for first, lanes in pieces(spec.value_dim)]
            for first, kind in parts:
                x = e.load(result, kind, 4 * first)
                squares.add(e.sum_lanes(x * x))
            mean = squares.get() * (1.0 / spec.value_dim) + args.eps
            factor = e.const_like(1.0, mean) / e.sqrt(mean)
            for first, kind in parts:
                gate = self._gate_of(head, row + i, first, kind)
                x = e.load(result, kind, 4 * first) * factor * e.load(args.norm, kind, 4 * first)
                e.store(x * gate, target, 4 * first)

    def _gate_of(self, head: Value, row: Value, first: int, kind: Type) -> Value:
        z = self.row_address(row) + head * (4 * self.spec.value_dim)
        return common.silu(self.e, self.e.load(z, kind, 4 * (self.spec.channels + first)))

    def advance(self, number: Value) -> None:
        """Turn the state at the end of a block into the state at the start of the next one, and store it if it is
        kept."""
        e, spec, args = self.e, self.spec, self.args
        row_bytes, rows_before = 4 * spec.channels, spec.width - 1
        end_row = common.end_row(e, args.end_rows, args.blocks, number)

        def repeat(channel: Value, count: int) -> None:
            inputs = self.inputs + channel * 4
            target = args.end_inputs + end_row * (rows_before * row_bytes) + channel * 4
            common.repeat_inputs(e, inputs, (row_bytes, spec.block, rows_before), e.i64(count), (end_row >= 0, target))

        with e.loop(0, spec.shared) as member:
            head = self.value_head(member)
            target = args.end_matrices + (end_row * spec.value_heads + head) * (4 * spec.key_dim * spec.value_dim)
            self.state(head).advance(e, self.scaled, self.tile, (end_row >= 0, target))
            repeat(self.value_channel(head), spec.value_dim)
        for channel, count in self.parts():
            repeat(channel, count)


class _ChannelUnit(_Unit):
    """As `_Unit`, where channels decay by themselves: a product of a row with the keys of the block has other decays in
    each of its terms. What rows read of M is decayed with the rows, so that `start_decay` is 1."""

    def row_address(self, row: Value) -> Value:
        return self.args.projected + row * self.args.row_bytes

    def _score(self, count: Value, place: Value) -> None:
        """Decays come first: see `_gates`."""

    def _weigh(self, count: Value, place: Value, decays: Value) -> None:
        """`_gates` has."""

    def _gates(self, head: Value, row: Value, count: Value, place: Value, decays: Value) -> None:
        """Add the rows' decays, compute `beta` and `weights`, and decay the rows from the start of the block."""
        e, spec, args = self.e, self.spec, self.args
        key_row = 4 * spec.key_dim
        rate, bias = e.load(args.decay + head * 4, F32), args.dt_bias + head * key_row
        with e.loop(0, spec.key_dim) as channel:
            before = e.load(decays + (channel * spec.block + e.imax(place - 1, 0)) * 4, F32)
            e.store(e.select(place > 0, before, e.constant(F32, 0.0)), self.totals + channel * 4)
        with e.loop(0, count) as i:
            logits = args.decay_inputs + ((row + i) * spec.value_heads + head) * key_row
            total = self.totals + i * key_row
            for first, lanes in pieces(spec.key_dim):
                x, of_channel, before = (e.load(at, vector(F32, lanes), 4 * first) for at in (logits, bias, total))
                e.store(e.fma(common.softplus(e, x + of_channel), rate, before), total + key_row, 4 * first)
            with e.loop(0, spec.key_dim) as channel:
                new = e.load(total + key_row + channel * 4, F32)
                e.store(new, decays + (channel * spec.block + place + i) * 4)
            b = e.load(self.row_address(row + i) + head * 4, F32, 4 * spec.channels)
            e.store(common.sigmoid(e, b), self.beta + i * 4)
            e.store(e.constant(F32, 1.0), self.start_decay + i * 4)
        with e.loop(0, count) as i:
            self._weigh_row(i, count, place + i, decays)
            total = self.totals + (i + 1) * key_row
            key, query = self.rows + i * key_row, self.rows + (count + i) * key_row
            for first, lanes in pieces(spec.key_dim):
                decay = e.exp(e.load(total, vector(F32, lanes), 4 * first))
                for at in (key, query):
                    e.store(e.load(at, decay.type, 4 * first) * decay, at, 4 * first)

    def _weigh_row(self, i: Value, count: Value, token: Value, decays: Value) -> None:
        """Compute the weights of a row, of a token of the block: sums over channels, of vectors of tokens."""
        e, spec, block_row = self.e, self.spec, 4 * self.spec.block
        beta, last = e.load(self.beta + i * 4, F32), token.trunc(I32)
        targets = [self.weights + i * block_row, self.weights + (count + i) * block_row]
        for first, lanes in pieces(spec.block):
            zero = e.zero(vector(F32, lanes))
            for target in targets:
                e.store(zero, target, 4 * first)
            with e.when(token >= first):
                key_sum, query_sum = e.variable(zero), e.variable(zero)
                with e.loop(0, spec.key_dim) as channel:
                    row, number = channel * block_row, (i + 1) * spec.key_dim + channel
                    decay = e.exp(-e.load(decays + row, zero.type, 4 * first) + e.load(self.totals + number * 4, F32))
                    decayed = e.load(self.keys + row, zero.type, 4 * first) * decay
                    for total, at in ((key_sum, i), (query_sum, count + i)):
                        factor = e.load(self.rows + (at * spec.key_dim + channel) * 4, F32)
                        total.set(e.fma(decayed, factor, total.get()))
                numbers = e.constant(vector(I32, lanes), list(range(first, first + lanes)))
                e.store(e.select(numbers < last, key_sum.get() * -beta, zero), targets[0], 4 * first)
                e.store(e.select(numbers <= last, query_sum.get(), zero), targets[1], 4 * first)

    def _gate_of(self, head: Value, row: Value, first: int, kind: Type) -> Value:
        spec = self.spec
        z = self.args.gates + (row * spec.value_heads + head) * (4 * spec.value_dim)
        return common.sigmoid(self.e, self.e.load(z, kind, 4 * first))
