"""Latent attention of random sizes, from files to logits, against its definition in float64, with expanded heads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.model.weights import load_weights
from polarlm.model_loaders import load_weights as open_weights
from tests.bare import bare_model, prefill_logits, read_model, spread
from tests.pairs import mostly_slow

EPS, LATENT_EPS, TOKENS = 1e-5, 1e-6, 40
Tensors = dict[str, np.ndarray]


SMALL = [1, 2, 3, 5], [4, 8, 20], [2, 8, 16], [4, 12], [8, 24, 40]  # heads; own, rotated, value, latent channels
EXPANDED = [1, 2, 5], [8, 16], [8], [16, 32], [56, 80]  # a head has fewer channels than a latent vector


def random_model(folder: Path, seed: int, sizes: Sequence[list[int]] = SMALL) -> tuple[dict[str, Any], Tensors]:
    """A folder of a dense model with latent attention in two layers, its configuration and tensors."""
    rng = np.random.default_rng(seed)
    heads, own, rotated, value, latent = (int(rng.choice(of)) for of in sizes)
    e, f, vocabulary, below = 24, 40, 64, int(rng.choice([0, 12, 16]))
    config = {
        "model_type": "deepseek_v3",
        **{"hidden_size": e, "intermediate_size": f, "vocab_size": vocabulary, "num_hidden_layers": 2},
        **{
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "kv_lora_rank": latent,
            "q_lora_rank": below or None,
        },
        **{"qk_nope_head_dim": own, "qk_rope_head_dim": rotated, "v_head_dim": value, "attention_bias": bool(seed % 2)},
        **{"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 2},
        **{"max_position_embeddings": 2048, "rms_norm_eps": EPS, "rope_theta": 100.0, "tie_word_embeddings": False},
    }
    shapes = {
        "model.embed_tokens.weight": (vocabulary, e),
        "lm_head.weight": (vocabulary, e),
        "model.norm.weight": (e,),
    }
    for layer in range(2):
        at, ffn = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        if below:
            shapes |= {f"{at}.q_a_proj.weight": (below, e), f"{at}.q_a_layernorm.weight": (below,)}
        shapes |= {
            f"{at}.{'q_b_proj' if below else 'q_proj'}.weight": (heads * (own + rotated), below or e),
            f"{at}.kv_a_proj_with_mqa.weight": (latent + rotated, e),
            f"{at}.kv_a_layernorm.weight": (latent,),
            f"{at}.kv_b_proj.weight": (heads * (own + value), latent),
            f"{at}.o_proj.weight": (e, heads * value),
            f"{ffn}.gate_proj.weight": (f, e),
            f"{ffn}.up_proj.weight": (f, e),
            f"{ffn}.down_proj.weight": (e, f),
            **{f"model.layers.{layer}.{name}_layernorm.weight": (e,) for name in ("input", "post_attention")},
        }
        if config["attention_bias"]:
            shapes |= {f"{at}.kv_a_proj_with_mqa.bias": (latent + rotated,), f"{at}.o_proj.bias": (e,)}
            shapes |= {f"{at}.q_a_proj.bias": (below,)} if below else {}
    tensors = {
        name: (rng.normal(0, 1.5 / np.sqrt(shape[-1]), shape) if len(shape) > 1 else rng.normal(1, 0.2, shape)).astype(
            "<f4"
        )
        for name, shape in shapes.items()
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return config, tensors


def defined_logits(config: dict[str, Any], tensors: Tensors, ids: list[int]) -> np.ndarray:
    """(T, V) float64 by DeepSeek-V2's definition (arXiv:2405.04434, §2.1): keys and values of each head are made."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, own, rotated = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    latent, value, positions = config["kv_lora_rank"], config["v_head_dim"], np.arange(len(ids))
    turns = np.exp(1j * positions[:, None] * 100.0 ** (-np.arange(0, rotated, 2) / rotated))

    def norm(x: np.ndarray, name: str, eps: float = EPS) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * w[name]

    def product(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def turn(x: np.ndarray) -> np.ndarray:
        """Neighbouring channels (T, …, R) are pairs."""
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * turns.reshape(len(ids), *[1] * (x.ndim - 2), -1)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        at, y = f"{prefix}.self_attn", norm(x, f"{prefix}.input_layernorm.weight")
        if config["q_lora_rank"]:
            below = norm(product(y, f"{at}.q_a_proj"), f"{at}.q_a_layernorm.weight", LATENT_EPS)
            q = product(below, f"{at}.q_b_proj")
        else:
            q = product(y, f"{at}.q_proj")
        q = q.reshape(len(ids), heads, own + rotated)
        kv = product(y, f"{at}.kv_a_proj_with_mqa")
        c = norm(kv[:, :latent], f"{at}.kv_a_layernorm.weight", LATENT_EPS)
        expanded = product(c, f"{at}.kv_b_proj").reshape(len(ids), heads, own + value)
        scores = np.einsum("qhd,khd->hqk", q[..., :own], expanded[..., :own])
        scores += np.einsum("qhd,kd->hqk", turn(q[..., own:]), turn(kv[:, latent:]))
        scores = np.where(positions[:, None] >= positions, scores / np.sqrt(own + rotated), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, expanded[..., own:]).reshape(len(ids), -1)
        x = x + product(mixed, f"{at}.o_proj")
        y, ffn = norm(x, f"{prefix}.post_attention_layernorm.weight"), f"{prefix}.mlp"
        gate = product(y, f"{ffn}.gate_proj")
        x = x + product(gate / (1 + np.exp(-gate)) * product(y, f"{ffn}.up_proj"), f"{ffn}.down_proj")
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


@pytest.mark.parametrize("seed", range(16))
def test_logits_are_those_of_the_definition(seed: int, tmp_path: Path) -> None:
    """To 3e-6 of their spread, by queries that are multiplied into the latent space."""
    config, tensors = random_model(tmp_path, seed)
    ids = np.random.default_rng(seed).integers(0, 64, TOKENS).tolist()
    wanted = defined_logits(config, tensors, ids)
    logits = prefill_logits(bare_model(*read_model(tmp_path)), ids)
    assert np.abs(logits - wanted).max() <= 3e-6 * spread(wanted)


@pytest.mark.slow
@mostly_slow("seed", range(3), [0])
def test_a_long_prompts_logits_are_those_of_the_definition(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 3e-6 of their spread, by keys and values of each head, which are made of latent vectors that are rotated to be
    stored; the same to the bit however many rows are computed at a time."""
    ops = NativeOps(1)
    config, tensors = random_model(tmp_path, seed, EXPANDED)
    ids = np.random.default_rng(seed).integers(0, 64, 1100).tolist()
    wanted, chunks = defined_logits(config, tensors, ids), 0

    def counted(*args: Any) -> Any:
        nonlocal chunks
        chunks += 1
        return type(ops).attend_by_heads(ops, *args)

    monkeypatch.setattr(ops, "attend_by_heads", counted, raising=False)
    model_config, source, _ = open_weights(tmp_path)
    model = bare_model(model_config, load_weights(ops, model_config, source), ("ring4", "ring4"), ops=ops)
    source.close()
    results = []
    for rows in (512, 200):
        monkeypatch.setattr(ops, "prefill_rows", rows)
        results.append(prefill_logits(model, ids))
        assert np.abs(results[-1] - wanted).max() <= 3e-6 * spread(wanted)
    np.testing.assert_array_equal(*results)
    assert chunks == 2 * (3 + 6)
