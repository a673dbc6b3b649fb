"""Makes tests/fixtures/quantized: matrices as the packages compressed-tensors and bitsandbytes write them.

    python -m venv reference && reference/bin/pip install torch transformers compressed-tensors bitsandbytes
    reference/bin/python -m scripts.make_quantized_fixtures

Each file has the tensors of one module, `x`, and `values`, float32: what the package reads. Its metadata has the
`quantization_config` of a model of that kind.
"""

import json
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "quantized"
ROWS, COLUMNS, GROUP = 24, 256, 64


def save(name: str, settings: dict[str, object], tensors: dict[str, torch.Tensor], values: torch.Tensor) -> None:
    stored = {f"x.{label}": tensor.contiguous() for label, tensor in tensors.items()} | {"values": values.float()}
    save_file(stored, FOLDER / f"{name}.safetensors", {"quantization_config": json.dumps(settings)})


def make_compressed(
    name: str, format: str, *, global_scale: bool = False, zero: bool = False, **weights: object
) -> None:
    """format: the name that the package has for the layout. weights: as in a configuration."""
    args = QuantizationArgs(symmetric=not zero, **weights)
    height, width = args.block_structure or (1, args.group_size or COLUMNS)
    values = torch.randn(ROWS, COLUMNS).bfloat16() * 0.03
    blocks = (
        torch.nn.functional.pad(values, (0, 0, 0, -ROWS % height)).unflatten(0, (-1, height)).unflatten(2, (-1, width))
    )
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    factor = generate_gparam(low.min(), high.max()) if global_scale else None
    scale, zeros = calculate_qparams(low, high, args, factor)
    state = {"weight": values, "weight_scale": scale, "weight_zero_point": zeros}
    state |= {} if factor is None else {"weight_global_scale": factor[None]}
    scheme, compressor = QuantizationScheme(targets=["Linear"], weights=args), BaseCompressor.load_from_registry(format)
    stored = compressor.compress(state, scheme)
    exact = {
        key: value.float() if value.is_floating_point() and key != "weight" else value for key, value in stored.items()
    }
    if factor is None:
        read = compressor.decompress(exact, scheme)["weight"]
    else:  # which `decompress` rounds to bfloat16
        codes = unpack_fp4_from_uint8(stored["weight_packed"], ROWS, COLUMNS, dtype=torch.float32)
        read = dequantize(codes, exact["weight_scale"], args=args, global_scale=factor)
    settings = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    settings |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}}}
    save(name, settings, stored, read)


def make_four_bits(kind: str, *, nested: bool) -> None:
    packed, state = bnb.quantize_4bit(torch.randn(ROWS, COLUMNS) * 0.03, quant_type=kind, compress_statistics=nested)
    stored = {"weight": packed, **{f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    save(f"bitsandbytes_{kind}{'_nested' if nested else ''}", settings, stored, bnb.dequantize_4bit(packed, state))


def make_bytes() -> None:
    values = torch.randn(ROWS, COLUMNS).half() * 0.03
    codes, scale, _ = bnb.int8_vectorwise_quant(values)
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    save("bitsandbytes_int8", settings, {"weight": codes, "SCB": scale}, bnb.int8_vectorwise_dequant(codes, scale))


def make_fp8() -> None:
    """Blocks that divide neither rows nor columns."""
    height, width, columns = 16, 96, COLUMNS
    scale = torch.rand(-(-ROWS // height), -(-columns // width)).bfloat16() * 1e-3
    weight = (torch.randn(ROWS, columns) * 60).to(torch.float8_e4m3fn)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [height, width]}
    values = _dequantize_fp8_weight(weight, scale, [height, width], torch.float32)
    save("fp8_blocks", settings, {"weight": weight, "weight_scale_inv": scale}, values)


if __name__ == "__main__":
    torch.manual_seed(7)
    FOLDER.mkdir(exist_ok=True)
    make_fp8()
    group, channel, packed = {"strategy": "group", "group_size": GROUP}, {"strategy": "channel"}, "pack-quantized"
    make_compressed("packed_int4", packed, num_bits=4, **group)
    make_compressed("packed_int4_zeros", packed, num_bits=4, zero=True, **group)
    make_compressed("packed_int8", packed, num_bits=8, **group)
    make_compressed("int8_channels", "int-quantized", num_bits=8, **channel)
    make_compressed("int8_channels_zeros", "int-quantized", num_bits=8, zero=True, **channel)
    make_compressed("fp8_channels", "float-quantized", num_bits=8, type="float", **channel)
    make_compressed(
        "fp8_compressed_blocks",
        "float-quantized",
        num_bits=8,
        type="float",
        strategy="block",
        block_structure=[128, 128],
    )
    nvfp4 = {"type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
    make_compressed("nvfp4", "nvfp4-pack-quantized", num_bits=4, global_scale=True, **nvfp4)
    for kind, nested in (("nf4", False), ("nf4", True), ("fp4", False)):
        make_four_bits(kind, nested=nested)
    make_bytes()
