"""Blocks that are encoded on any backend, NumPy's codes of them, and what the errors of codes cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, KVLocation, SpanView
from polarlm.engine.quantization.conditioning import read_mean
from polarlm.engine.quantization.encode import encode_centred
from polarlm.engine.quantization.metric import Metric, key_metric, remove_tilt, value_metric
from polarlm.engine.quantization.statistics import output_second

Fields = dict[str, np.ndarray]


class Shape(NamedTuple):
    """Of a layer: codecs of keys and of values, head dim D, tokens N of a block, bits of key means, KV heads."""

    types: tuple[str, str]
    dim: int
    size: int = 16
    mean_bits: int = 0
    heads: int = 2


def metrics_of(shape: Shape, seed: int = 5, *, tilted: bool = True) -> list[Metric | None]:
    """Errors of some directions cost ten times what they cost in others. tilted: the norms of keys depend on
    the queries. None for codecs that have no use for a metric."""
    rng, (_, dim, _, _, heads) = np.random.default_rng(seed), shape
    key_rounding, value_rounding = (codecs.get(name).rounding for name in shape.types)
    rotation, spread = np.linalg.qr(rng.standard_normal((dim, dim)))[0], np.geomspace(1, 0.1, dim)
    output = rng.standard_normal((3 * dim, heads, 2, dim)) * spread @ rotation
    queries = rng.standard_normal((heads, 4 * dim, dim)) * spread @ rotation + 0.2
    second, mean, smoothing = queries.swapaxes(1, 2) @ queries / (4 * dim), queries.mean(1), np.ones((heads, dim))
    keys = None if key_rounding is None else key_metric(second, mean, smoothing, None, key_rounding)
    if keys is not None and not tilted:
        keys = remove_tilt(keys)
    if value_rounding is None:
        return [keys, None]
    outputs = output_second(output.reshape(3 * dim, -1), heads, dim)
    return [keys, value_metric(outputs, None, value_rounding)]


def vectors(rng: np.random.Generator, shape: Shape, blocks: int, bias: float = 0.5) -> np.ndarray:
    """Keys and values (2, B, K, N, D) of different lengths, around a bias of the channels, as slots hold them."""
    x = rng.standard_normal((2, blocks, shape.heads, shape.size, shape.dim))
    x *= np.exp(rng.standard_normal((*x.shape[:-1], 1)))
    return (x + bias * rng.standard_normal((2, 1, shape.heads, 1, shape.dim))).astype(np.float16).astype(np.float32)


def edges(shape: Shape) -> np.ndarray:
    """Blocks of exceptional vectors (2, B, K, N, D): zeros, equal ones, the largest, spikes, ties."""
    size, dim, top = shape.size, shape.dim, np.float32(65504)
    signs = np.where(np.arange(size * dim).reshape(size, dim) * 7 % 3 == 1, -1, 1).astype(np.float32)
    spikes = np.zeros((size, dim), np.float32)
    spikes[np.arange(size), np.arange(size) * 5 % dim] = signs[:, 0] * top
    turns = np.array([[1, 0], [0, 1], [-1, 0], [0, -1], [1, 1], [-1, 1], [2, -2], [0, 0]], np.float32)
    mixed = np.zeros((size, dim), np.float32)
    mixed[::2] = np.float32(2.0**-24)
    mixed[1] = top
    blocks = [np.zeros((size, dim)), np.full((size, dim), 3.5), signs * top, spikes, signs * np.float32(2.0**-24)]
    whole = np.stack([*blocks, np.resize(turns, (size, dim)), mixed]).astype(np.float32)[:, None]
    return np.tile(whole, (2, 1, shape.heads, 1, 1))


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@dataclass(frozen=True)
class Case:
    """A layer's cache, and vectors of keys and values x (2, B, K, N, D) of the blocks `ids`, from slots or a buffer."""

    ops: Any
    cache: Any
    x: np.ndarray
    ids: Sequence[int]
    places: Sequence[KVLocation]

    def encode(self) -> None:
        self.ops.encode_blocks([FilledBlocks([self.cache], self.ids, self.places)])

    def fields(self) -> tuple[Fields, Fields, Fields]:
        """The fields of keys, of values and of means, each (K, B, …)."""
        arrays = self.ops.read_blocks(self.cache, self.ids)
        stored = transfer.convert_blocks(self.cache.format, len(self.ids), arrays, transfer.FIELDS)
        sides: dict[str, Fields] = {"k": {}, "v": {}, "mean": {}}
        for name, array in stored.items():
            side, _, field = name.partition(".")
            sides[side][field] = array.swapaxes(0, 1)
        return sides["k"], sides["v"], sides["mean"]

    def wanted(self) -> tuple[Fields, Fields, Fields]:
        """NumPy's."""
        format, (k, v) = self.cache.format, self.x.swapaxes(1, 2)
        keys, mean = encode_centred(format.codec_k, k, format.metric_k, format.mean_bits)
        return keys, encode_centred(format.codec_v, v, format.metric_v)[0], mean

    def check_same(self) -> None:
        """Every field is NumPy's, to the bit."""
        self.encode()
        for fields, wanted in zip(self.fields(), self.wanted(), strict=True):
            assert fields.keys() == wanted.keys()
            for name, array in wanted.items():
                assert fields[name].dtype == array.dtype
                np.testing.assert_array_equal(bits(fields[name]), bits(array), err_msg=name)

    def costs(self, side: int, fields: Fields, mean: Fields) -> np.ndarray:
        """What the errors of keys (side 0) or values (1) cost by the metric: (K, B, N) float64. Keys that are
        tilted cost the queries that lean towards them."""
        format, x = self.cache.format, self.x[side].swapaxes(0, 1).astype(np.float64)
        codec, metric = ((format.codec_k, format.metric_k), (format.codec_v, format.metric_v))[side]
        x = x - read_mean(mean)[..., None, :] if mean and not side else x
        error, matrix = x - codec.decode(fields).astype(np.float64), metric.matrix.astype(np.float64)[:, None]
        cost = (error @ matrix * error).sum(-1)
        if metric.tilt_mean is not None:
            average = metric.tilt_mean.astype(np.float64)[:, None, None]
            lean = x @ (matrix - average.swapaxes(2, 3) * average) / np.sqrt(x.shape[-1]) + average
            cost = cost + np.square((error * lean).sum(-1))
        return cost

    def check_as_good(self, most: float = 1e-4) -> None:
        """Sums are added in another order than NumPy's, and products are of two halves for each number, so that a code
        on the edge of a cell may change, and with it those that it feeds back to: .1 % of the codes, and of what errors
        cost `most`."""
        self.encode()
        stored, wanted, format = self.fields(), self.wanted(), self.cache.format
        for name, array in wanted[2].items():
            np.testing.assert_array_equal(stored[2][name], array)
        for side, metric in enumerate((format.metric_k, format.metric_v)):
            codec = (format.codec_k, format.codec_v)[side]
            if metric is None:
                continue
            schema = codec.schema(format.block_size, format.head_dim)["codes"]
            same = schema.unpack(stored[side]["codes"]) == schema.unpack(wanted[side]["codes"])
            assert same.mean() >= 0.999
            actual, least = (self.costs(side, fields[side], fields[2]).sum(-1) for fields in (stored, wanted))
            assert (actual <= least * (1 + most)).all()


def case_of(
    ops: Any,
    shape: Shape,
    x: np.ndarray | None = None,
    metrics: Sequence[Metric | None] = (None, None),
    *,
    in_buffer: bool = False,
    seed: int = 0,
) -> Case:
    """x: None for two random blocks. Slots and block ids are in any order."""
    rng = np.random.default_rng(seed)
    x = vectors(rng, shape, 2) if x is None else x
    count, n = x.shape[1], shape.size
    k, v = map(codecs.get, shape.types)
    format = CacheFormat(k, v, *metrics, shape.mean_bits, n, shape.heads, shape.dim)
    cache = ops.cache(format, count + 2, count + 1)
    slots, ids = rng.permutation(count + 1)[:count].tolist(), rng.permutation(count + 2)[:count].tolist()
    if not in_buffer:
        for slot, keys, values in zip(slots, *x, strict=True):
            ops.write_full(cache, slot, keys, values)
        return Case(ops, cache, x, ids, [KVLocation(None, slot) for slot in slots])
    buffer = ops.buffer(format, count * n)
    span = SpanView(slice(0, count * n), 0, KVLocation(buffer, 0), 0, None, (), n)
    rows = [ops.to_device(side.swapaxes(1, 2).reshape(count * n, shape.heads, shape.dim)) for side in x]
    ops.append_kv(cache, ops.spans([span], n), *rows)
    return Case(ops, cache, x, ids, [KVLocation(buffer, number) for number in range(count)])
