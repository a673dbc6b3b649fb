"""Random weights of a model on a GPU, in bfloat16 or in the formats of a Q4_K_M file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from polarlm.bench.gpu.setup import Noise
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.model.forward import ModelWeights
from polarlm.engine.model.layers.attention import AttentionWeights
from polarlm.engine.model.layers.gated_mlp import GatedMLPWeights
from polarlm.engine.model.layers.kinds import LayerWeights
from polarlm.engine.weight_formats import Linear, Matrix, WeightFormat, get
from polarlm.model_loaders.config import ModelConfig

MIXED = "q4_k_m"
KINDS = ("bf16", MIXED)

_PIECE_ROWS = 1024  # rows of random blocks, repeated to fill a matrix
# Offsets of the float16 scales in blocks, and the largest scale: values are below one half.
_SCALES = {"q4_k": (0, 2), "q6_k": (208,), "q8_0": (0,)}
_LARGEST_SCALE = 2.0**-13


def has_larger_types(layer: int, layers: int) -> bool:
    """Whether llama.cpp's Q4_K_M stores `down` and values of this layer as q6_k: in the first and last eighth of the
    layers and in every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def parameters(config: ModelConfig) -> tuple[int, int]:
    """The number of weights in the matrices of all layers, and in embedding and head."""
    e, f, width = config.hidden_size, config.ffn.size, config.attention.head_dim
    layer = (2 * config.attention.heads + 2 * config.attention.kv_heads) * width * e + 3 * f * e
    return len(config.layers) * layer, 2 * config.vocab_size * e


Part = tuple[str, int, int]  # format, rows, columns


def layer_parts(config: ModelConfig, kind: str, layer: int) -> dict[str, list[Part]]:
    """Name → parts of each matrix of a layer. kind: one of KINDS."""
    e, f, dim = config.hidden_size, config.ffn.size, config.attention.head_dim
    attended, kv = config.attention.heads * dim, config.attention.kv_heads * dim
    usual, larger = ("q4_k", "q6_k") if kind == MIXED else (kind, kind)
    more = larger if has_larger_types(layer, len(config.layers)) else usual
    split = [(usual, attended + kv, e), (more, kv, e)]
    return {
        "qkv": [(usual, attended + 2 * kv, e)] if more == usual else split,
        "out": [(usual, e, attended)],
        "gate_up": [(usual, 2 * f, e)],
        "down": [(more, e, f)],
    }


def outer_parts(config: ModelConfig, kind: str) -> tuple[Part, Part]:
    """The parts of embedding and head."""
    size = config.vocab_size, config.hidden_size
    usual, larger = ("q4_k", "q6_k") if kind == MIXED else (kind, kind)
    return (usual, *size), (larger, *size)


def weight_bytes(ops: CudaOps, config: ModelConfig, kind: str) -> int:
    """The bytes of all matrices on the device."""
    parts = [*outer_parts(config, kind)]
    for layer in range(len(config.layers)):
        for matrix in layer_parts(config, kind, layer).values():
            parts += matrix
    return sum(ops.matrix_bytes(_format(name, columns), rows * columns) for name, rows, columns in parts)


def random_weights(ops: CudaOps, config: ModelConfig, kind: str, noise: Noise) -> ModelWeights:
    """The weights of a model, random matrices and norms of 1. Raises MemoryError."""

    def matrix(part: Part) -> Matrix:
        return random_matrix(ops, noise, *part)

    def layer(number: int) -> LayerWeights:
        linear = {name: Linear(tuple(map(matrix, parts))) for name, parts in layer_parts(config, kind, number).items()}
        first, second = (ops.to_device(np.ones(config.hidden_size, np.float32)) for _ in range(2))
        mixer = AttentionWeights(first, linear["qkv"], None, None, None, linear["out"], None)
        return LayerWeights(mixer, GatedMLPWeights(second, linear["gate_up"], linear["down"], None))

    embedding, head = map(matrix, outer_parts(config, kind))
    layers = [layer(number) for number in range(len(config.layers))]
    norm = ops.to_device(np.ones(config.hidden_size, np.float32))
    return ModelWeights(embedding, layers, norm, Linear((head,)), weight_bytes(ops, config, kind))


def random_matrix(ops: CudaOps, noise: Noise, name: str, rows: int, columns: int) -> Matrix:
    """A random matrix (rows, columns) in bf16, q4_k, q6_k or q8_0. Raises MemoryError."""
    if name == "bf16":
        return Matrix(get("bf16"), noise.matrix(rows, columns).view(np.uint8), (rows, columns))
    (loaded,) = ops.load([_RandomBlocks(_format(name, columns), (rows, columns))])
    return loaded


def _format(name: str, columns: int) -> WeightFormat:
    """The format `name`, or q8_0 if rows are not whole blocks of it."""
    format = get(name)
    return format if columns % format.values == 0 else get("q8_0")


class _RandomBlocks:
    """A `StoredMatrix` of random blocks, which can only be uploaded."""

    def __init__(self, format: WeightFormat, shape: tuple[int, int]):
        self.format, self.shape = format, shape

    def dequantize(self, out: np.ndarray) -> None:
        raise NotImplementedError("random blocks are uploaded as they are")

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        (count, columns), piece = self.shape, _random_rows(self.format, self.shape[1])
        step = max(1, min(_PIECE_ROWS, nbytes // self.format.size(columns)))
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            yield rows, piece[: rows.stop - first]


@cache
def _random_rows(format: WeightFormat, columns: int) -> np.ndarray:
    """Random rows, uint8 (_PIECE_ROWS, bytes of a row)."""
    rng = np.random.default_rng(8)
    raw = rng.integers(0, 256, (_PIECE_ROWS, columns // format.values, format.nbytes), np.uint8)
    for place in _SCALES[format.name]:
        scales = rng.uniform(-_LARGEST_SCALE, _LARGEST_SCALE, raw.shape[:2]).astype("<f2")
        raw[..., place : place + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(_PIECE_ROWS, -1)
