"""Random weights of models of every family, in every weight format, to test and to time engines.

Values of a matrix (out, in) have a mean near 0 and a variance of 1/in, so that activations neither grow nor vanish. All
matrices of a format take their blocks from one piece of random blocks, from different places on, so that a model of any
size needs little time and memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from polarlm.engine.weight_formats import get
from polarlm.model_loaders import families
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.files.tensor_table import TensorSpec

# Where the blocks of a format have their float16 scales. mxfp4 has an exponent in the first byte of a block, iq1_m a
# scale in the upper halves of four bytes.
SCALES = {
    **dict.fromkeys(("q8_0", "q4_0", "q5_0", "iq4_nl", "iq4_xs", "nf4"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    **{"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "mxfp4": (), "tq2_0": (64,), "tq1_0": (52,), "iq1_m": ()},
    **dict.fromkeys(("iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"), (0,)),
}
BLOCKS = tuple(SCALES)  # names of the formats that have blocks
# Kind of a model's weights → the format of most matrices, and of the matrices that matter most.
KINDS = {
    "q4_0": ("q4_0", "q6_k"),  # q6_k for the output alone, as in files that llama-quantize makes
    "q4_k": ("q4_k", "q6_k"),  # the mixture Q4_K_M
    "q6_k": ("q6_k", "q6_k"),
    "q8_0": ("q8_0", "q8_0"),
    "iq4_xs": ("iq4_xs", "q6_k"),
    **{name: (name, name) for name in ("bf16", "f16", "f32")},
    "mxfp4": ("mxfp4", "q8_0"),  # experts have the first, and the other matrices the second
    "tq1_0": ("tq1_0", "q6_k"),
    **{name: (name, name) for name in ("iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")},
}
_PIECE_VALUES = 1 << 20
_MXFP4_DEVIATION = 2.9  # the standard deviation of the values of all codes


# -- blocks --------------------------------------------------------------------------------------------------------


def random_blocks(
    rng: np.random.Generator, name: str, rows: int, columns: int, scales: Iterable[float] = (2**-8, 2**-9, -(2**-10))
) -> np.ndarray:
    """Random bytes of a format that has blocks, uint8 (rows, bytes of a row); scales are drawn from `scales`.

    Exponents of mxfp4 are 118 to 122, which are scales of 2^-10 to 2^-6.
    """
    stored = get(name)
    raw = rng.integers(0, 256, (rows, columns // stored.values, stored.nbytes), np.uint8)
    for place in SCALES[name]:
        drawn = rng.choice(np.array(list(scales), "<f2"), raw.shape[:2])
        raw[..., place : place + 2] = drawn[..., None].view(np.uint8)
    if name == "mxfp4":
        raw[..., 0] = rng.integers(118, 123, raw.shape[:2])
    if name == "iq1_m":
        drawn = rng.choice(np.array(list(scales), "<f2"), raw.shape[:2]).view(np.uint16)
        for word in range(4):
            raw[..., 49 + 2 * word] = raw[..., 49 + 2 * word] & 15 | (drawn >> 4 * word & 15).astype(np.uint8) << 4
    return raw.reshape(rows, -1)


@lru_cache(maxsize=16)
def _piece(name: str, columns: int) -> np.ndarray:
    """Random blocks, uint8 (blocks, bytes of a block), of a matrix with rows of `columns` numbers.

    Their number is odd, so that rows do not begin with the same block again soon.
    """
    rng, size, format = np.random.default_rng(8), columns**-0.5, get(name)
    count = _PIECE_VALUES // format.values - 1
    if name not in BLOCKS:
        values = rng.standard_normal(count, np.float32) * np.float32(size)
        bits = values.view("<u4")
        kinds = {"f32": values, "f16": values.astype("<f2"), "bf16": ((bits + 0x8000) >> 16).astype("<u2")}
        return kinds[name].view(np.uint8).reshape(count, format.nbytes)
    scale = size / _unit(name)
    raw = random_blocks(rng, name, count, format.values, (scale, -scale))
    if name == "mxfp4":
        raw[:, 0] = 127 + round(float(np.log2(size / _MXFP4_DEVIATION)))
    return raw


@cache
def _unit(name: str) -> float:
    """The standard deviation of the values of random blocks with scales of 1 and -1."""
    format = get(name)
    raw = random_blocks(np.random.default_rng(9), name, 1 << 18 >> format.values.bit_length(), format.values, (1, -1))
    values = np.empty((len(raw), format.values), np.float32)
    format.dequantize(raw, values)
    return float(values.std())


class RandomMatrix:
    """See `engine.weight_formats.StoredMatrix`. seed: matrices of different seeds have different values."""

    def __init__(self, name: str, rows: int, columns: int, seed: str = ""):
        self.format, self.shape = get(name), (rows, columns)
        self._seed = zlib.crc32(seed.encode())

    def raw(self, rows: slice) -> np.ndarray:
        """The bytes of rows, uint8 (rows, bytes of a row)."""
        piece, of_row = _piece(self.format.name, self.shape[1]), self.shape[1] // self.format.values
        blocks = np.empty(((rows.stop - rows.start) * of_row, self.format.nbytes), np.uint8)
        place, end = (self._seed + rows.start * of_row) % len(piece), 0
        while end < len(blocks):
            part = piece[place : place + len(blocks) - end]
            blocks[end : end + len(part)] = part
            place, end = 0, end + len(part)
        return blocks.reshape(-1, self.format.size(self.shape[1]))

    def dequantize(self, out: np.ndarray, first: int = 0) -> None:
        """Write the values of rows, from `first` on, to `out` (rows, columns) float32."""
        self.format.dequantize(self.raw(slice(first, first + len(out))), out)

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        step = max(1, nbytes // self.format.size(self.shape[1]))
        for first in range(0, self.shape[0], step):
            rows = slice(first, min(first + step, self.shape[0]))
            yield rows, self.raw(rows)


# -- models --------------------------------------------------------------------------------------------------------


def matrix_types(config: ModelConfig, kind: str) -> dict[str, str]:
    """Name of a matrix → its format, for all matrices of a model, as llama-quantize chooses them. kind: one of
    KINDS."""
    (most, better), table = KINDS[kind], families.tensors(config)
    usual = better if kind == "mxfp4" else most
    types: dict[str, str] = {}
    for slot, specs in table.top.items():
        is_head = slot == ("embedding" if config.tied_head else "head")
        type = "f32" if slot in ("positions", "token_types") else better if is_head else usual
        types |= {spec.name: type for spec in specs if len(spec.shape) > 1}
    for number, slots in enumerate(table.layers):
        is_better = kind != "q4_0" and has_larger_types(number, len(table.layers))
        mixed = better if is_better else usual
        for slot, specs in slots.items():
            for place, spec in enumerate(specs):
                if len(spec.shape) > 1:
                    types[spec.name] = _type(slot, place, usual, mixed, most if kind == "mxfp4" else "")
    columns = {spec.name: spec.shape[-1] for spec in table.specs()}
    return {  # with a format whose blocks divide the rows
        name: next(one for one in (type, "q8_0", "bf16") if columns[name] % get(one).values == 0)
        for name, type in types.items()
    }


def _type(slot: str, place: int, usual: str, mixed: str, of_experts: str) -> str:
    """The format of the matrix at `place` of a layer's slot. of_experts: the format of all experts; "" if it varies."""
    if slot in ("router", "shared_gate"):
        return "f32"
    if slot == "delta_in" and place > 1:  # gates, which have a row for each head
        return "q8_0"
    if of_experts and slot.startswith("experts_"):
        return of_experts
    is_mixed = slot in ("down", "shared_down", "experts_down", "delta_out") or (slot, place) in (
        ("qkv", 2),
        ("delta_in", 0),
    )
    return mixed if is_mixed else usual


def has_larger_types(layer: int, layers: int) -> bool:
    """Whether llama.cpp's Q4_K_M stores `down` and values of this layer as q6_k: in the first and last eighth of the
    layers and in every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def vector(spec: TensorSpec) -> np.ndarray:
    """The values of a tensor that is no matrix, float32: norms are 1."""
    rng, size = np.random.default_rng(zlib.crc32(spec.name.encode())), spec.shape[0]
    if spec.negated_exp:  # from two tokens to a few hundred until half of a state has decayed
        return -np.geomspace(0.5, 0.002, size, dtype=np.float32)
    if spec.flat and "conv" in spec.name:
        return 0.5 * rng.standard_normal(size, np.float32)
    if any(part in spec.name for part in ("bias", "sinks")):
        return np.float32(0.1) * rng.standard_normal(size, np.float32)
    return np.ones(size, np.float32)


class RandomWeights:
    """See `model_loaders.files.weights.WeightSource`. type_of: name of a matrix → its weight format."""

    def __init__(self, config: ModelConfig, type_of: Callable[[str], str]):
        self._specs: Mapping[str, TensorSpec] = {spec.name: spec for spec in families.tensors(config).specs()}
        self._matrices = {
            name: RandomMatrix(type_of(name), *spec.shape, seed=name)
            for name, spec in self._specs.items()
            if len(spec.shape) == 2
        }

    @classmethod
    def for_kind(cls, config: ModelConfig, kind: str) -> RandomWeights:
        """The weights of a model in one of KINDS."""
        return cls(config, matrix_types(config, kind).__getitem__)

    def names(self) -> frozenset[str]:
        return frozenset(self._specs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._specs[name].shape

    def stored_dtype(self, name: str) -> str:
        return self._matrices[name].format.name.upper() if name in self._matrices else "F32"

    def read_raw(self, name: str, rows: slice) -> np.ndarray:
        return self._matrices[name].raw(rows)

    def expect(self, name: str) -> None:
        """There is nothing to read ahead."""

    def read_into(self, name: str, out: np.ndarray, rows: slice = slice(None)) -> None:
        if name in self._matrices:
            self._matrices[name].dequantize(out, rows.start or 0)
        else:
            out[...] = vector(self._specs[name])[rows]

    def files(self) -> frozenset[Path]:
        return frozenset()

    def close(self) -> None:
        """There is no file."""
