"""Files of models with latent attention: folders, and both kinds of GGUF files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from polarlm.model_loaders import ModelConfig, load_weights
from polarlm.model_loaders.config import Experts, GatedMLP, LatentAttention, Layer
from tests.model_loaders.checkpoints import MODELS, finish, gguf_header, gguf_name, joined_experts, read_all

ONLY_NEW = ("attention__key_length_mla", "attention__value_length_mla")
NAMES = ("deepseek_v2_greedy", "deepseek_v3_yarn", "glm4_moe_lite")


def attention_of(config: ModelConfig) -> LatentAttention:
    assert isinstance(config.attention, LatentAttention)
    return config.attention


def in_float32(config: ModelConfig) -> ModelConfig:
    """The configuration with the scale of experts as GGUF files have it."""

    def rounded(layer: Layer) -> Layer:
        ffn = layer.ffn
        return replace(layer, ffn=replace(ffn, scale=float(np.float32(ffn.scale))) if isinstance(ffn, Experts) else ffn)

    return replace(config, layers=tuple(map(rounded, config.layers)))


def with_neighbours(rows: np.ndarray, heads: int, rotated: int) -> np.ndarray:
    """The last `rotated` rows of each head as files have them: pairs of RoPE are neighbours."""
    by_head = rows.reshape(heads, -1, *rows.shape[1:]).copy()
    halves = by_head[:, -rotated:].reshape(heads, 2, rotated // 2, *rows.shape[1:])
    by_head[:, -rotated:] = halves.swapaxes(1, 2).reshape(by_head[:, -rotated:].shape)
    return by_head.reshape(rows.shape)


def as_gguf(
    path: Path, config: ModelConfig, tensors: dict[str, np.ndarray], *, is_old: bool, is_quantized: bool = False
) -> Path:
    """The model as llama.cpp's converter writes it. is_old: as it did before it knew of the latent form of steps."""
    shape, experts = attention_of(config), next(one.ffn for one in config.layers if isinstance(one.ffn, Experts))
    rope = shape.rope
    assert rope is not None
    changes = {
        "leading_dense_block_count": sum(isinstance(layer.ffn, GatedMLP) for layer in config.layers),
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}[experts.scoring],
        "expert_group_count": experts.groups,
        "expert_group_used_count": experts.top_groups,
    }
    if rope.kind == "yarn":
        changes |= {"rope__scaling__type": "yarn", "rope__scaling__factor": rope.factor}
        changes |= {"rope__scaling__original_context_length": rope.original_context}
        changes |= {"rope__scaling__yarn_log_multiplier": 0.1 * rope.mscale_all_dim}
    if is_old:
        lengths = shape.own_dim + shape.rotated, shape.value_dim
        changes |= dict(zip(("attention__key_length", "attention__value_length"), lengths, strict=True))
        changes |= {"attention__head_count_kv": shape.heads, **dict.fromkeys(ONLY_NEW)}
    writer, written = gguf_header(path, "deepseek2", config, **changes), {}
    for name, rows in ((name, rows) for name, rows in tensors.items() if not name.endswith(".T")):
        heads = {"q_proj": shape.heads, "q_b_proj": shape.heads, "kv_a_proj_with_mqa": 1}.get(name.split(".")[-2])
        written[gguf_name(name, "deepseek2")] = rows if heads is None else with_neighbours(rows, heads, shape.rotated)
    joined = joined_experts(written)
    for layer in range(len(config.layers)) if is_old else ():
        keys, values = (joined.pop(f"blk.{layer}.attn_{side}_b.weight") for side in "kv")
        whole = np.concatenate([keys.swapaxes(1, 2), values], axis=1)  # (H, own + value channels, L)
        joined[f"blk.{layer}.attn_kv_b.weight"] = whole.reshape(-1, shape.latent)
    for label, tensor in joined.items():
        if is_quantized and label.endswith("attn_kv_b.weight"):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(label, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(label, tensor)
    finish(writer)
    return path


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_file_describes_the_same_model(name: str, is_old: bool, tmp_path: Path) -> None:
    config, weights, _ = load_weights(MODELS / name)
    written = read_all(weights)
    read_config, read, _ = load_weights(as_gguf(tmp_path / "model.gguf", config, written, is_old=is_old))
    rope = attention_of(read_config).rope
    wanted = replace(config, family="deepseek_v2", norm_eps=read_config.norm_eps)  # GGUF has numbers in float32
    scale = pytest.approx(attention_of(config).scale)
    assert attention_of(read_config).scale == scale
    assert rope is not None
    assert rope.mscale_all_dim == pytest.approx(attention_of(config).rope.mscale_all_dim)
    ropes = {"rope": rope, "scale": attention_of(read_config).scale}
    assert in_float32(read_config) == in_float32(wanted.with_attention(lambda one: replace(one, **ropes)))
    found = read_all(read)
    assert found.keys() == written.keys()
    for key, tensor in found.items():
        np.testing.assert_array_equal(tensor, written[key], err_msg=key)


def test_keys_of_heads_are_turned_also_where_they_are_quantized(tmp_path: Path) -> None:
    """Rows of blocks become columns, as halves: each differs from what the block says by a rounding to half."""
    config, weights, _ = load_weights(MODELS / "glm4_moe_lite")  # whose latent vector is a whole block
    written = read_all(weights)
    path = as_gguf(tmp_path / "model.gguf", config, written, is_old=True, is_quantized=True)
    _, read, _ = load_weights(path)
    found, shape = read_all(read), attention_of(config)
    for head in range(shape.heads):
        for side in "kv":
            name = f"model.layers.1.self_attn.{side}_b_proj.{head}.weight"
            rows = written[name].T if side == "k" else written[name]
            blocks = gguf.quantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType.Q8_0)
            expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
            if side == "k":
                expected = expected.T.astype(np.float16)
            np.testing.assert_array_equal(found[name], expected)
            assert read.stored_dtype(name) == ("F16" if side == "k" else "Q8_0")
