"""Random caches for kernels: pools of records and spans, and the expected result of attention over them.

    cache = random_cache(rng, "ring4", "ring3.5", lengths=[300, 17], head_dim=64)   # a step: every sequence has one row
    cache = random_cache(rng, "ring4", "ring3.5", lengths=[300, 17], step_rows=[4, 1])   # or several
    cache = random_cache(rng, "ring4", "ring3.5", lengths=[300, 17], rows=[200, 9])  # prompts: their last tokens
    text = source("decode_attention", keys=cache.key_layout, values=cache.value_layout, ...)
    q = rng.standard_normal((cache.rows, heads, head_dim), np.float32)
    cache.assert_attention(out, q, window)

A sequence is [sink | quantized blocks | now]. Whatever no row may read is NaN (full-precision records) or random bytes
(quantized ones), so that a kernel which reads it gives wrong results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from polarlm.engine import codecs, records
from polarlm.engine.backends.cuda.kv.cache import HEADER, SpanHeader
from polarlm.engine.quantization.conditioning import centre, read_mean
from tests.cuda.formats import EPS32


class ScoreRule(NamedTuple):
    """How scores become weights: see `KVOps.attention`. window: 0 hides nothing. sink_scores: (H,)."""

    window: int
    softcap: float | None
    sink_scores: np.ndarray | None


@dataclass(frozen=True)
class PagedCache:
    """One layer's K/V. B sequences, K KV heads, D head dim, N block size.

    keys, values: quantized records, uint8 (blocks, K, bytes); full_keys, full_values: uint8 (slots, K, bytes).
    now_keys, now_values: what `current` records are in: the full-precision pools in a step, a buffer of their own in a
    prefill. spans: int32 (B, HEADER + W). k, v: for each sequence (K, tokens, D) float64 as decoded from the codecs'
    own fields. rows: new tokens of all sequences together, which q has a row for each.
    """

    key_layout: records.Layout
    value_layout: records.Layout
    keys: np.ndarray
    values: np.ndarray
    full_keys: np.ndarray
    full_values: np.ndarray
    now_keys: np.ndarray
    now_values: np.ndarray
    spans: np.ndarray
    k: list[np.ndarray]
    v: list[np.ndarray]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        return self.key_layout.record.geometry.head_dim

    @property
    def rows(self) -> int:
        return sum(span.rows for span in self.headers)

    @property
    def headers(self) -> list[SpanHeader]:
        return headers(self.spans)

    def attention(self, q: np.ndarray, rule: ScoreRule, *, as_kernel: bool = False) -> np.ndarray:
        """q (rows, H, D) → (rows, H, D), float64.

        as_kernel: q, k, v and the weights of tokens rounded to half precision, everything else float32.
        """
        scale, sink_scores = 1 / np.sqrt(q.shape[-1]), None
        if rule.sink_scores is not None:
            sink_scores = rule.sink_scores.reshape(self.kv_heads, -1, 1)
        out = np.empty(q.shape, np.float64)
        for span, k, v in zip(self.headers, self.k, self.v, strict=True):
            first, count, position = span.first_row, span.rows, span.position
            for t in range(count):
                seen = slice(max(0, position + t - rule.window + 1) if rule.window else 0, position + t + 1)
                queries = (q[first + t] * scale).reshape(self.kv_heads, -1, q.shape[-1])
                result = _weighted(queries, k[:, seen], v[:, seen], rule.softcap, sink_scores, as_kernel)
                out[first + t] = result.reshape(q.shape[1:])
        return out

    def assert_attention(
        self,
        out: np.ndarray,
        q: np.ndarray,
        window: int = 0,
        softcap: float | None = None,
        sink_scores: np.ndarray | None = None,
    ) -> None:
        """Assert that `out` (rows, H, D) is attention of q, within the tolerance of the kernels' precision.

        That is: four times the largest error of NumPy in float32 on q, k, v and weights of tokens rounded to half
        precision, for products are added in another order and points, norms and means round apart from each other.
        Where few values leave that error to luck, half a step of half precision of the largest value stands in.
        """
        rule = ScoreRule(window, softcap, sink_scores)
        exact = self.attention(q, rule)
        rounding = np.abs(self.attention(q, rule, as_kernel=True) - exact).max()
        allowed = 4 * max(rounding, np.finfo(np.float16).eps / 2 * np.abs(exact).max(), EPS32)
        worst = np.abs(out - exact).max()
        assert worst <= allowed, f"off by up to {worst}, allowed are {allowed}"


def score_defines(softcap: float | None, sink_scores: np.ndarray | None) -> dict[str, int | float]:
    """The DEFINES of kernels of attention with a soft cap or sink scores."""
    return ({} if softcap is None else {"SOFTCAP": softcap}) | ({} if sink_scores is None else {"SINK_SCORES": 1})


def headers(spans: np.ndarray) -> list[SpanHeader]:
    """The headers of spans (B, HEADER + W)."""
    return [SpanHeader(*row) for row in spans[:, :HEADER].tolist()]


def _weighted(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, softcap: float | None, sink_scores: np.ndarray | None, as_kernel: bool
) -> np.ndarray:
    """q (K, G, D), scaled, k, v (K, S, D), sink_scores (K, G, 1) → (K, G, D)."""
    log2_e = np.log2(np.e)  # kernels compute powers of two
    if as_kernel:
        q, k, v = ((x * factor).astype(np.float16).astype(np.float32) for x, factor in ((q, log2_e), (k, 1), (v, 1)))
        q = q / np.float32(log2_e)
    scores = q @ k.swapaxes(1, 2)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    most = (
        scores.max(-1, keepdims=True) if sink_scores is None else np.maximum(scores.max(-1, keepdims=True), sink_scores)
    )
    weights = np.exp2((scores - most) * log2_e)
    total = weights.sum(-1, keepdims=True)
    if sink_scores is not None:
        total = total + np.exp2((sink_scores - most) * log2_e)
    if as_kernel:
        weights = weights.astype(np.float16).astype(np.float32)
    return weights @ v / total


def random_cache(
    rng: np.random.Generator,
    key_codec: str,
    value_codec: str,
    lengths: Sequence[int],
    *,
    rows: Sequence[int] = (),
    step_rows: Sequence[int] | None = None,
    block_size: int = 64,
    kv_heads: int = 1,
    head_dim: int = 64,
    mean_bits: int = 0,
    dropped: int = 0,
) -> PagedCache:
    """Sequences of `lengths` tokens.

    rows: new tokens of each prompt. Without it a step, with one new token of each sequence, or `step_rows`.
    mean_bits: of the means of key blocks. dropped: blocks behind the sink that a sequence has lost to its window, if it
    has so many; k and v are NaN there.
    """
    in_step, counts = not rows, rows or step_rows or [1] * len(lengths)
    plans = [_Plan(length, length - count, block_size, dropped) for length, count in zip(lengths, counts, strict=True)]
    spans = _spans(rng, plans, in_step)
    keys = _Side(key_codec, values=False, mean_bits=mean_bits, block_size=block_size, head_dim=head_dim)
    values = _Side(value_codec, values=True, mean_bits=0, block_size=block_size, head_dim=head_dim)
    built = [side.build(rng, plans, spans, kv_heads, in_step=in_step) for side in (keys, values)]
    pairs = [pair for pool in zip(*built, strict=True) for pair in pool]
    quantized_k, quantized_v, full_k, full_v, current_k, current_v, k, v = pairs
    return PagedCache(
        keys.layout, values.layout, quantized_k, quantized_v, full_k, full_v, current_k, current_v, spans, k, v
    )


@dataclass(frozen=True)
class _Plan:
    """The records of one sequence. position: of its first new row."""

    length: int
    position: int
    block_size: int
    most_dropped: int

    @property
    def rows(self) -> int:
        return self.length - self.position

    @property
    def now(self) -> int:
        """Number of the block with the first new row."""
        return self.position // self.block_size

    @property
    def dropped(self) -> int:
        return max(0, min(self.most_dropped, self.now - 1))

    @property
    def quantized(self) -> range:
        return range(1 + self.dropped, self.now)

    @property
    def now_records(self) -> int:
        return -(-self.length // self.block_size) - self.now


def _spans(rng: np.random.Generator, plans: list[_Plan], in_step: bool) -> np.ndarray:
    """Sinks, current blocks and quantized blocks at random places; ids after the last one are invalid."""
    spans = np.full((len(plans), HEADER + 3 + max(len(plan.quantized) for plan in plans)), 1 << 28, np.int32)
    ids = iter(rng.permutation(_spare(sum(len(plan.quantized) for plan in plans))))
    slots = iter(rng.permutation(_spare(3 * len(plans))))
    first = records = 0
    for row, plan in zip(spans, plans, strict=True):
        sink = next(slots) if plan.now else -1
        now = next(slots) if in_step else records
        records += plan.now_records
        behind = now + 1
        if in_step:
            behind = next(slots) if plan.now_records > 1 else 1 << 28
        row[:HEADER] = SpanHeader(
            first, plan.rows, plan.position, sink, 1 + plan.dropped, len(plan.quantized), now, plan.now, behind
        )
        row[HEADER : HEADER + len(plan.quantized)] = [next(ids) for _ in plan.quantized]
        first += plan.rows
    return spans


def _spare(used: int) -> int:
    """Size of a pool with `used` records in use."""
    return used + 2


@dataclass(frozen=True)
class _Side:
    """The encoding of keys or of values into records."""

    codec: str
    values: bool
    mean_bits: int
    block_size: int
    head_dim: int

    @property
    def layout(self) -> records.Layout:
        return records.layout(codecs.get(self.codec), self.values, self.block_size, self.head_dim, self.mean_bits)

    @property
    def full_layout(self) -> records.Layout:
        return records.layout(codecs.get("f16"), self.values, self.block_size, self.head_dim, 0)

    def build(
        self, rng: np.random.Generator, plans: list[_Plan], spans: np.ndarray, kv_heads: int, in_step: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
        """Pools of quantized, full-precision and current records; each sequence's decoded tokens (K, tokens, D)."""
        quantized_bytes, full_bytes = self.layout.nbytes, self.full_layout.nbytes
        blocks = _spare(sum(len(plan.quantized) for plan in plans))
        quantized = rng.integers(0, 256, (blocks, kv_heads, quantized_bytes), np.uint8)
        exact = np.full((_spare(3 * len(plans)), kv_heads, full_bytes), 0xFF, np.uint8)  # NaN
        now = (
            exact
            if in_step
            else np.full((sum(plan.now_records for plan in plans), kv_heads, full_bytes), 0xFF, np.uint8)
        )
        decoded = []
        for row, span, plan in zip(spans, headers(spans), plans, strict=True):
            x = self._vectors(rng, kv_heads, plan.length)
            known = np.full(x.shape, np.nan)
            if plan.now:
                exact[span.sink], known[:, : self.block_size] = self._exact(x[:, : self.block_size])
            if plan.quantized:
                ids = row[HEADER : HEADER + len(plan.quantized)]
                part = slice(plan.quantized.start * self.block_size, plan.quantized.stop * self.block_size)
                quantized[ids], known[:, part] = self._quantized(x[:, part])
            for i in range(plan.now_records):
                part = slice((plan.now + i) * self.block_size, (plan.now + i + 1) * self.block_size)
                now[span.next + i - 1 if i else span.current], known[:, part] = self._exact(x[:, part])
            decoded.append(known)
        return quantized, exact, now, decoded

    def _vectors(self, rng: np.random.Generator, kv_heads: int, length: int) -> np.ndarray:
        """(K, length, D) float32, of several magnitudes, with an offset for each channel."""
        magnitude = np.exp(0.3 * rng.standard_normal((kv_heads, length, 1)))
        offset = rng.standard_normal((kv_heads, 1, self.head_dim))
        return (magnitude * rng.standard_normal((kv_heads, length, self.head_dim)) + offset).astype(np.float32)

    def _exact(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (K, S ≤ N, D) → records (K, bytes) with NaN after the last token, and the tokens (K, S, D)."""
        halves = np.full((len(x), self.block_size, self.head_dim), np.nan, np.float16)
        halves[:, : x.shape[1]] = x
        return self.full_layout.pack({"values": halves}, {}), halves[:, : x.shape[1]].astype(np.float64)

    def _quantized(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (K, B·N, D) → records (B, K, bytes), and the decoded tokens (K, B·N, D)."""
        codec = codecs.get(self.codec)
        blocks = x.reshape(len(x), -1, self.block_size, self.head_dim)
        mean: dict[str, np.ndarray] = {}
        if self.mean_bits:
            blocks, mean = centre(blocks, self.mean_bits)
        fields = codec.encode(blocks)
        decoded = codec.decode(fields).astype(np.float64)
        if mean:
            decoded += read_mean(mean)[..., None, :]
        return self.layout.pack(fields, mean).swapaxes(0, 1), decoded.reshape(x.shape)
