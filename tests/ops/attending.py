"""Random sequences in a cache of any backend: rows of a step, or of prompts, attend to them; and how near to attention
in float64 each backend's result is.

    case = case_of(ops, Shape(types=("ring4", "ring3.5")), [Sequence_(300), Sequence_(17, rows=4)], window=100)
    case.check(case.attended())

A sequence is [sink | quantized blocks | full precision]. Memory that no row may read is NaN, or large numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.kv import AttentionRule, CacheFormat, HeadTransform, KVLocation, SpanView
from polarlm.engine.quantization.conditioning import centre, read_mean
from tests.ops import reference

EPS16, EPS32 = (float(np.finfo(kind).eps) for kind in (np.float16, np.float32))


class Sequence_(NamedTuple):
    """Tokens that a sequence has, and rows that a step or a prompt adds. done: those of the tokens that are earlier
    rows of the same prompt, and so in its buffer. kept: newest complete blocks of the others that are in full
    precision."""

    length: int
    rows: int = 1
    done: int = 0
    kept: int = 0


class Shape(NamedTuple):
    """Of a layer. types: codecs of keys and of values; None if these are keys. mean_bits: of the means of key blocks, 0
    without."""

    types: tuple[str, str | None] = ("f16", "f16")
    dim: int = 64
    group: int = 3
    block_size: int = 16
    mean_bits: int = 8
    kv_heads: int = 2

    @property
    def format(self) -> CacheFormat:
        k, v = (None if name is None else codecs.get(name) for name in self.types)
        assert k is not None
        return CacheFormat(k, v, None, None, self.mean_bits, self.block_size, self.kv_heads, self.dim)


@dataclass(frozen=True)
class Case:
    """The inputs of attention. keys, values: of each sequence (tokens, K, D) float64, as they read back."""

    ops: Any
    cache: Any
    views: list[SpanView]
    q: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    rule: AttentionRule
    transform: HeadTransform | None = None

    @property
    def is_prompt(self) -> bool:
        return self.views[0].current.buffer is not None

    def alone(self, number: int) -> Case:
        """A sequence as a case of its own."""
        view = self.views[number]
        one = replace(view, rows=slice(0, view.rows.stop - view.rows.start))
        sides = [self.keys[number]], [self.values[number]]
        return replace(self, views=[one], q=self.q[view.rows], keys=sides[0], values=sides[1])

    def with_rule(self, **changes: Any) -> Case:
        return replace(self, rule=self.rule._replace(**changes))

    def attended(self) -> np.ndarray:
        return np.array(self.ops.to_host(self.on_device()))

    def on_device(self, consumer: Any = None) -> Any:
        """The result of the backend, (T, H, D). consumer: the product that reads it."""
        ops, rule = self.ops, self.rule._replace(consumer=consumer)
        if rule.sink_scores is not None:
            rule = rule._replace(sink_scores=ops.to_device(rule.sink_scores))
        if self.transform is not None:
            rule = rule._replace(transform=ops.prepare([self.transform])[0])
        if ops.backend == "cuda" and self.is_prompt:  # queries of a prompt are a part of what a product gave
            q = ops.to_device(np.concatenate([self.q, self.q[:, :1] + 9], axis=1))[:, :-1]
        else:
            q = ops.to_device(self.q)
        spans = ops.spans(self.views, self.cache.format.block_size)
        return ops.attention(q, self.cache, spans, rule)

    def exact(self, *, half_precision: bool = False) -> np.ndarray:
        """Attention in float64: (T, H, D)."""
        out = self._attend(partial(reference.attention, half_precision=half_precision))
        if self.transform is not None:
            out = out if self.transform.scale_back is None else out * self.transform.scale_back[:, None]
            rotation = self.transform.value_rotation
            out = out if rotation is None else out @ rotation.T.astype(np.float64)
        return out

    def _attend(self, function: Callable[..., np.ndarray]) -> np.ndarray:
        """function(q, k, v, visible, rule) of all sequences: (T, H, D)."""
        out = np.empty(self.q.shape)
        for view, k, v in zip(self.views, self.keys, self.values, strict=True):
            rows = view.rows.stop - view.rows.start
            visible = reference.causal_mask(view.position, rows, len(k), self.rule.window, view.sees)
            out[view.rows] = function(self.q[view.rows], k, v, visible, self.rule)
        return out

    def _deviation(self, rounding: reference.Rounding) -> np.ndarray:
        """Of a result that products of rounded numbers compute: (T, H, D)."""
        variance = self._attend(partial(reference.deviation, rounding=rounding)) ** 2
        if self.transform is not None:
            scale_back, rotation = self.transform.scale_back, self.transform.value_rotation
            variance = variance if scale_back is None else variance * scale_back[:, None] ** 2
            variance = variance if rotation is None else variance @ rotation.T.astype(np.float64) ** 2
        return np.sqrt(variance)

    def _rounding(self) -> reference.Rounding | None:
        """How a prompt's queries, keys, values and weights are rounded to 16 bits; None where they are float32."""
        format = self.ops._matrix_format(self.q.shape[2]) if self.ops.backend == "native" and self.is_prompt else None
        return None if format is None else {"bfloat": reference.BFLOAT, "words": reference.WORDS}[format.name]

    def check(self, actual: np.ndarray) -> None:
        """Assert that a result is attention, within what the backend's arithmetic may be off by.

        A GPU: four times the largest error of NumPy in float32 on q, k, v and weights of tokens rounded to half
        precision, for products are added in another order, and points, norms and means round apart from each other.
        Where few values leave that error to luck, half a step of half precision of the largest value stands in.

        Float32 over numbers that blocks hold exactly, and prompts, whose blocks are decoded: 1e-5 of each vector's norm
        and of the largest value. Prompts that attend by numbers of 16 bits: 6 standard deviations of their rounding.

        Steps of compiled kernels over codes: queries are bytes. A query's error is its largest channel / 127 / √12 for
        each channel, and so is, about, the error of a table's points. Keys have channels of about unit variance around
        their mean, so a score is off by √2 times that, times √D and the scale of scores: for 64 normal channels, whose
        largest is near 2.6, by .02. A weight is off by that factor, by its own for each token, and so is what the
        weights sum up to. The bytes of weights and of the values' points add less than .01. That is of the mean of
        vectors, which fewer than 12 leave to luck.
        """
        wanted, format = self.exact(), self.cache.format
        assert actual.shape == wanted.shape
        error = np.abs(actual - wanted)
        if (rounding := self._rounding()) is not None:
            deviation = self._deviation(rounding) + 1e-5 * np.linalg.norm(wanted, axis=-1, keepdims=True)
            assert (error <= 6 * deviation).all(), f"off by up to {(error / deviation).max()} standard deviations"
            assert (error**2).mean() < (deviation**2).mean()
        elif self.ops.backend == "cuda":
            rounding = np.abs(self.exact(half_precision=True) - wanted).max()
            allowed = 4 * max(rounding, EPS16 / 2 * np.abs(wanted).max(), EPS32)
            assert error.max() <= allowed, f"off by up to {error.max()}, allowed are {allowed}"
        elif self.ops.backend == "numpy" or self.is_prompt or not any(map(codecs.is_quantized, codecs_of(format))):
            assert actual.dtype == np.float32
            norms = np.linalg.norm(wanted, axis=-1, keepdims=True)
            assert (error <= 1e-5 * np.minimum(norms, np.abs(wanted).max())).all(), f"off by up to {error.max()}"
        else:
            largest = np.abs(self.q).max(-1) / 127
            most = 0.01 + self.rule.scale * np.sqrt(2 * self.q.shape[-1] / 12) * np.sqrt((largest**2).mean())
            most *= max(1, np.sqrt(12 / largest.size))
            assert np.sqrt((error**2).mean() / (wanted**2).mean()) < most
            assert error.max() < 4 * most * np.abs(wanted).max()


def case_of(
    ops: Any,
    shape: Shape,
    sequences: Sequence[Sequence_],
    window: int | None = None,
    *,
    is_prompt: bool = False,
    seed: int = 0,
) -> Case:
    """Slots and buffers hold keys and values exactly. Every second sequence has its sink, and two blocks, that no row
    sees."""
    rng, n, format = np.random.default_rng(seed), shape.block_size, shape.format
    most_blocks = 3 + sum(sequence.length // n for sequence in sequences)
    most_slots = 2 + sum(2 + sequence.kept + sequence.rows // n + 1 for sequence in sequences)
    ids, slots = rng.permutation(most_blocks).tolist(), iter(rng.permutation(most_slots).tolist())
    cache = ops.cache(format, most_blocks, most_slots)
    buffer_blocks = sum((of.done + of.rows) // n + of.kept + 2 for of in sequences)
    buffer = ops.buffer(format, n * buffer_blocks) if is_prompt else None
    _poison(ops, cache, buffer)
    first, buffered, views = 0, 0, list[SpanView]()
    keys, values, in_full = list[np.ndarray](), list[np.ndarray](), list[_FullBlock]()
    for number, (length, rows, done, kept) in enumerate(sequences):
        k, v = (rng.standard_normal((length + rows, shape.kv_heads, shape.dim)) for _ in "kv")
        k, v = (x.astype(np.float16).astype(np.float32) for x in (k + rng.standard_normal(k.shape[1:]), v))
        v = k if format.codec_v is None else v
        complete, oldest = (length - done) // n, 0 if window is None else max(0, length - window + 1)
        spare, first_full = 2 * (number % 2), max(min(1, complete), complete - kept)
        own = range(max(1, min(oldest // n - spare, first_full)), first_full)
        table, ids = ids[: len(own)], ids[len(own) :]
        sink = next(slots) if complete and (oldest < n or spare) else None
        current = range(first_full, (length + rows - 1) // n + 1)
        places = [
            KVLocation(buffer, buffered + i) if is_prompt else KVLocation(None, next(slots))
            for i in range(len(current))
        ]
        buffered += len(places)
        blocks = [*zip(current, places, strict=True), *([] if sink is None else [(0, KVLocation(None, sink))])]
        in_full += [_FullBlock(place, k[block * n :][:n], v[block * n :][:n], block * n) for block, place in blocks]
        if table:
            part = slice(own[0] * n, own[-1] * n + n)
            k[part], v[part] = _store(ops, cache, table, k[part], v[part])
        start, following = (own[0] if table else 1) * n, [place.block for place in places[1:]]
        at = slice(first, first + rows), length, places[0], first_full * n, sink, table, start
        views.append(SpanView(*at, () if is_prompt else following))
        first += rows
        keys.append(k.astype(np.float64))
        values.append(v.astype(np.float64))
    spare_block = 100 * rng.standard_normal((2, n, shape.kv_heads, shape.dim), np.float32)
    _store(ops, cache, ids, *np.tile(spare_block, (1, len(ids), 1, 1)))
    for is_in_slot in (True, False):
        _append(ops, cache, [one for one in in_full if (one.place.buffer is None) == is_in_slot], n)
    q = rng.standard_normal((first, shape.kv_heads * shape.group, shape.dim), np.float32)
    rule = AttentionRule(2.4 / shape.dim**0.5, window)
    return Case(ops, cache, views, q, keys, values, rule)


def codecs_of(format: CacheFormat) -> list[codecs.Codec]:
    """Of keys and, if they are stored, of values."""
    return [codec for codec in (format.codec_k, format.codec_v) if codec is not None]


class _FullBlock(NamedTuple):
    """A block in full precision: where it lies, its tokens k, v (T, K, D), and the position of the first."""

    place: KVLocation
    k: np.ndarray
    v: np.ndarray
    start: int


def _poison(ops: Any, cache: Any, buffer: Any) -> None:
    """NaN in all slots, and in a buffer."""
    arrays = [*(cache.full if ops.backend == "cuda" else (cache.full_k, cache.full_v))]
    if buffer is not None:
        arrays += buffer[0] if ops.backend == "cuda" else buffer
    for array in arrays:
        array[...] = 0xFF if ops.backend == "cuda" else np.nan


def _append(ops: Any, cache: Any, blocks: Sequence[_FullBlock], n: int) -> None:
    if not blocks:
        return
    ends = np.cumsum([len(block.k) for block in blocks]).tolist()
    rows = [slice(end - len(block.k), end) for end, block in zip(ends, blocks, strict=True)]
    spans = [
        SpanView(at, block.start, block.place, block.start, None, (), n) for at, block in zip(rows, blocks, strict=True)
    ]
    sides = (np.concatenate([block[side] for block in blocks]) for side in (1, 2))
    k, v = (ops.to_device(np.concatenate([x[:, :1], x], axis=1))[:, 1:] for x in sides)  # of rows with more heads
    ops.append_kv(cache, ops.spans(spans, n), k, v)


def _store(ops: Any, cache: Any, ids: Sequence[int], k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Store k, v (T, K, D), of whole blocks, as codes; return what they decode to."""
    format = cache.format
    by_block = (len(ids), format.block_size, format.kv_heads, format.head_dim)
    x, y = (side.reshape(by_block).swapaxes(1, 2) for side in (k, v))  # (B, K, N, D)
    centred, mean = centre(x, format.mean_bits) if format.mean_bits else (x, {})
    v_fields = {} if format.codec_v is None else format.codec_v.encode(y)
    fields = {"k": format.codec_k.encode(centred), "v": v_fields, "mean": mean}
    ops.write_blocks(cache, ids, {f"{side}.{name}": x for side, of in fields.items() for name, x in of.items()})
    keys = format.codec_k.decode(fields["k"])
    if mean:
        keys = keys + read_mean(mean)[:, :, None]
    decoded = keys, keys if format.codec_v is None else format.codec_v.decode(v_fields)
    return decoded[0].swapaxes(1, 2).reshape(k.shape), decoded[1].swapaxes(1, 2).reshape(v.shape)
