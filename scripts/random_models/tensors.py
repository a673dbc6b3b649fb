"""Names, sizes and types of the tensors of a model."""

from __future__ import annotations

from collections.abc import Iterator

from gguf import GGMLQuantizationType as Type

from polarlm.bench.gpu.weights import has_larger_types
from scripts.random_models.shapes import Shape

CONV_WIDTH = 3  # tokens
DELTA_WIDTH, DELTA_DIM, KEY_HEADS, ATTENDING = 4, 128, 16, 4  # as Qwen3.5 has them
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


def tensors_of(shape: Shape, kind: str, vocabulary: int) -> Iterator[tuple[str, int, int, Type]]:
    """(name, rows, columns, type) of every tensor; a vector has 0 rows."""
    usual, better = TYPES[kind]
    of_experts = usual
    usual = better if kind == "mxfp4" else usual
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", vocabulary, shape.hidden, better if shape.tied else usual
    for layer in range(shape.layers):
        mixed = better if kind != "q4_0" and has_larger_types(layer, shape.layers) else usual
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
    if shape.value_heads and (layer + 1) % ATTENDING:
        return _delta(shape, usual, mixed)
    attends = layer in (shape.attending or [layer])
    return _attention(shape, usual, mixed) if attends else _convolution(shape, usual)


def _delta(shape: Shape, usual: Type, mixed: Type) -> list[tuple[str, int, int, Type]]:
    heads, values = shape.value_heads, shape.value_heads * DELTA_DIM
    channels = 2 * KEY_HEADS * DELTA_DIM + values
    return [
        ("attn_qkv.weight", channels, shape.hidden, mixed),
        ("attn_gate.weight", values, shape.hidden, usual),
        ("ssm_beta.weight", heads, shape.hidden, Type.Q8_0),
        ("ssm_alpha.weight", heads, shape.hidden, Type.Q8_0),
        ("ssm_conv1d.weight", channels, DELTA_WIDTH, Type.F32),
        ("ssm_a", 0, heads, Type.F32),
        ("ssm_dt.bias", 0, heads, Type.F32),
        ("ssm_norm.weight", 0, DELTA_DIM, Type.F32),
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
        ("shortconv.conv.weight", shape.hidden, CONV_WIDTH, Type.F32),
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
