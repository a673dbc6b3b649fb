"""How an engine encodes keys and values: each layer's transforms before its codecs, and error metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from polarlm.engine.model.kv_scales import Variances, scale
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.quantization.metric import key_metric, value_metric, without_feedback, without_tilt
from polarlm.engine.quantization.statistics import LayerStatistics, smoothing
from polarlm.engine.state.shapes import CacheShape, LayerShape
from polarlm.engine.state.store import Metrics


@dataclass(frozen=True)
class Encoding:
    """Parts of the encoder that can be turned off, to measure what each contributes."""

    smoothing: bool = True  # scale each channel of keys by the spread of keys and queries
    feedback: bool = True  # error feedback along a vector: later pairs make up for the errors of earlier ones
    tilt: bool = True  # weight the norms of keys by the queries that attend to them
    token_feedback: bool = True  # error feedback along the tokens of a block, in values
    small_means: bool = True  # block means in 8 bits per channel instead of 16


WHOLE = Encoding()
NOT_STORED: tuple[Conditioning, Metrics] = Conditioning(), (None, None)  # for a layer without K/V


def stored(
    encoding: Encoding,
    layer: LayerShape,
    size: Variances,
    measured: LayerStatistics | None,
    output: Callable[[], np.ndarray],
) -> tuple[Conditioning, Metrics]:
    """Return the conditioning and the error metrics of a layer's keys and values.

    size: their variances. measured: None without calibration. output: returns the output projection (E, H·D) float32.
    """
    rotations = layer.codec_k.rotation(layer.head_dim), layer.codec_v.rotation(layer.head_dim)
    s = smoothing(measured) if measured and layer.mean_bits and encoding.smoothing else None
    stored = Conditioning(*rotations, scale(size, s))
    metrics = (None, None) if measured is None else _metrics(encoding, layer, stored, measured, output())
    return stored, metrics


def stored_layers(
    encoding: Encoding,
    shape: CacheShape,
    sizes: Sequence[Variances | None],
    statistics: Mapping[int, LayerStatistics],
    output: Callable[[int], np.ndarray],
) -> tuple[list[Conditioning], list[Metrics]]:
    """Return the results of `stored` for all layers, as two lists.

    sizes: one per layer; None for a layer without K/V. output: returns a layer's output projection, given its number.
    """
    layers = [
        NOT_STORED
        if size is None
        else stored(encoding, shape.kv_layers[layer], size, statistics.get(layer), partial(output, layer))
        for layer, size in enumerate(sizes)
    ]
    return [conditioning for conditioning, _ in layers], [metrics for _, metrics in layers]


def _metrics(
    encoding: Encoding,
    layer: LayerShape,
    stored: Conditioning,
    measured: LayerStatistics,
    output: np.ndarray,
) -> Metrics:
    """Return the error metrics of a layer's keys and values; None for a codec that does not round to a table."""
    k = v = None
    if layer.codec_k.rounding is not None:
        assert stored.scale is not None
        s, rotation = stored.scale.keys, stored.key_rotation
        k = key_metric(measured.query_second, measured.query_mean, s, rotation, layer.codec_k.rounding)
    if layer.codec_v.rounding is not None:
        tokens = measured.token_correlation if encoding.token_feedback else None
        rounding = layer.codec_v.rounding
        v = value_metric(output, layer.kv_heads, layer.head_dim, stored.value_rotation, rounding, tokens)
    if k is not None and not encoding.tilt:
        k = without_tilt(k)
    if not encoding.feedback:
        k, v = (m and without_feedback(m) for m in (k, v))
    return k, v
