"""The fingerprint of a model, which tells it from others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import numpy as np

from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.model.forward import ModelWeights
from polarlm.engine.weight_formats import ExpertLinear, Linear, Matrix
from polarlm.model_loaders.config import ModelConfig

_SAMPLE = 1024  # values from each end of a weight that are covered


def fingerprint(ops: Ops, config: ModelConfig, weights: ModelWeights) -> str:
    """Return a digest of a configuration and of samples of the weights, as the device keeps them."""
    digest = hashlib.sha256(repr(_description(config)).encode())
    for name, shape, ends in _samples(ops, weights):
        digest.update(repr((name, shape)).encode())
        for sample in ends:
            digest.update(np.asarray(sample, np.float32).tobytes())
    return digest.hexdigest()


def _description(value: Any) -> Any:
    """A configuration's names and values that are no defaults, so that a new field changes no digest."""
    if isinstance(value, tuple):
        return [_description(one) for one in value]
    if not is_dataclass(value):
        return value
    values = [(field, getattr(value, field.name)) for field in fields(value)]
    described = {
        field.name: _description(one) for field, one in values if field.default is MISSING or one != field.default
    }
    return type(value).__name__, described


def _samples(ops: Ops, weights: ModelWeights) -> Iterator[tuple[str, tuple[int, ...], list[np.ndarray]]]:
    for name, tensor, layer in _tensors(weights):
        device = ops.layer_ops(layer)
        if isinstance(tensor, ExpertLinear):
            of = ops.host if tensor.on_host and ops.host is not None else device
            tensor = tensor.parts[0]
            first = last = of.rows(tensor, slice(0, 1))
        elif isinstance(tensor, Matrix | Linear):
            count, width = tensor.shape
            rows = -(-_SAMPLE // width)
            first, last = (device.rows(tensor, end) for end in (slice(0, rows), slice(max(0, count - rows), count)))
        else:
            first = last = tensor if isinstance(tensor, np.ndarray) else device.to_host(tensor)
        yield name, tuple(tensor.shape), [first.reshape(-1)[:_SAMPLE], last.reshape(-1)[-_SAMPLE:]]


_Tensor = tuple[str, Array | Matrix | Linear | ExpertLinear, int]  # with a layer that is on the same device


def _tensors(weights: ModelWeights) -> Iterator[_Tensor]:
    last = len(weights.layers) - 1
    yield "embedding", weights.embedding, 0
    if weights.norm is not None:
        yield "norm", weights.norm, last
    yield "head", weights.head, last
    if weights.encoder_inputs is not None:
        yield from _fields("inputs", weights.encoder_inputs, 0)
    if (inputs := weights.layer_inputs) is not None:
        yield from (("inputs.table", inputs.table, 0), ("inputs.projection", inputs.projection, 0))
    for number, layer in enumerate(weights.layers):
        if layer.scale is not None:
            yield f"{number}.scale", layer.scale, number
        for part, weights_of_part in (("mixer", layer.mixer), ("ffn", layer.ffn), ("embedding", layer.embedding)):
            if weights_of_part is not None:
                yield from _fields(f"{number}.{part}", weights_of_part, number)


def _fields(name: str, part: Any, layer: int) -> Iterator[_Tensor]:
    """Yield the weights in the fields of a dataclass, and their biases."""
    for field in fields(part):
        if (tensor := getattr(part, field.name)) is not None:
            yield f"{name}.{field.name}", tensor, layer
            if isinstance(tensor, Linear | ExpertLinear) and tensor.bias is not None:
                yield f"{name}.{field.name}_bias", tensor.bias, layer
