"""Loads a file's tensors into the weights of the forward pass, each read once, and computes a model's fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from engine.backends.ops import Array, Ops
from engine.model.forward import LayerWeights, ModelWeights
from engine.weight_formats import Linear, Matrix, WeightFormat, find, get
from model_loaders.config import ModelConfig
from model_loaders.families import tensors
from model_loaders.tensor_table import Slots
from model_loaders.weights import WeightSource

_SLAB_VALUES = 1 << 18  # dequantized at a time: they stay in the CPU's cache
_SAMPLE = 1024  # values from either end of each weight that the fingerprint covers


@dataclass(frozen=True)
class _FileMatrix:
    """See `StoredMatrix`. Types without a weight format are read as float32. progress: called with 4 bytes a value."""

    source: WeightSource
    name: str
    progress: Callable[[int], None]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.source.shape(self.name)
        return rows, columns

    @property
    def format(self) -> WeightFormat:
        return _format(self.source, self.name)

    def dequantize(self, out: np.ndarray) -> None:
        if _has_format(self.source, self.name):
            for rows, raw in self.slabs(self.format.size(_SLAB_VALUES)):
                self.format.dequantize(raw, out[rows])
        else:
            self.source.read_into(self.name, out)
            self.progress(out.nbytes)

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        count, columns = self.shape
        step, is_raw = max(1, nbytes // self.format.size(columns)), _has_format(self.source, self.name)
        widened = None if is_raw else np.empty((min(step, count), columns), np.float32)
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            if widened is None:
                yield rows, self.source.read_raw(self.name, rows)
                self.source.release(self.name, rows)
            else:
                values = widened[: rows.stop - first]
                self.source.read_into(self.name, values, rows)
                yield rows, values.view(np.uint8)
            self.progress(4 * (rows.stop - first) * columns)


def _has_format(source: WeightSource, name: str) -> bool:
    return find(source.stored_dtype(name)) is not None


def _format(source: WeightSource, name: str) -> WeightFormat:
    return find(source.stored_dtype(name)) or get("f32")


class _Reader:
    """Loads named tensors to the device."""

    def __init__(self, ops: Ops, source: WeightSource, progress: Callable[[int], None] | None):
        self._ops, self._source, self._progress = ops, source, progress or (lambda nbytes: None)
        self.bytes = 0

    def vector(self, names: Sequence[str]) -> Array:
        """Tensors (n_i,), concatenated."""
        sizes = [self._source.shape(name)[0] for name in names]
        whole, end = np.empty(sum(sizes), np.float32), 0
        for name, size in zip(names, sizes, strict=True):
            self._source.read_into(name, whole[end : end + size])
            end += size
        self._progress(whole.nbytes)
        self.bytes += whole.nbytes
        return self._ops.to_device(whole)

    def matrices(self, names: Sequence[str]) -> tuple[Matrix, ...]:
        """Tensors (rows_i, columns), as the parts of one matrix."""
        matrices = self._ops.load([_FileMatrix(self._source, name, self._progress) for name in names])
        self.bytes += sum(matrix.nbytes for matrix in matrices)
        return matrices

    def linear(self, weights: Sequence[str], biases: Sequence[str] = ()) -> Linear:
        """A projection whose output is the concatenation of those of `weights`, with `biases`."""
        return Linear(self.matrices(weights), self.vector(biases) if biases else None)


def load_weights(
    ops: Ops, config: ModelConfig, source: WeightSource, progress: Callable[[int], None] | None = None
) -> ModelWeights:
    """All weights on the device. `progress` is called with the values read since its last call, in bytes as float32."""
    read = _Reader(ops, source, progress)
    table = tensors(config)
    top = {slot: [spec.name for spec in specs] for slot, specs in table.top.items()}
    (embedding,) = read.matrices(top["embedding"])
    layers = [_layer(read, slots) for slots in table.layers]
    norm = read.vector(top["norm"])
    head = read.linear(top["head"]) if "head" in top else Linear((embedding,))
    return ModelWeights(embedding, layers, norm, head, read.bytes)


def weight_count(source: WeightSource) -> int:
    """The number of values in all tensors."""
    return sum(int(np.prod(source.shape(name))) for name in source.names())


def weight_bytes(ops: Ops, source: WeightSource) -> int:
    """The bytes of all tensors on the device."""
    counts = {name: int(np.prod(source.shape(name))) for name in source.names()}
    return sum(
        ops.matrix_bytes(_format(source, name), count) if len(source.shape(name)) > 1 else 4 * count
        for name, count in counts.items()
    )


def fingerprint(ops: Ops, config: ModelConfig, weights: ModelWeights) -> str:
    """A digest of the model: its configuration, and samples of its weights.

    The weights are sampled on the device. If they are narrower there than in the file, the digest is another one.
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
    """(name, shape, values from either end) of every weight."""
    for name, tensor in _tensors(weights):
        if isinstance(tensor, Matrix | Linear):
            count, width = tensor.shape
            rows = -(-_SAMPLE // width)
            first, last = (ops.rows(tensor, end) for end in (slice(0, rows), slice(max(0, count - rows), count)))
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
