"""`python -m scripts.make_random_model --shape SHAPE --type TYPE OUT.gguf`: a model with random weights, to time.

Its matrices have the sizes and the weight formats of a real model, so that engines take the time that they take for
that one. Its text means nothing. The tokenizer is that of the demonstration model, and is filled up with unused tokens
to the vocabulary of the shape.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tqdm import tqdm

from polarlm.model_loaders import LoadError
from polarlm.model_loaders.demo import demo_model

_CONV_WIDTH = 3  # tokens
_DELTA_WIDTH, _DELTA_DIM, _KEY_HEADS, _ATTENDING = 4, 128, 16, 4  # as Qwen3.5 has them
_TOKENS, _TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    arch: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int  # at least; that of the tokenizer if it is larger
    context: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False  # the embedding is the head, too
    qkv_bias: bool = False
    head_size: int = 0  # 0: hidden / heads
    qk_norm: str = ""  # "head" or "all"; see `model_loaders.config.QKNorm`
    experts: int = 0  # in each layer; 0: the layers are dense, with networks of size ffn
    experts_used: int = 0
    expert_ffn: int = 0
    window: int = 0  # of every second layer, in a model with sink scores and biases as gpt-oss has them; 0: none

    attending: tuple[int, ...] = ()  # layers with attention; the others have short convolutions. Empty: all
    value_heads: int = 0  # of the gated delta rules that three layers of four have, with 16 key heads; 0: none

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads


SHAPES = {
    # The context of the original is 2,048.
    "tinyllama-1.1b": Shape("llama", 22, 2048, 5632, 32, 4, 32_000, 8192),
    "7b": Shape("llama", 32, 4096, 14_336, 32, 8, 32_000, 8192),
    "qwen2.5-1.5b": Shape("qwen2", 28, 1536, 8960, 12, 2, 151_936, 32_768, 1e6, 1e-6, tied=True, qkv_bias=True),
    "lfm2-350m": Shape(
        *("lfm2", 16, 1024, 4608, 16, 8, 65_536, 128_000, 1e6),
        **{"tied": True, "qk_norm": "head", "attending": (2, 5, 8, 10, 12, 14)},
    ),
    **{
        f"qwen3.5-{name}": Shape(
            *("qwen35", layers, hidden, ffn, heads, kv_heads, 248_320, 262_144, 1e7, 1e-6),
            **{"tied": tied, "head_size": 256, "qk_norm": "head", "value_heads": value_heads},
        )
        for name, layers, hidden, ffn, heads, kv_heads, value_heads, tied in (
            ("0.8b", 24, 1024, 3584, 8, 2, 16, True),
            ("4b", 32, 2560, 9216, 16, 4, 32, True),
        )
    },
    "olmoe-1b-7b": Shape(
        "olmoe", 16, 2048, 1024, 16, 16, 50_304, 4096, qk_norm="all", experts=64, experts_used=8, expert_ffn=1024
    ),
    "qwen3-30b-a3b": Shape(
        *("qwen3moe", 48, 2048, 6144, 32, 4, 151_936, 40_960, 1e6, 1e-6),
        **{"head_size": 128, "qk_norm": "head", "experts": 128, "experts_used": 8, "expert_ffn": 768},
    ),
    "gpt-oss-20b": Shape(
        *("gpt-oss", 24, 2880, 2880, 64, 8, 201_088, 131_072, 150_000.0),
        **{"head_size": 64, "qkv_bias": True, "experts": 32, "experts_used": 4, "expert_ffn": 2880, "window": 128},
    ),
}
# Type of the command line → the type of most matrices, and of those that matter most.
TYPES = {
    "q4_0": (Type.Q4_0, Type.Q6_K),  # the latter of the output alone, as in files that llama-quantize makes
    "q4_k": (Type.Q4_K, Type.Q6_K),
    "q6_k": (Type.Q6_K, Type.Q6_K),
    "q8_0": (Type.Q8_0, Type.Q8_0),
    "iq4_xs": (Type.IQ4_XS, Type.Q6_K),
    "bf16": (Type.BF16, Type.BF16),
    "mxfp4": (Type.MXFP4, Type.Q8_0),  # of experts, and of the others
    "tq1_0": (Type.TQ1_0, Type.Q6_K),
    **{name.lower(): (Type[name],) * 2 for name in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
}


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
        writer.add_uint32(f"{shape.arch}.shortconv.l_cache", _CONV_WIDTH)
    else:
        writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim // 4 if shape.value_heads else shape.head_dim)
    if shape.value_heads:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(_DELTA_WIDTH)
        writer.add_ssm_state_size(_DELTA_DIM)
        writer.add_ssm_group_count(_KEY_HEADS)
        writer.add_ssm_time_step_rank(shape.value_heads)
        writer.add_ssm_inner_size(shape.value_heads * _DELTA_DIM)
        writer.add_full_attention_interval(_ATTENDING)
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
    tensors = list(_tensors(shape, kind, vocabulary))
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


def _tensors(shape: Shape, kind: str, vocabulary: int) -> Iterator[tuple[str, int, int, Type]]:
    """(name, rows, columns, type) of every tensor; a vector has 0 rows."""
    usual, better = TYPES[kind]
    of_experts = usual
    usual = better if kind == "mxfp4" else usual
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", vocabulary, shape.hidden, better if shape.tied else usual
    for layer in range(shape.layers):
        mixed = better if kind != "q4_0" and _has_better_matrices(layer, shape.layers) else usual
        for name, rows, columns, type in (
            ("attn_norm.weight", 0, shape.hidden, Type.F32),
            *_mixer(shape, layer, usual, mixed),
            (
                f"{'post_attention' if shape.window or shape.value_heads else 'ffn'}_norm.weight",
                0,
                shape.hidden,
                Type.F32,
            ),
            *(_of_experts(shape, of_experts, mixed) if shape.experts else _dense(shape, usual, mixed)),
            *(_of_gpt_oss(shape) if shape.window else ()),
        ):
            yield f"blk.{layer}.{name}", rows, columns, type
        if shape.qkv_bias:
            for part, length in (("q", heads), ("k", kv), ("v", kv)):
                yield f"blk.{layer}.attn_{part}.bias", 0, length, Type.F32
    yield f"{'token_embd' if shape.attending else 'output'}_norm.weight", 0, shape.hidden, Type.F32
    if not shape.tied:
        yield "output.weight", vocabulary, shape.hidden, better


def _mixer(shape: Shape, layer: int, usual: Type, mixed: Type) -> list[tuple[str, int, int, Type]]:
    if shape.value_heads and (layer + 1) % _ATTENDING:
        return _delta(shape, usual, mixed)
    attends = layer in (shape.attending or [layer])
    return _attention(shape, usual, mixed) if attends else _convolution(shape, usual)


def _delta(shape: Shape, usual: Type, mixed: Type) -> list[tuple[str, int, int, Type]]:
    heads, values = shape.value_heads, shape.value_heads * _DELTA_DIM
    channels = 2 * _KEY_HEADS * _DELTA_DIM + values
    return [
        ("attn_qkv.weight", channels, shape.hidden, mixed),
        ("attn_gate.weight", values, shape.hidden, usual),
        ("ssm_beta.weight", heads, shape.hidden, Type.Q8_0),
        ("ssm_alpha.weight", heads, shape.hidden, Type.Q8_0),
        ("ssm_conv1d.weight", channels, _DELTA_WIDTH, Type.F32),
        ("ssm_a", 0, heads, Type.F32),
        ("ssm_dt.bias", 0, heads, Type.F32),
        ("ssm_norm.weight", 0, _DELTA_DIM, Type.F32),
        ("ssm_out.weight", shape.hidden, values, mixed),
    ]


def _attention(shape: Shape, usual: Type, mixed: Type) -> list[tuple[str, int, int, Type]]:
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = {"head": (shape.head_dim,) * 2, "all": (heads, kv)}.get(shape.qk_norm, ())
    return [
        ("attn_q.weight", heads * (2 if shape.value_heads else 1), shape.hidden, usual),  # with gates
        ("attn_k.weight", kv, shape.hidden, usual),
        ("attn_v.weight", kv, shape.hidden, mixed),
        ("attn_output.weight", shape.hidden, heads, usual),
        *((f"attn_{part}_norm.weight", 0, length, Type.F32) for part, length in zip("qk", norms, strict=False)),
    ]


def _convolution(shape: Shape, usual: Type) -> list[tuple[str, int, int, Type]]:
    return [
        ("shortconv.in_proj.weight", 3 * shape.hidden, shape.hidden, usual),
        ("shortconv.conv.weight", shape.hidden, _CONV_WIDTH, Type.F32),
        ("shortconv.out_proj.weight", shape.hidden, shape.hidden, usual),
    ]


def _dense(shape: Shape, usual: Type, mixed: Type) -> list[tuple[str, int, int, Type]]:
    return [
        ("ffn_gate.weight", shape.ffn, shape.hidden, usual),
        ("ffn_up.weight", shape.ffn, shape.hidden, usual),
        ("ffn_down.weight", shape.hidden, shape.ffn, mixed),
    ]


def _of_experts(shape: Shape, usual: Type, mixed: Type) -> list[tuple[str, int, int, Type]]:
    """The rows are those of all experts."""
    mixed = usual if usual == Type.MXFP4 else mixed
    outer, inner = shape.experts * shape.expert_ffn, shape.experts * shape.hidden
    return [
        ("ffn_gate_inp.weight", shape.experts, shape.hidden, Type.F32),
        ("ffn_gate_exps.weight", outer, shape.hidden, usual),
        ("ffn_up_exps.weight", outer, shape.hidden, usual),
        ("ffn_down_exps.weight", inner, shape.expert_ffn, mixed),
    ]


def _of_gpt_oss(shape: Shape) -> list[tuple[str, int, int, Type]]:
    count = shape.experts
    return [
        ("attn_sinks.weight", 0, shape.heads, Type.F32),
        ("attn_output.bias", 0, shape.hidden, Type.F32),
        ("ffn_gate_inp.bias", 0, count, Type.F32),
        ("ffn_gate_exps.bias", count, shape.expert_ffn, Type.F32),
        ("ffn_up_exps.bias", count, shape.expert_ffn, Type.F32),
        ("ffn_down_exps.bias", count, shape.hidden, Type.F32),
    ]


def _has_better_matrices(layer: int, layers: int) -> bool:
    """Whether values and the down projection of a layer have more bits in Q4_K_M: those of about half of the layers."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


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


def random_blocks(rng: np.random.Generator, rows: int, columns: int, type: Type) -> np.ndarray:
    """A matrix of random blocks: (rows, bytes of a row) uint8. Its values have a mean near 0 and variance 1/columns."""
    values, nbytes = gguf.GGML_QUANT_SIZES[type]
    blocks = rng.integers(256, size=(rows, columns // values, nbytes), dtype=np.uint8)
    if type in _SCALES:
        _SCALES[type](rng, blocks, columns**-0.5)
    else:
        _scale_lattice(blocks, type, columns**-0.5)
    return blocks.reshape(rows, -1)


def _scale_q8_0(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """d, then 32 int8: all 256 of them have a standard deviation of 74."""
    _set_half(blocks, 0, size / 74)


def _scale_q4_0(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """d, then 32 codes. Values are d · (q − 8), whose mean is −0.5 d; half of the blocks have a negative d."""
    _set_half(blocks, 0, size / float(np.sqrt(np.mean((np.arange(16) - 8.0) ** 2))))
    blocks[..., 1] |= 128 * rng.integers(2, size=blocks.shape[:-1], dtype=np.uint8)  # the sign


def _scale_iq4_xs(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """d, then scales of 6 bits and codes. Values are d · (scale − 32) · table[q]; both factors are random."""
    scales, table = np.arange(64) - 32.0, np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    _set_half(blocks, 0, size / float(np.sqrt(np.mean(scales**2) * np.mean(table**2))))


def _scale_q4_k(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """d and dmin, then scales and minima of 6 bits. Values are d · scale · q − dmin · minimum; the mean of q is 7.5."""
    _set_half(blocks, 0, size / 257)
    _set_half(blocks, 2, 7.5 * size / 257)


def _scale_q6_k(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """192 bytes of codes, 16 int8 scales, d. Values are d · scale · (q − 32); q has a standard deviation of 18.5."""
    scales = rng.integers(20, 60, size=blocks[..., 192:208].shape)
    blocks[..., 192:208] = scales
    _set_half(blocks, 208, size / (18.5 * float(np.sqrt(np.mean(scales**2)))))


def _normal_bf16(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """A value of two bytes: the upper half of a float32."""
    values = size * rng.standard_normal(blocks.shape[:-1], np.float32)
    blocks[:] = values[..., None].view("<u2")[..., 1:].view(np.uint8)


def _scale_mxfp4(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """The exponent of a power of two, then 32 codes, whose values have a standard deviation of 2.9."""
    blocks[..., 0] = 127 + round(float(np.log2(size / 2.9)))


def _scale_tq1_0(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    """52 bytes of digits, d. Values are d · (digit − 1), each a third of them."""
    _set_half(blocks, 52, size / float(np.sqrt(2 / 3)))


def _normal_f32(rng: np.random.Generator, blocks: np.ndarray, size: float) -> None:
    blocks[:] = (size * rng.standard_normal(blocks.shape[:-1], np.float32))[..., None].view(np.uint8)


def _scale_lattice(blocks: np.ndarray, type: Type, size: float) -> None:
    """d, then indices of points, scales and signs: what these make of d = 1 is measured."""
    _set_half(blocks, 0, 1)
    sample = blocks.reshape(-1, blocks.shape[-1])[:4096]
    _set_half(blocks, 0, size / float(gguf.dequantize(sample, type).std()))


def _set_half(blocks: np.ndarray, at: int, value: float) -> None:
    blocks[..., at : at + 2] = np.array(value, "<f2").reshape(1).view(np.uint8)


_SCALES: dict[Type, Callable[[np.random.Generator, np.ndarray, float], None]] = {
    Type.Q8_0: _scale_q8_0,
    Type.Q4_0: _scale_q4_0,
    Type.Q4_K: _scale_q4_k,
    Type.Q6_K: _scale_q6_k,
    Type.IQ4_XS: _scale_iq4_xs,
    Type.BF16: _normal_bf16,
    Type.F32: _normal_f32,
    Type.MXFP4: _scale_mxfp4,
    Type.TQ1_0: _scale_tq1_0,
}


if __name__ == "__main__":
    sys.exit(main())
