"""Blocks of several layers encoded together have the codes that they have alone, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, KVLocation
from polarlm.engine.backends.numpy.kv import encoding
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.quantization.metric import Metric, key_metric, value_metric
from polarlm.engine.quantization.statistics import output_second
from tests.pairs import pairs

K, N, D = 2, 8, 16
BLOCKS, SLOTS = (4, 0), (1, 2)


def spread(rng: np.random.Generator, *shape: int) -> np.ndarray:
    mix = rng.standard_normal((*shape[:-1], shape[-1], shape[-1]))
    return (mix @ mix.swapaxes(-1, -2)).astype(np.float32)


def layer(types: tuple[str, str], rng: np.random.Generator, *, mean_bits: int, metrics: bool) -> CacheFormat:
    codec_k, codec_v = (codecs.get(name) for name in types)
    metric_k: Metric | None = None
    metric_v: Metric | None = None
    if metrics and codec_k.rounding is not None:
        second, mean = spread(rng, K, D), rng.standard_normal((K, D))
        metric_k = key_metric(second, mean, np.ones((K, D)), codec_k.rotation(D), codec_k.rounding)
    if metrics and codec_v.rounding is not None:
        output, tokens = rng.standard_normal((8, 2 * K * D)), (0.9 ** np.arange(N)).astype(np.float32)
        metric_v = value_metric(output_second(output, K, D), codec_v.rotation(D), codec_v.rounding, tokens)
    return CacheFormat(codec_k, codec_v, metric_k, metric_v, mean_bits, N, K, D)


@pytest.mark.parametrize(("most", "metrics", "mean_bits"), pairs([1, 5 * K * N * D, 1 << 20], [False, True], [0, 8]))
def test_layers_encoded_together_have_the_codes_of_each_alone(
    metrics: bool, mean_bits: int, most: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_VALUES", most)
    types = [("ring4", "ring3.5")] * 5 + [("turbo3", "ring3")] * 2 + [("ring4", "ring3.5"), ("f16", "turbo3")]
    ops = NumpyOps()
    formats = [layer(of, rng, mean_bits=mean_bits, metrics=metrics) for of in types]
    alone, together = ([ops.cache(format, 6, 4) for format in formats] for _ in range(2))
    for one, other in zip(alone, together, strict=True):
        for slot in range(4):
            k, v = rng.standard_normal((2, K, N, D)).astype(np.float32)
            for cache in (one, other):
                ops.write_full(cache, slot, k + 1, v)
    sources = [KVLocation(None, slot) for slot in SLOTS]
    for cache in alone:
        ops.encode_blocks([FilledBlocks([cache], BLOCKS, sources)])
    ops.encode_blocks([FilledBlocks(together, BLOCKS, sources)])
    for one, other in zip(alone, together, strict=True):
        stored, wanted = ops.read_blocks(other, BLOCKS), ops.read_blocks(one, BLOCKS)
        assert all((stored[name] == wanted[name]).all() for name in wanted)
        assert any(x.any() for x in wanted.values())
