"""From a file's tensors to the fused matrices of the forward pass, each tensor read once into its place.

And what tells them from those of another model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

import numpy as np

from engine.backends.ops import Array, Ops
from engine.model.forward import LayerWeights, ModelWeights
from engine.weight_formats import Linear, Matrix
from model_loaders.config import ModelConfig
from model_loaders.families import tensors
from model_loaders.tensor_table import Slots
from model_loaders.weights import WeightSource, main_dtype

_SAMPLE = 1024  # values from either end of each weight matrix that tell one model from another


class _Reader:
    """Reads named tensors as float32 and brings them to the device."""

    def __init__(self, ops: Ops, source: WeightSource, stored: str, progress: Callable[[int], None] | None):
        self._ops, self._source, self._stored, self._progress = ops, source, stored, progress
        self.bytes = 0

    def vector(self, names: Sequence[str]) -> Array:
        """Tensors (n_i,), one behind the other."""
        vector = self._ops.weight(self._stacked(names), self._stored)
        self.bytes += vector.nbytes
        return vector

    def matrix(self, names: Sequence[str]) -> Matrix:
        """Tensors (rows_i, columns) under each other."""
        matrix = self._ops.matrix(self._stacked(names), self._stored)
        self.bytes += matrix.nbytes
        return matrix

    def linear(self, weights: Sequence[str], biases: Sequence[str] = ()) -> Linear:
        """The projections of these weights, whose outputs come one after the other, and their biases."""
        return Linear((self.matrix(weights),), self.vector(biases) if biases else None)

    def _stacked(self, names: Sequence[str]) -> np.ndarray:
        shapes = [self._source.shape(name) for name in names]
        fused = np.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), np.float32)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            self._source.read_into(name, fused[row : row + shape[0]])
            row += shape[0]
            if self._progress:
                self._progress(4 * int(np.prod(shape)))
        return fused


def load_weights(
    ops: Ops, config: ModelConfig, source: WeightSource, progress: Callable[[int], None] | None = None
) -> ModelWeights:
    """Every weight on the device. `progress` is told the float32 bytes that have been read since its last call."""
    read = _Reader(ops, source, main_dtype(source), progress)
    table = tensors(config)
    top = {slot: [spec.name for spec in specs] for slot, specs in table.top.items()}
    embedding = read.matrix(top["embedding"])
    layers = [_layer(read, slots) for slots in table.layers]
    norm = read.vector(top["norm"])
    head = read.linear(top["head"]) if "head" in top else Linear((embedding,))
    return ModelWeights(embedding, layers, norm, head, read.bytes)


def weight_count(source: WeightSource) -> int:
    """Values of all tensors."""
    return sum(int(np.prod(source.shape(name))) for name in source.names())


def fingerprint(ops: Ops, config: ModelConfig, weights: ModelWeights) -> str:
    """What tells this model from others, as a digest: its shape and arithmetic, and samples of its weights.

    Of the weights as they are on the device: where those are narrower than the file's, it is another model.
    """
    digest = hashlib.sha256(repr(config).encode())
    for field in fields(config):
        if not field.repr and (value := getattr(config, field.name)) != field.default:
            digest.update(repr((field.name, value)).encode())
    for name, shape, ends in _samples(ops, weights):
        digest.update(repr((name, shape)).encode())
        for sample in ends:
            digest.update(np.asarray(sample, np.float32).tobytes())
    return digest.hexdigest()


def _samples(ops: Ops, weights: ModelWeights) -> Iterator[tuple[str, tuple[int, ...], list[np.ndarray]]]:
    """Name, shape, and values from either end of every weight."""
    for name, tensor in _tensors(weights):
        if isinstance(tensor, Matrix | Linear):
            count, width = tensor.shape
            rows = -(-_SAMPLE // width)
            first, last = (ops.rows(tensor, of) for of in (slice(0, rows), slice(max(0, count - rows), count)))
        else:
            first = last = ops.to_host(tensor)
        yield name, tuple(tensor.shape), [first.reshape(-1)[:_SAMPLE], last.reshape(-1)[-_SAMPLE:]]


def _tensors(weights: ModelWeights) -> Iterator[tuple[str, Array | Matrix | Linear]]:
    yield from (("embedding", weights.embedding), ("norm", weights.norm), ("head", weights.head))
    for number, layer in enumerate(weights.layers):
        for field in fields(LayerWeights):
            if (tensor := getattr(layer, field.name)) is not None:
                yield f"{number}.{field.name}", tensor
                if isinstance(tensor, Linear) and tensor.bias is not None:
                    yield f"{number}.{field.name}_bias", tensor.bias


def _layer(read: _Reader, slots: Slots) -> LayerWeights:
    def names(slot: str) -> list[str]:
        return [spec.name for spec in slots.get(slot, ())]

    def norm(slot: str) -> Array | None:
        return read.vector(names(slot)) if slot in slots else None

    def linear(slot: str) -> Linear:
        return read.linear(names(slot), names(f"{slot}_bias"))

    return LayerWeights(
        attention_norm=norm("attention_norm"),
        qkv=linear("qkv"),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        out=linear("out"),
        ffn_norm=norm("ffn_norm"),
        gate_up=linear("gate_up"),
        down=linear("down"),
        attention_post_norm=norm("attention_post_norm"),
        ffn_post_norm=norm("ffn_post_norm"),
    )
