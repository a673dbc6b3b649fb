"""`python -m scripts.make_random_model --shape SHAPE --type TYPE OUT.gguf`: a model with random weights, to time.

Its matrices have the sizes and the weight formats of a real model, so that engines take the time that they take for
that one. Its text means nothing. The tokenizer is that of the demonstration model, and is filled up with unused tokens
to the vocabulary of the shape.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tqdm import tqdm

from polarlm.model_loaders import LoadError
from polarlm.model_loaders.demo import demo_model
from scripts.random_models.blocks import random_blocks
from scripts.random_models.shapes import SHAPES, Shape
from scripts.random_models.tensors import (
    ATTENDING,
    CONV_WIDTH,
    DELTA_DIM,
    DELTA_WIDTH,
    KEY_HEADS,
    TYPES,
    tensors_of,
)

_TOKENS, _TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.make_random_model", description=__doc__.split("\n")[2])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--type", choices=TYPES, required=True, help="q4_k is the mixture Q4_K_M")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if options.layers is not None:
        shape = replace(shape, layers=max(1, min(options.layers, shape.layers)))
    try:
        write(options.out, options.shape, shape, options.type, demo_model())
    except (LoadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def write(out: Path, name: str, shape: Shape, kind: str, tokenizer: Path) -> None:
    """Write a model of `shape` to `out`. kind: a key of TYPES. tokenizer: a .gguf file that has the tokenizer."""
    writer = gguf.GGUFWriter(out, shape.arch)
    writer.add_name(f"Random {name}")
    writer.add_file_type(
        gguf.LlamaFileType["MOSTLY_" + {"q4_k": "Q4_K_M", "mxfp4": "MXFP4_MOE"}.get(kind, kind.upper())]
    )
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    if shape.attending:
        kv_heads = [shape.kv_heads if layer in shape.attending else 0 for layer in range(shape.layers)]
        writer.add_head_count_kv(kv_heads)
        writer.add_uint32(f"{shape.arch}.shortconv.l_cache", CONV_WIDTH)
    else:
        writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim // 4 if shape.value_heads else shape.head_dim)
    if shape.value_heads:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(DELTA_WIDTH)
        writer.add_ssm_state_size(DELTA_DIM)
        writer.add_ssm_group_count(KEY_HEADS)
        writer.add_ssm_time_step_rank(shape.value_heads)
        writer.add_ssm_inner_size(shape.value_heads * DELTA_DIM)
        writer.add_full_attention_interval(ATTENDING)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.expert_ffn)
    if shape.window:
        writer.add_sliding_window(shape.window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    vocabulary = _copy_tokenizer(writer, tokenizer, shape.vocabulary)
    tensors = list(tensors_of(shape, kind, vocabulary))
    for tensor, rows, columns, type in tensors:
        dims, *stored = _stored(rows, columns, type)
        if tensor.endswith("_exps.weight"):
            dims = [shape.experts, rows // shape.experts, dims[1]]
        writer.add_tensor_info(tensor, dims, *stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    total = sum(_stored(rows, columns, type)[2] for _, rows, columns, type in tensors)
    with tqdm(total=total, desc=f"Writing {out.name}", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for tensor, rows, columns, type in tensors:
            data = _norm_or_bias(tensor, columns) if rows == 0 else random_blocks(rng, rows, columns, type)
            writer.write_tensor_data(data)
            bar.update(data.nbytes)
    writer.close()


def _copy_tokenizer(writer: gguf.GGUFWriter, path: Path, vocabulary: int) -> int:
    """Copy all about the tokenizer, with tokens up to `vocabulary` that stand for nothing → the number of tokens."""
    fields = {name: field for name, field in gguf.GGUFReader(path).fields.items() if name.startswith("tokenizer.")}
    values = {name: field.contents() for name, field in fields.items()}
    tokens = values[_TOKENS]
    more = range(len(tokens), vocabulary)
    values[_TOKENS] = [*tokens, *(f"<unused{i}>" for i in more)]
    values[_TOKEN_TYPES] = [*values[_TOKEN_TYPES], *(int(gguf.TokenType.UNUSED) for _ in more)]
    for name, field in fields.items():
        writer.add_key_value(name, values[name], field.types[0], field.types[-1] if len(field.types) > 1 else None)
    return max(len(tokens), vocabulary)


def _stored(rows: int, columns: int, type: Type) -> tuple[list[int], np.dtype, int, Type]:
    """The shape in bytes, its dtype, the number of bytes and the type, as the writer wants them."""
    if rows == 0:
        return [columns], np.dtype(np.float32), 4 * columns, type
    values, nbytes = gguf.GGML_QUANT_SIZES[type]
    row = columns // values * nbytes
    return [rows, row], np.dtype(np.uint8), rows * row, type


def _norm_or_bias(name: str, length: int) -> np.ndarray:
    if name.endswith("ssm_a"):  # from two tokens to a few hundred until half has decayed
        return -np.geomspace(0.5, 0.002, length, dtype=np.float32)
    return np.full(length, name.endswith("norm.weight"), np.float32)


if __name__ == "__main__":
    sys.exit(main())
