"""Fits the KV cache to a model: how each layer stores keys and values, computed once and kept in the user's cache
folder, since for many layers it takes longer than reading the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

import numpy as np

from polarlm.engine.backends.ops import Ops
from polarlm.engine.loading import kept_arrays
from polarlm.engine.loading.calibration import TOKENS, Progress, can_calibrate, load_or_calibrate, text_ids
from polarlm.engine.loading.encoding import (
    NO_ENCODING,
    Encoding,
    LayerEncodings,
    encode_layers,
    layer_scale,
    rotations_of,
)
from polarlm.engine.model.fingerprint import fingerprint
from polarlm.engine.model.forward import ModelWeights
from polarlm.engine.model.kv_scales import variances
from polarlm.engine.quantization.conditioning import Conditioning, Scale
from polarlm.engine.quantization.metric import Metric
from polarlm.engine.quantization.statistics import LayerStatistics
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import Metrics
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.tokenizers import Tokenizer

_KIND = "encoding"
_FORMAT = 2  # the version of the meaning of the kept numbers


def load_or_fit(
    encoding: Encoding,
    ops: Ops,
    config: ModelConfig,
    weights: ModelWeights,
    shape: CacheShape,
    tokenizer: Tokenizer | None,
    given_scales: Mapping[int, Scale] | None,
    say: Callable[[str], None],
    progress: Progress = lambda done, total: None,
) -> LayerEncodings:
    """Return how every layer stores keys and values, with scales from the weights, and smoothing and error metrics from
    a calibration: as kept in the user's cache folder, or else computed now and kept there. tokenizer: None leaves the
    calibration out; what is left takes too little time to be kept. given_scales: those that a pack has, of each layer
    with K/V."""
    ids = [] if tokenizer is None else text_ids(tokenizer, min(TOKENS, config.max_context))
    # A calibration on too short a text says so at every start.
    is_kept = can_calibrate(ids, shape.block_size)
    model = fingerprint(ops, config, weights)
    origin = model if given_scales is None else [model, _digest(given_scales)]
    layers = [(number, *(codec.name for codec in one.codecs), one.mean_bits) for number, one in shape.kv_layers.items()]
    key = kept_arrays.digest_key(_FORMAT, encoding, shape.block_size, layers, ids, origin)
    if is_kept and (arrays := kept_arrays.read(_KIND, key)) is not None:
        return _unpack(shape, arrays)
    statistics: Mapping[int, LayerStatistics] = {}
    if tokenizer is not None:
        statistics = load_or_calibrate(ops, config, weights, ids, shape.block_size, say, progress)
    centred = {layer: one.mean_bits > 0 for layer, one in shape.kv_layers.items()}
    if given_scales is None:
        scales = _scales(encoding, ops, config, weights, shape.block_size, centred, statistics)
    else:
        scales = [given_scales.get(number) for number in range(len(shape.layers))]
    encodings = encode_layers(encoding, shape, scales, statistics)
    if is_kept:  # if it cannot be kept, neither can the calibration, which has said so
        kept_arrays.write(_KIND, key, _pack(*encodings), lambda sentence: None)
    return encodings


def _digest(scales: Mapping[int, Scale]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for scale in scales.values() for array in scale)).hexdigest()


def _scales(
    encoding: Encoding,
    ops: Ops,
    config: ModelConfig,
    weights: ModelWeights,
    block_size: int,
    centred: Mapping[int, bool],
    statistics: Mapping[int, LayerStatistics],
) -> list[Scale | None]:
    """Return the scale of every layer; None for one without K/V. centred: of each layer with K/V, whether blocks of
    keys are stored without their mean."""
    block_sizes = [block_size if centred.get(number) else None for number in range(len(config.layers))]
    return [
        None if size is None else layer_scale(size, statistics.get(number), centred[number], encoding)
        for number, size in enumerate(variances(ops, config, weights, block_sizes))
    ]


def _pack(conditioning: Sequence[Conditioning], metrics: Sequence[Metrics]) -> dict[str, np.ndarray]:
    """Return the arrays of all layers by names such as "3 v matrix"."""
    arrays: dict[str, np.ndarray] = {}
    for layer, (one, both) in enumerate(zip(conditioning, metrics, strict=True)):
        if one.scale is not None:
            arrays |= {f"{layer} {side} scale": divisors for side, divisors in zip("kv", one.scale, strict=True)}
        for side, metric in zip("kv", both, strict=True):
            for field in fields(Metric):
                if metric is not None and (value := getattr(metric, field.name)) is not None:
                    arrays[f"{layer} {side} {field.name}"] = np.asarray(value, np.float32)
    return arrays


def _unpack(shape: CacheShape, arrays: Mapping[str, np.ndarray]) -> LayerEncodings:
    """Return the layers whose `_pack` arrays these are."""

    def metric(layer: int, side: str) -> Metric | None:
        values = {field.name: arrays.get(f"{layer} {side} {field.name}") for field in fields(Metric)}
        return None if values["matrix"] is None else Metric(**values)  # type: ignore[arg-type]

    layers = [NO_ENCODING] * len(shape.layers)
    for layer, one in shape.kv_layers.items():
        rotations = rotations_of(one)
        scales = Scale(arrays[f"{layer} k scale"], arrays[f"{layer} v scale"])
        layers[layer] = Conditioning(*rotations, scales), (metric(layer, "k"), metric(layer, "v"))
    conditioning, metrics = zip(*layers, strict=True)
    return list(conditioning), list(metrics)
