"""The state of a unit that encodes a block of one KV head: its arguments, its scratch, and products of its vectors."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.linear import LinearTable
from polarlm.engine.codecs.ring import RingTable
from polarlm.engine.codecs.turbo import TurboTable
from polarlm.engine.jit.lang import F32, I8, I16, Emitter, Type, Value, Values, Variable, vector
from polarlm.engine.jit.lang.records import Int64, Kernel, Pointer, read
from polarlm.engine.jit.run.workers import SCRATCH
from polarlm.engine.quantization.metric import Metric

LANES = 16
TABLES = RingTable, TurboTable, LinearTable  # that kernels round to
_F16 = vector(F32, LANES)


class EncodeArguments(NamedTuple):
    blocks: Pointer
    damaged: Pointer
    dim: Int64
    is_half: Int64


class BlockAddresses(NamedTuple):
    """The addresses that a unit reads and writes.

    x (N, D) float32 or float16; the error metric's arrays for its KV head, as `EncodingSpec` describes them; then the
    outputs: a tile, and the fields of the block mean.
    """

    x: Pointer
    feedback: Pointer
    matrix: Pointer
    costs: Pointer
    mean_query: Pointer
    tiles: Pointer
    mean: Pointer
    mean_scale: Pointer


@dataclass(frozen=True)
class EncodingSpec:
    """The properties that a kernel is specialized for.

    bits: bits of a code. width: values per code, 2 for `ring`, 1 for `turbo` and `linear`. tokens: N, a multiple of 16.
    tilted: norms are tilted, by `mean_query` (D,). is_fed_back: errors of earlier pairs change what the next ones aim
    at, by the metric's `feedback` (D, D). mean_bits: bits of the block mean that is subtracted; 0 for none. has_metric:
    if False, codes name the nearest points, and norms are the RMS, at most `largest`; of `linear` (`is_linear`) those
    that cover the largest value. Else norms are fitted by the residues of errors, which `matrix` (D, D) makes and which
    cost `costs` (D / 2, 4), as of `residue_costs`.
    """

    bits: int
    width: int
    tokens: int
    tilted: bool
    mean_bits: int
    has_metric: bool = True
    largest: float = math.inf
    is_linear: bool = False
    is_fed_back: bool = True

    @property
    def name(self) -> str:
        table = "linear" if self.is_linear else "ring" if self.width == 2 else "turbo"
        parts = "_tilted" * self.tilted, f"_mean{self.mean_bits}"
        alone = "" if self.has_metric else f"_alone{self.largest:.0f}"
        alone += "" if self.is_fed_back else "_forward"
        return f"encode_{table}{self.bits}_{self.tokens}{''.join(parts)}{alone}"

    @property
    def code(self) -> Type:
        return I16 if self.bits > 8 else I8


def scratch_bytes(encoding: EncodingSpec, head_dim: int) -> int:
    pairs, row = head_dim // encoding.width, 4 * encoding.tokens
    arrays = 4 if encoding.has_metric else 2  # (D, N)
    nbytes = (arrays * head_dim + encoding.width + 3 + head_dim // 32) * row + 4 * head_dim
    return nbytes + pairs * row + (7 + pairs) * row * encoding.has_metric


def side_of(format: CacheFormat, side: int) -> tuple[Codec, Metric | None]:
    """The codec and the metric of keys (side 0) or values (1)."""
    codec, metric = ((format.codec_k, format.metric_k), (format.codec_v, format.metric_v))[side]
    assert codec is not None
    return codec, metric


def _in_scratch(encoding: EncodingSpec, format: CacheFormat, side: int) -> EncodingSpec | str:
    """The encoding, or why it is not possible."""
    if scratch_bytes(encoding, format.head_dim) <= SCRATCH:
        return encoding
    return (
        f"{SCRATCH >> 10} KiB of scratch memory are too few to encode {format.block_size} tokens of {format.head_dim} "
        f"channels as {side_of(format, side)[0].name}; a smaller block_size needs less"
    )


def by_rounding(format: CacheFormat, side: int) -> EncodingSpec | str:
    """The encoding of keys (side 0) or values (1) for a codec that rounds to a table of points, or why no kernel has
    it."""
    codec, metric = side_of(format, side)
    rounding = codec.rounding
    if not isinstance(rounding, TABLES):
        return f"no kernel rounds to the table of {codec.name}"
    encoding = EncodingSpec(
        bits=rounding.code_bits,
        width=rounding.width,
        tokens=format.block_size,
        tilted=metric is not None and metric.tilt_mean is not None,
        mean_bits=0 if side else format.mean_bits,
        has_metric=metric is not None,
        # Without a limit, vectors of `turbo` whose norm overflows get the codes next to 0, as in NumPy.
        largest=float(rounding.norms.largest) if metric is None and not isinstance(rounding, TurboTable) else math.inf,
        is_linear=metric is None and isinstance(rounding, LinearTable),
        is_fed_back=metric is None or bool(metric.feedback.any()),
    )
    return _in_scratch(encoding, format, side)


class Unit:
    """Emits the work on one block. Sizes of rows are in bytes; the memory is in scratch."""

    def __init__(self, e: Emitter, spec: EncodingSpec, args: EncodeArguments, number: Value, scratch: Value) -> None:
        self.e, self.encoding, self.dim, self.is_half = e, spec, args.dim, args.is_half
        self.block, self._args, self._number = read(e, BlockAddresses, args.blocks, number), args, number
        self.width, self.tokens = spec.width, spec.tokens
        self.row = 4 * self.tokens  # bytes
        self.row_of_pairs = self.width * self.row
        self.pairs = self.dim // self.width
        self.scratch = scratch
        self.target_of_pair = self.allocate(self.row_of_pairs)
        self.norms, self.inverses = self.allocate(self.row), self.allocate(self.row)
        self.x = self.allocate(self.dim * self.row)  # (D, N)
        self.errors = self.allocate(self.dim * self.row)  # (D, N)
        self.codes = self.allocate(self.pairs * self.row)
        self.mean = self.allocate(self.dim * 4)
        if spec.has_metric:
            self.metric_x, self.metric_errors = (self.allocate(self.dim * self.row) for _ in range(2))  # (D, N)
            self.rms, self.costs, self.least = self.allocate(self.row), self.allocate(self.row), self.allocate(self.row)
            self.best_codes, self.best_norms = self.allocate(self.pairs * self.row), self.allocate(self.row)
            self.sums_of_x = self.allocate(3 * self.row)

    def report(self, damaged: Value) -> None:
        """damaged: a byte, 1 if x is not finite."""
        self.e.store(damaged, self._args.damaged + self._number)

    def allocate(self, nbytes: int | Value) -> Value:
        """The address of the next `nbytes` bytes of scratch."""
        first = self.scratch
        self.scratch = first + nbytes
        return first

    def vectors(self) -> AbstractContextManager[Value]:
        """A loop over the vectors of 16 tokens in a row; its variable is their offset in bytes."""
        return self.e.loop(0, self.row, 64)

    def vector_tile(self, vectors: int) -> int:
        """The number of vectors of tokens that are multiplied together, so that their sums stay in registers."""
        most = vectors if self.e.level.has_room else 1
        return max(n for n in range(1, most + 1) if self.tokens // LANES % n == 0)

    def clear(self, start: Value, nbytes: Value) -> None:
        with self.e.loop(0, nbytes, 64) as offset:
            self.e.store(self.e.zero(_F16), start + offset)

    def products(self, rows: Values, sources: Values, count: Value) -> list[list[Value]]:
        """For each row of coefficients and each source, Σ of the first `count` coefficients times vectors.

        count: even. The vectors of a source are `self.row` bytes apart.
        """
        e = self.e
        chains = 2 if len(rows) * len(sources) < 8 else 1  # independent multiply-adds hide their latency
        sums = [[[e.variable(e.zero(_F16)) for _ in range(chains)] for _ in sources] for _ in rows]
        with e.loop(0, count, 2) as number:
            for step in (0, 1):
                factors = [e.broadcast(row + number * 4, F32, LANES, 4 * step) for row in rows]
                for place, source in enumerate(sources):
                    value = e.load(source + number * self.row, _F16, step * self.row)
                    for factor, by_source in zip(factors, sums, strict=True):
                        total = by_source[place][step % chains]
                        total.set(e.fma(factor, value, total.get()))
        return [[add_chains(by_chain) for by_chain in by_source] for by_source in sums]


def add_chains(chains: Sequence[Variable]) -> Value:
    return functools.reduce(operator.add, (chain.get() for chain in chains))


def encoder(name: str, encoding: EncodingSpec, write: Callable[[Unit], None]) -> Kernel[EncodeArguments]:
    """The kernel that encodes blocks into tiles, as `write` emits it for a block.

    blocks (units,): a `BlockAddresses` each; dim: D; is_half: whether all x are float16, as in slots. damaged (units,)
    uint8: 1 where x is not finite. Needs `scratch_bytes` of scratch.
    """

    def emit(e: Emitter, args: EncodeArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as number:
            write(Unit(e, encoding, args, number, scratch))

    return Kernel(name, emit, EncodeArguments)


def plain_encoder(
    name: str, format: CacheFormat, side: int, write: Callable[[Unit], None]
) -> Kernel[EncodeArguments] | str:
    """The kernel that encodes keys (side 0) or values (1) for codecs without an error metric into the tiles `name`, as
    `write` emits it for a block; or why there is none."""
    mean_bits = 0 if side else format.mean_bits
    encoding = EncodingSpec(8, 1, format.block_size, tilted=False, mean_bits=mean_bits, has_metric=False)
    fitting = _in_scratch(encoding, format, side)
    return fitting if isinstance(fitting, str) else encoder(f"encode_mean{mean_bits}_{name}", encoding, write)
