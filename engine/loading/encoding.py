"""How an engine encodes keys and values: each layer's transforms before its codecs, and error metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.engine.model.kv_scales import Variances, scale
from polarlm.engine.quantization.conditioning import Conditioning, Scale
from polarlm.engine.quantization.metric import key_metric, remove_feedback, remove_tilt, split_layers, value_metric
from polarlm.engine.quantization.statistics import LayerStatistics, smoothing
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import Metrics


@dataclass(frozen=True)
class Encoding:
    """Parts of the encoder that can be turned off, to measure what each contributes."""

    smoothing: bool = True  # scale each channel of keys by the spread of keys and queries
    feedback: bool = True  # error feedback along a vector: later pairs make up for the errors of earlier ones
    tilt: bool = True  # weight the norms of keys by the queries that attend to them
    small_means: bool = True  # block means in 8 bits per channel instead of 16


FULL_ENCODING = Encoding()
NO_ENCODING: tuple[Conditioning, Metrics] = Conditioning(), (None, None)  # for a layer without K/V
LayerEncodings = tuple[list[Conditioning], list[Metrics]]  # one of each for every layer


def layer_scale(
    size: Variances, statistics: LayerStatistics | None, is_centred: bool, encoding: Encoding = FULL_ENCODING
) -> Scale:
    """Return the scale of a layer with keys and values of this size. is_centred: whether blocks of keys are stored
    without their mean; then they are smoothed, if there are statistics."""
    is_smooth = is_centred and encoding.smoothing and size.by_channel
    return scale(size, smoothing(statistics) if statistics is not None and is_smooth else None)


def encode_layer(
    encoding: Encoding, layer: LayerShape, scales: Sequence[Scale], statistics: Sequence[LayerStatistics]
) -> list[tuple[Conditioning, Metrics]]:
    """Return how layers of one shape encode keys and values. scales, statistics: of each, or no statistics. All metrics
    are computed together: they take hundreds of small steps, however many layers there are."""
    conditioning = [Conditioning(*rotations_of(layer), one) for one in scales]
    if not statistics:
        return [(one, (None, None)) for one in conditioning]
    metrics = _metrics(encoding, layer, conditioning, statistics)
    sides = [[None] * len(scales) if metric is None else split_layers(metric, len(scales)) for metric in metrics]
    return [(one, (k, v)) for one, k, v in zip(conditioning, *sides, strict=True)]


def rotations_of(layer: LayerShape) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the rotations of a layer's keys and of its values."""
    both = [codec.rotation(layer.head_dim) for codec in layer.codecs]
    return both[0], both[-1]


def encode_layers(
    encoding: Encoding, shape: CacheShape, scales: Sequence[Scale | None], statistics: Mapping[int, LayerStatistics]
) -> LayerEncodings:
    """Return how all layers encode keys and values. scales: of each, None without K/V. statistics: of all with K/V, or
    none."""
    by_shape: dict[LayerShape, dict[int, Scale]] = {}
    for number, one in enumerate(scales):
        if one is not None:
            by_shape.setdefault(shape.kv_layers[number], {})[number] = one
    encodings: dict[int, tuple[Conditioning, Metrics]] = {}
    for layer, group in by_shape.items():
        group_statistics = [statistics[number] for number in group if number in statistics]
        encodings |= dict(
            zip(group, encode_layer(encoding, layer, list(group.values()), group_statistics), strict=True)
        )
    conditioning, metrics = zip(*(encodings.get(number, NO_ENCODING) for number in range(len(scales))), strict=True)
    return list(conditioning), list(metrics)


def _scaled_second(second: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return second (K, D, D) with the traces of `other`. Where values are keys, an error costs as one of a key and as
    one of a value, which count the same: with a third or three times the share of values KL was about as low, and up to
    twice as high without."""
    traces, wanted = (one.trace(axis1=1, axis2=2)[:, None, None] for one in (second, other))
    return second * (wanted / np.where(traces > 0, traces, 1))


def _metrics(
    encoding: Encoding, layer: LayerShape, conditioning: Sequence[Conditioning], statistics: Sequence[LayerStatistics]
) -> Metrics:
    """Return the error metrics of the keys and of the values of all heads of these layers; None for a codec that does
    not round to a table of points, or takes none."""

    def all_heads(name: str) -> np.ndarray:
        return np.concatenate([getattr(one, name) for one in statistics])

    k = v = None
    if layer.codec_k.takes_metric and (rounding := layer.codec_k.rounding) is not None:
        scales = np.concatenate([one.scale.keys for one in conditioning if one.scale is not None])
        second = all_heads("query_second")
        if layer.codec_v is None:
            second = second + _scaled_second(all_heads("output_second"), second)
        k = key_metric(second, all_heads("query_mean"), scales, conditioning[0].key_rotation, rounding)
    if layer.codec_v is not None and layer.codec_v.takes_metric and (rounding := layer.codec_v.rounding) is not None:
        v = value_metric(all_heads("output_second"), conditioning[0].value_rotation, rounding)
    if k is not None and not encoding.tilt:
        k = remove_tilt(k)
    if not encoding.feedback:
        k, v = (m and remove_feedback(m) for m in (k, v))
    return k, v
