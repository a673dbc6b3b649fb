"""Matrices as AWQ, GPTQ and others store them, written from the descriptions of their formats; and models of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from polarlm.model_loaders.files.file_bytes import FileBytes
from polarlm.model_loaders.files.safetensors_source import read_header
from tests.model_loaders.checkpoints import safetensors_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in a word, from its lowest bits
GROUP = 32
NAMES = {
    "float32": "F32",
    "float16": "F16",
    "int32": "I32",
    "uint32": "U32",
    "int8": "I8",
    "uint8": "U8",
    "int64": "I64",
}


class Stored(NamedTuple):
    """The tensors of a module, and the values that they stand for, float32. types: of tensors that NumPy has no type
    for."""

    tensors: dict[str, np.ndarray]
    values: np.ndarray
    types: Mapping[str, str] = {}


def words(codes: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """codes (rows, n) in words of 32 bits, int32 (rows, n · bits / 32). order: of the codes of a word."""
    count = 32 // bits
    packed = np.zeros((len(codes), codes.shape[1] // count), np.uint32)
    for place, number in enumerate(order or range(count)):
        packed |= codes[:, number::count].astype(np.uint32) << np.uint32(bits * place)
    return packed.view(np.int32)


class Integers(NamedTuple):
    """w = scale * (code - zero): codes (out, in), zeros and scales (out, groups), the group of each input."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, bits: int, *, zero: bool, group: int = GROUP, shuffled: bool = False) -> Integers:
        """x (out, in) to the nearest codes. zero: zero points are all kinds of numbers, else they are in the middle."""
        rng, top = np.random.default_rng(x.size), (1 << bits) - 1
        groups = np.arange(x.shape[1]) // group
        groups = rng.permutation(groups) if shuffled else groups
        shape = len(x), groups.max() + 1
        scales = (np.abs(x).max() / top * rng.uniform(1, 2, shape)).astype(np.float16)
        zeros = rng.integers(1, top, shape) if zero else np.full(shape, (top + 1) // 2)
        codes = np.clip(np.rint(x / scales[:, groups] + zeros[:, groups]), 0, top)
        return cls(codes.astype(np.uint8), zeros, scales, groups)

    @property
    def values(self) -> np.ndarray:
        whole = self.codes.astype(np.int32) - self.zeros[:, self.groups]
        return (whole * self.scales[:, self.groups].astype(np.float64)).astype(np.float32)


def awq(x: np.ndarray) -> Stored:
    of = Integers.of(x, 4, zero=True)
    packed = {"qweight": words(of.codes.T, 4, AWQ_ORDER), "qzeros": words(of.zeros.T, 4, AWQ_ORDER)}
    return Stored({**packed, "scales": of.scales.T}, of.values)


def gptq(x: np.ndarray, bits: int = 4, *, zero: bool = False, shuffled: bool = False, added: int = 1) -> Stored:
    """added: what is added to stored zero points. Shuffled groups are half as large."""
    of = Integers.of(x, bits, zero=zero, shuffled=shuffled, group=GROUP // 2 if shuffled else GROUP)
    packed = {"qweight": words(of.codes, bits).T, "qzeros": words(of.zeros.T - added, bits)}
    return Stored({**packed, "scales": of.scales.T, "g_idx": of.groups.astype(np.int32)}, of.values)


def packed_integers(x: np.ndarray, *, shuffled: bool = False) -> Stored:
    """As compressed-tensors packs them; zero points are in the middle."""
    of = Integers.of(x, 4, zero=False, shuffled=shuffled, group=GROUP // 2 if shuffled else GROUP)
    shape = np.array(x.shape, np.int64)
    tensors = {"weight_packed": words(of.codes, 4), "weight_scale": of.scales, "weight_shape": shape}
    return Stored(tensors | ({"weight_g_idx": of.groups.astype(np.int32)} if shuffled else {}), of.values)


def e4m3(shape: tuple[int, ...], *, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Random codes that are no NaN, and their values: 2^(exponent - 7) * (1 + fraction / 8)."""
    rng = np.random.default_rng(shape[0] * shape[1])
    codes = (rng.integers(0, 0x60, shape) | rng.integers(0, 1 + signed, shape) << 7).astype(np.uint8)
    exponent, fraction = codes >> 3 & 15, (codes & 7) / 8
    size = np.where(exponent > 0, 2.0 ** (exponent.astype(float) - 7) * (1 + fraction), 2.0**-6 * fraction)
    return codes, np.where(codes & 0x80, -size, size).astype(np.float32)


def fp8(x: np.ndarray) -> Stored:
    """With blocks of 16 × 32."""
    codes, values = e4m3(x.shape, signed=True)
    shape = -(-len(x) // 16), -(-x.shape[1] // 32)
    scales = np.random.default_rng(x.size).uniform(0.001, 0.002, shape).astype(np.float32)
    of_values = np.repeat(np.repeat(scales, 16, 0), 32, 1)[: len(x), : x.shape[1]]
    return Stored({"weight": codes, "weight_scale_inv": scales}, values * of_values, {"weight": "F8_E4M3"})


def fp8_of_tensors(x: np.ndarray) -> Stored:
    """With one scale, and one for the inputs, which is not read."""
    codes, values = e4m3(x.shape, signed=True)
    scale = np.array(0.0015, np.float32)
    return Stored({"weight": codes, "weight_scale": scale, "input_scale": scale}, values * scale, {"weight": "F8_E4M3"})


def nvfp4(x: np.ndarray) -> Stored:
    """Two codes in a byte, the first in its lower half; a scale for each 16 inputs and one for the matrix."""
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = np.random.default_rng(x.size).integers(0, 16, x.shape, np.uint8)
    scales, values = e4m3((len(x), x.shape[1] // 16), signed=False)
    factor = np.array(0.002, np.float32)
    tensors = {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales, "weight_scale_2": factor}
    return Stored(tensors, numbers[codes] * np.repeat(values * factor, 16, 1), {"weight_scale": "F8_E4M3"})


def mlx(x: np.ndarray, bits: int = 4) -> Stored:
    """w = scale * code + offset."""
    of = Integers.of(x, bits, zero=True)
    offsets = (-of.zeros * of.scales).astype(np.float16)
    values = of.codes * of.scales[:, of.groups].astype(np.float32) + offsets[:, of.groups].astype(np.float32)
    return Stored({"weight": words(of.codes, bits).view(np.uint32), "scales": of.scales, "biases": offsets}, values)


# What bitsandbytes' codes of NF4 stand for, rounded: files bring their table along.
NF4 = [
    -1,
    -0.6962,
    -0.5251,
    -0.3949,
    -0.2844,
    -0.1848,
    -0.0911,
    0,
    0.0796,
    0.1609,
    0.2461,
    0.3379,
    0.4407,
    0.5626,
    0.723,
    1,
]


def nf4(x: np.ndarray) -> Stored:
    """Blocks of 32, one after another through all rows; the first code of a byte is in its upper half."""
    scales, table = np.abs(x).reshape(-1, 32).max(1), np.array(NF4, np.float32)
    codes = np.abs(x.reshape(-1, 32, 1) / scales[:, None, None] - table).argmin(-1).astype(np.uint8)
    pairs = codes.reshape(-1, 2)
    state = json.dumps({"quant_type": "nf4", "blocksize": 32, "shape": x.shape, "dtype": "float16"}).encode()
    tensors = {"weight": (pairs[:, :1] << 4 | pairs[:, 1:]), "weight.absmax": scales, "weight.quant_map": table}
    tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(state, np.uint8)
    return Stored(tensors, (table[codes] * scales[:, None]).reshape(x.shape))


class Kind(NamedTuple):
    """A kind of quantized model. type: the type that its matrices are read as. width: of what divides their rows."""

    settings: dict[str, object]
    store: Callable[[np.ndarray], Stored]
    type: str
    width: int = GROUP


_INTEGERS = {"bits": 4, "group_size": GROUP}
KINDS = {
    "awq": Kind({"quant_method": "awq", **_INTEGERS, "zero_point": True, "version": "gemm"}, awq, "Q5_0"),
    "gptq": Kind({"quant_method": "gptq", **_INTEGERS, "sym": True}, gptq, "Q4_0"),
    "gptq_zeros": Kind({"quant_method": "gptq", **_INTEGERS, "sym": False}, lambda x: gptq(x, zero=True), "Q5_0"),
    "gptq_v2": Kind(
        {"quant_method": "gptq", **_INTEGERS, "checkpoint_format": "gptq_v2"},
        lambda x: gptq(x, zero=True, added=0),
        "Q5_0",
    ),
    "gptq_desc_act": Kind(
        {"quant_method": "gptq", **_INTEGERS, "desc_act": True, "group_size": GROUP // 2},
        lambda x: gptq(x, zero=True, shuffled=True),
        "INT4",
    ),
    "gptq_8": Kind({"quant_method": "gptq", **_INTEGERS, "bits": 8, "sym": True}, lambda x: gptq(x, 8), "Q8_0"),
    "compressed-tensors": Kind(
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}, packed_integers, "Q4_0"
    ),
    "fp8": Kind({"quant_method": "fp8", "weight_block_size": [16, 32]}, fp8, "FP8", 8),
    "nf4": Kind({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4, "NF4"),
    "actorder": Kind(
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        lambda x: packed_integers(x, shuffled=True),
        "INT4",
    ),
    "modelopt": Kind({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_of_tensors, "FP8", 8),
    "nvfp4": Kind({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4, "FP4"),
    "mlx": Kind(_INTEGERS, mlx, "Q4_1"),
    "mlx_8": Kind({**_INTEGERS, "bits": 8}, lambda x: mlx(x, 8), "INT8"),
}


def write(path: Path, tensors: Mapping[str, np.ndarray], types: Mapping[str, str]) -> None:
    header, data = {}, b""
    for name, array in tensors.items():
        type = types.get(name, NAMES[array.dtype.name])
        header[name] = {"dtype": type, "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    safetensors_file(path, header, data)


def is_linear(name: str, shape: tuple[int, ...], width: int) -> bool:
    """Whether a tensor of a file is a linear layer's matrix with whole groups of `width`, and no router."""
    others = "gate.weight", "in_proj_ba.weight"
    return "layers." in name and len(shape) == 2 and shape[0] % 8 == shape[1] % width == 0 and not name.endswith(others)


def quantized_model(
    folder: Path, model: Path, kind: Kind, change: Callable[[dict[str, np.ndarray]], object] = lambda tensors: None
) -> Path:
    """Writes two copies of a model and returns their folder: `quantized`, whose linear layers are of a kind, and
    `plain`, which has their values in float32. change: what happens to the first one's tensors."""
    tensors: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    types: dict[str, str] = {}
    stored_tensors = [item for file in model.glob("*.safetensors") for item in read_header(FileBytes(file)).items()]
    for name, stored_tensor in sorted(stored_tensors, key=lambda item: item[0]):
        array = stored_tensor.values(slice(0, stored_tensor.shape[0])).astype(np.float32).reshape(stored_tensor.shape)
        plain[name] = array
        if not is_linear(name, array.shape, kind.width):
            tensors[name] = array
            continue
        module, stored = name.removesuffix(".weight"), kind.store(array)
        plain[name] = stored.values
        tensors |= {f"{module}.{label}": np.ascontiguousarray(part) for label, part in stored.tensors.items()}
        types |= {f"{module}.{label}": type for label, type in stored.types.items()}
    change(tensors)
    config = json.loads((model / "config.json").read_text())
    for name, content, changes in (
        ("plain", plain, {}),
        ("quantized", tensors, {"quantization_config": kind.settings}),
    ):
        copy = Path(shutil.copytree(model, folder / name, ignore=shutil.ignore_patterns("*.safetensors*", "*.npz")))
        write(copy / "model.safetensors", content, types if name == "quantized" else {})
        (copy / "config.json").write_text(json.dumps(config | changes))
    return folder
