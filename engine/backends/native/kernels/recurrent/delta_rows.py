"""Rows of gated delta rules are added to a slot, and what they read is computed."""

from __future__ import annotations

from polarlm.engine.backends.native.kernels.multiply import Left, pieces
from polarlm.engine.backends.native.kernels.recurrent.delta_unit import Unit
from polarlm.engine.backends.native.kernels.recurrent.gates import silu, softplus
from polarlm.engine.jit.lang.values import F32, I32, Value, vector

_PREFETCHED = 256  # bytes at a time
_LENGTH_EPS = 1e-6


class Rows(Unit):
    """Emits the work of a unit on rows of one block."""

    def add(self, row: Value, count: Value, place: Value) -> None:
        """Add `count` rows from `row` on, the first at this place in the block, and compute their results."""
        e, spec = self.e, self.spec
        if not spec.is_prompt:
            self._prefetch()
        key_row = 4 * spec.key_dim
        (query, _), (key, _) = self.parts()
        with e.loop(0, count) as i:
            at, projected = place + i, self.args.projected + (row + i) * (4 * spec.columns)
            own, other = self.rows + i * key_row, self.rows + (count + i) * key_row
            self._normed(key, at, projected, own, 1.0)
            self._normed(query, at, projected, other, spec.key_dim**-0.5)
            with e.loop(0, spec.key_dim) as channel:
                e.store(e.load(own + channel * 4, F32), self.keys + (channel * spec.block + at) * 4)
        self.product(
            Left(self.rows, key_row, count * 2, e.i64(spec.key_dim)),
            (self.keys, spec.block),
            lambda i, first, lanes: e.zero(vector(F32, lanes)),
            lambda i, first, value: e.store(value, self.scores + i * (4 * spec.block), 4 * first),
            seen=place + count,
        )
        with e.loop(0, spec.shared) as member:
            self._add_to(self.value_head(member), row, count, place)

    def _prefetch(self) -> None:
        """Prefetch the matrices, which a step reads once and which its other work leaves time for."""
        e, spec = self.e, self.spec
        size = 4 * spec.key_dim * spec.value_dim
        with e.loop(0, spec.shared) as member:
            matrix = self.matrix(self.value_head(member))
            with e.loop(0, size // _PREFETCHED * _PREFETCHED, _PREFETCHED) as at:
                e.prefetch(matrix + at, _PREFETCHED)

    def _normed(self, channel: Value, at: Value, projected: Value, target: Value, length: float) -> None:
        """Convolve a query or a key, the token of this place, into `target`, with this length."""
        e = self.e
        squares = e.variable(e.constant(F32, _LENGTH_EPS))
        values = [
            (first, self._convolved(channel, at, projected, first, lanes)) for first, lanes in pieces(self.spec.key_dim)
        ]
        for first, x in values:
            squares.add(e.sum_lanes(x * x) if x.lanes > 1 else e.extract(x, 0) * e.extract(x, 0))
            e.store(x, target, 4 * first)
        factor = e.like(length, squares.get()) / e.sqrt(squares.get())
        for first, x in values:
            e.store(x * factor, target, 4 * first)

    def _convolved(self, channel: Value, at: Value, projected: Value, first: int, lanes: int) -> Value:
        """silu of the convolution of `lanes` channels from `channel` + first on; their newest inputs are kept."""
        e, spec, kind = self.e, self.spec, vector(F32, lanes)
        row_bytes, before = 4 * spec.channels, spec.width - 1
        own = self.inputs + at * row_bytes + channel * 4
        weights = self.args.conv + channel * 4
        newest = e.load(projected + channel * 4, kind, 4 * first)
        e.store(newest, own, 4 * first + before * row_bytes)
        total = e.zero(kind)
        for back in range(before):
            x = e.load(own, kind, 4 * first + back * row_bytes)
            total = e.fma(x, e.load(weights, kind, 4 * first + back * row_bytes), total)
        total = e.fma(newest, e.load(weights, kind, 4 * first + before * row_bytes), total)
        return silu(e, total)

    def _add_to(self, head: Value, row: Value, count: Value, place: Value) -> None:
        """Add rows to a value head, and compute its results; `rows` and `scores` are its key head's."""
        e, spec, args = self.e, self.spec, self.args
        of_slot = self.slot * spec.value_heads + head
        matrix = self.matrix(head)
        updates = args.updates + of_slot * (4 * spec.block * spec.value_dim)
        decays = args.decays + of_slot * (4 * spec.block)
        value_row, block_row = 4 * spec.value_dim, 4 * spec.block
        read, weights = self.read, self.weights
        self._gates(head, row, count, place, decays)
        self.product(
            Left(self.rows, 4 * spec.key_dim, count * 2, e.i64(spec.key_dim)),
            (matrix, spec.value_dim),
            lambda i, first, lanes: e.zero(vector(F32, lanes)),
            lambda i, first, value: e.store(value, read + i * value_row, 4 * first),
        )
        self._weigh(count, place, decays)
        channel = self.value_channel(head)
        with e.loop(0, count) as i:
            at, projected = place + i, args.projected + (row + i) * (4 * spec.columns)
            beta, since = (e.load(where + i * 4, F32) for where in (self.beta, self.since))
            for first, lanes in pieces(spec.value_dim):
                v = self._convolved(channel, at, projected, first, lanes)
                known = e.load(read + i * value_row, v.type, 4 * first)
                e.store((v - known * since) * beta, updates + at * value_row, 4 * first)
                queried = read + (count + i) * value_row
                e.store(e.load(queried, v.type, 4 * first) * since, queried, 4 * first)
        with e.loop(0, count) as i:
            at = place + i
            self.product(
                Left(weights + i * block_row, block_row, e.i64(1), at),
                (updates, spec.value_dim),
                lambda _, first, lanes, at=at: e.load(updates + at * value_row, vector(F32, lanes), 4 * first),
                lambda _, first, value, at=at: e.store(value, updates + at * value_row, 4 * first),
                tile=1,
            )
        results = read + count * value_row
        self.product(
            Left(weights + count * block_row, block_row, count, place + count),
            (updates, spec.value_dim),
            lambda i, first, lanes: e.load(results + i * value_row, vector(F32, lanes), 4 * first),
            lambda i, first, value: e.store(value, results + i * value_row, 4 * first),
        )
        self._gate(head, row, count, results)

    def _gates(self, head: Value, row: Value, count: Value, place: Value, decays: Value) -> None:
        """Add the rows' decays, and compute `beta` and `since`."""
        e, spec, args = self.e, self.spec, self.args
        before = e.load(decays + e.imax(place - 1, 0) * 4, F32)
        total = e.variable(e.select(place > 0, before, e.constant(F32, 0.0)))
        rate, bias = e.load(args.decay + head * 4, F32), e.load(args.dt_bias + head * 4, F32)
        with e.loop(0, count) as i:
            own = args.projected + ((row + i) * spec.columns + head) * 4
            offset = 4 * (spec.channels + spec.value_heads * spec.value_dim)
            b, a = e.load(own, F32, offset), e.load(own, F32, offset + 4 * spec.value_heads)
            total.add(rate * softplus(e, a + bias))
            e.store(total.get(), decays + (place + i) * 4)
            e.store(e.exp(total.get()), self.since + i * 4)
            e.store(e.like(1.0, b) / (e.exp(-b) + 1.0), self.beta + i * 4)

    def _weigh(self, count: Value, place: Value, decays: Value) -> None:
        """`scores` → `weights`: what the updates of the block's tokens weigh in the rows' updates and results."""
        e, block_row = self.e, 4 * self.spec.block
        with e.loop(0, count) as i:
            at = place + i
            own, beta = e.load(decays + at * 4, F32), e.load(self.beta + i * 4, F32)
            last = at.trunc(I32)
            for first, lanes in pieces(self.spec.block):
                numbers = e.constant(vector(I32, lanes), list(range(first, first + lanes)))
                between = e.exp(-e.load(decays, vector(F32, lanes), 4 * first) + own)
                zero, key, query = e.zero(between.type), i * block_row, (count + i) * block_row
                known = between * e.load(self.scores + key, between.type, 4 * first) * -beta
                e.store(e.select(numbers < last, known, zero), self.weights + key, 4 * first)
                queried = between * e.load(self.scores + query, between.type, 4 * first)
                e.store(e.select(numbers <= last, queried, zero), self.weights + query, 4 * first)

    def _gate(self, head: Value, row: Value, count: Value, results: Value) -> None:
        """RMSNorm(results) · silu(z) → out."""
        e, spec, args = self.e, self.spec, self.args
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
                gate = silu(e, e.load(z, kind, 4 * (spec.channels + first)))
                x = e.load(own, kind, 4 * first) * factor * e.load(args.norm, kind, 4 * first)
                e.store(x * gate, target, 4 * first)
