"""How an engine encodes keys and values: each layer's transforms before its codecs, and error metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.engine.model.kv_scales import Variances, scale
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.quantization.metric import by_layer, key_metric, value_metric, without_feedback, without_tilt
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
    token_feedback: bool = True  # error feedback along the tokens of a block, in values
    small_means: bool = True  # block means in 8 bits per channel instead of 16


WHOLE = Encoding()
NOT_STORED: tuple[Conditioning, Metrics] = Conditioning(), (None, None)  # for a layer without K/V
Stored = tuple[list[Conditioning], list[Metrics]]  # one of each for every layer


def stored(
    encoding: Encoding, layer: LayerShape, sizes: Sequence[Variances], statistics: Sequence[LayerStatistics]
) -> list[tuple[Conditioning, Metrics]]:
    """Return how layers of one shape store keys and values. sizes: of each layer's; statistics: of each, or none. All
    metrics are computed together: they take hundreds of small steps, however many layers there are."""
    rotations = layer.codec_k.rotation(layer.head_dim), layer.codec_v.rotation(layer.head_dim)
    is_smooth = bool(statistics) and layer.mean_bits > 0 and encoding.smoothing
    smooth = [smoothing(one) for one in statistics] if is_smooth else [None] * len(sizes)
    conditioning = [Conditioning(*rotations, scale(size, s)) for size, s in zip(sizes, smooth, strict=True)]
    if not statistics:
        return [(one, (None, None)) for one in conditioning]
    metrics = _metrics(encoding, layer, conditioning, statistics)
    whole = [[None] * len(sizes) if metric is None else by_layer(metric, len(sizes)) for metric in metrics]
    return [(one, (k, v)) for one, k, v in zip(conditioning, *whole, strict=True)]


def stored_layers(
    encoding: Encoding, shape: CacheShape, sizes: Sequence[Variances | None], statistics: Mapping[int, LayerStatistics]
) -> Stored:
    """Return `stored` of all layers. sizes: of each, None for one without K/V. statistics: of all with K/V, or none."""
    alike: dict[LayerShape, dict[int, Variances]] = {}
    for number, size in enumerate(sizes):
        if size is not None:
            alike.setdefault(shape.kv_layers[number], {})[number] = size
    by_layer_number: dict[int, tuple[Conditioning, Metrics]] = {}
    for layer, group in alike.items():
        measured = [statistics[number] for number in group if number in statistics]
        by_layer_number |= dict(zip(group, stored(encoding, layer, list(group.values()), measured), strict=True))
    conditioning, metrics = zip(*(by_layer_number.get(number, NOT_STORED) for number in range(len(sizes))), strict=True)
    return list(conditioning), list(metrics)


def _metrics(
    encoding: Encoding, layer: LayerShape, stored: Sequence[Conditioning], statistics: Sequence[LayerStatistics]
) -> Metrics:
    """Return the error metrics of the keys and of the values of all heads of these layers; None for a codec that does
    not round to a table of points, or takes none."""

    def all_heads(name: str) -> np.ndarray:
        return np.concatenate([getattr(one, name) for one in statistics])

    k = v = None
    if layer.codec_k.takes_metric and (rounding := layer.codec_k.rounding) is not None:
        scales = np.concatenate([one.scale.keys for one in stored if one.scale is not None])
        k = key_metric(all_heads("query_second"), all_heads("query_mean"), scales, stored[0].key_rotation, rounding)
    if layer.codec_v.takes_metric and (rounding := layer.codec_v.rounding) is not None:
        tokens = np.stack([one.token_correlation for one in statistics]) if encoding.token_feedback else None
        v = value_metric(all_heads("output_second"), stored[0].value_rotation, rounding, tokens)
    if k is not None and not encoding.tilt:
        k = without_tilt(k)
    if not encoding.feedback:
        k, v = (m and without_feedback(m) for m in (k, v))
    return k, v
